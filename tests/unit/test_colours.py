"""Pictures can be read on light and dark pages, and give one thing one colour."""

from tlt import colours
from tlt.colours import COLOURS, INK
from tlt.observe.metrics import STAGES
from tlt.spans import STATES

LIGHT, DARK = "#ffffff", "#0d1117"


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_ink_and_colours_can_be_read_on_both_pages() -> None:
    for page in (LIGHT, DARK):
        assert contrast(INK, page) > 3.7
        assert all(contrast(colour, page) > 2.4 for colour in COLOURS)


def test_every_stage_and_state_has_a_colour() -> None:
    assert tuple(colours.STAGES) == STAGES
    assert tuple(colours.STATES) == tuple(STATES)
    assert colours.STAGES["rollout"] == colours.STATES["generating"]
    assert colours.STAGES["update"] == colours.STATES["updating"]
