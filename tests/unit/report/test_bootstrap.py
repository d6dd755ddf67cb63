"""The bootstrap interval."""

from statistics import fmean

from tlt.report.bootstrap import interval


def test_equal_values_have_no_interval() -> None:
    assert interval(fmean, [2.0] * 5, 50) == (2.0, 2.0)


def test_the_interval_of_a_mean_is_about_two_standard_errors_wide() -> None:
    values = [float(n % 10) for n in range(400)]  # standard error 2.87 / 20
    low, high = interval(fmean, values, 500)
    assert 4.1 < low < 4.3
    assert 4.7 < high < 4.9


def test_two_figures_are_computed_from_the_same_draws() -> None:
    drawn: list[list[int]] = []

    def first(values: object) -> float:
        assert isinstance(values, list)
        drawn.append(values)
        return float(values[0])

    interval(first, range(9), 20)
    interval(first, range(9), 20)
    assert drawn[:20] == drawn[20:]
