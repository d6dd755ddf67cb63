"""Tests of whether two sets of samples come from the same distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scipy.stats import chi2_contingency

MIN_CELL = 20
"""Smallest count of an outcome, over both sets, for a cell of its own."""


def two_sample_p(first: Sequence[object], second: Sequence[object]) -> float:
    """Return the p-value of a chi-squared test of homogeneity; rare outcomes are pooled."""
    a, b = Counter(first), Counter(second)
    cells: list[tuple[int, int]] = []
    rest_a = rest_b = 0
    for outcome in a.keys() | b.keys():
        if a[outcome] + b[outcome] >= MIN_CELL:
            cells.append((a[outcome], b[outcome]))
        else:
            rest_a += a[outcome]
            rest_b += b[outcome]
    if rest_a + rest_b:
        cells.append((rest_a, rest_b))
    if len(cells) < 2:
        return 1.0
    return float(chi2_contingency(list(zip(*cells, strict=True))).pvalue)


def same_distribution(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Return p-values for each position, each pair of neighbours, and the whole sequence."""
    length = len(first[0])
    tests = {
        f"token {i}": two_sample_p([s[i] for s in first], [s[i] for s in second])
        for i in range(length)
    }
    for i in range(length - 1):
        tests[f"tokens {i}-{i + 1}"] = two_sample_p(
            [tuple(s[i : i + 2]) for s in first], [tuple(s[i : i + 2]) for s in second]
        )
    tests["sequence"] = two_sample_p([tuple(s) for s in first], [tuple(s) for s in second])
    return tests
