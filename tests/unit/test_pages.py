"""The documentation stays short: bounds on its pages and words."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = {"api.md", "commands.md", "configuration.md", "metrics.md", "scenario.md"}
"""References, written from the source or checked against it."""
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
WRITTEN = [*(path for path in DOCS if path.name not in GENERATED), RESULTS]

MAX_README_LINES = 110
MAX_PAGES = 16
MAX_WORDS = 28_000
MAX_RESULTS_WORDS = 3_500


def words(path: Path) -> int:
    return len(path.read_text().split())


def test_the_readme_fits_on_two_screens() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


def test_the_pages_are_few() -> None:
    assert {path.name for path in DOCS} >= GENERATED
    assert len(WRITTEN) <= MAX_PAGES, [path.name for path in WRITTEN]


def test_the_pages_are_short() -> None:
    counted = {path.name: words(path) for path in WRITTEN}
    assert sum(counted.values()) <= MAX_WORDS, counted
    assert words(RESULTS) <= MAX_RESULTS_WORDS


def test_pages_open_with_what_the_reader_can_do() -> None:
    opening = "This page is for people who"
    assert [path.name for path in (README, RESULTS, *DOCS) if opening in path.read_text()] == []
