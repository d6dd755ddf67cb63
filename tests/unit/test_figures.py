"""Figures in the text come from data: any difference between text and results is found."""

import copy
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


def said(differences: list[Any]) -> list[str]:
    return [str(difference) for difference in differences]


def with_changed(name: str, change: Any, folder: Path) -> Path:
    """Write a changed copy of one result to a folder, and return the folder."""
    doc = copy.deepcopy(json.loads((RESULTS / f"{name}.json").read_text()))
    change(doc)
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(doc))
    return folder


def test_text_and_results_agree(figures: ModuleType) -> None:
    """The check of `make lint`: on every page all names resolve and nothing differs."""
    results = figures.Results(RESULTS)
    for path in figures.pages():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        after, differences = figures.rendered(text, name, results)
        assert said(differences) == []
        assert after == text
        assert said(figures.strays(text, name)) == []


def test_every_figure_can_be_rendered(figures: ModuleType) -> None:
    from registry import FIGURES, render  # type: ignore[import-not-found]

    results = figures.Results(RESULTS)
    assert all(render(name, results) for name in FIGURES)


def test_a_changed_figure_in_the_text_is_found(figures: ModuleType) -> None:
    results = figures.Results(RESULTS)
    text = "One\nrow took <!--=packing.padded.median-->9.99x<!--/--> as long.\n"
    after, differences = figures.rendered(text, "page.md", results)
    (found,) = said(differences)
    assert found.startswith("page.md:2: the text says '9.99x', the data '")
    assert figures.rendered(after, "page.md", results) == (after, [])


def test_a_changed_table_is_found_line_by_line(figures: ModuleType) -> None:
    results = figures.Results(RESULTS)
    right, _ = figures.rendered("<!-- table: neighbour -->\n<!-- /table -->\n", "p.md", results)
    wrong = re.sub(r"1\.\d+x", "0.500x", right, count=1)
    (found,) = said(figures.rendered(wrong, "p.md", results)[1])
    assert re.match(r"p\.md:5: the text says '.*0\.500x.*', the data '.*1\.\d+x", found)
    assert "cores, 20" in right  # CPU and day stand below it


def test_a_changed_value_in_the_data_is_found(figures: ModuleType, tmp_path: Path) -> None:
    text = (
        "<!-- table: strategy.replay -->\n<!-- /table -->\nIt is <!--=packing.sorted-->?<!--/-->."
    )
    right, _ = figures.rendered(text, "p.md", figures.Results(RESULTS))

    def double(doc: Any) -> None:
        doc["sorted"]["packed_is_faster_by"] *= 2

    def lower(doc: Any) -> None:
        for rows in doc["results"].values():
            for row in rows:
                row["of_oracle"] /= 2

    with_changed("packing", double, tmp_path)
    with_changed("strategy/strategy", lower, tmp_path)
    _, differences = figures.rendered(right, "p.md", figures.Results(tmp_path))
    rows = right.count("\n| recorded here") + right.count("\n| H100")
    assert len(differences) == rows + 1


def test_an_unknown_name_is_an_error_that_names_it(figures: ModuleType, tmp_path: Path) -> None:
    results = figures.Results(RESULTS)
    text = "It is <!--=packing.paded-->1<!--/-->."
    after, differences = figures.rendered(text, "p.md", results)
    assert after == text
    assert said(differences) == [
        "p.md:1: no figure is called packing.paded; did you mean packing.padded?"
    ]
    text = text.replace("paded", "padded")
    missing = figures.rendered(text, "p.md", figures.Results(tmp_path))
    assert "no benchmarks/results/packing.json" in str(missing[1][0])


def test_a_result_without_provenance_is_an_error(figures: ModuleType, tmp_path: Path) -> None:
    folder = with_changed("overhead", lambda doc: doc.pop("provenance"), tmp_path)
    text = "<!-- table: overhead -->\n<!-- /table -->\n"
    (found,) = said(figures.rendered(text, "p.md", figures.Results(folder))[1])
    assert "overhead.json has no provenance" in found


@pytest.mark.parametrize(
    "text",
    [
        "It is <!--=packing.padded-->1.",
        "<!-- table: overhead -->\n| a |\n",
        "It is\n<!--=packing.padded-->2.12x (1.30 to 2.34)<!--/--> as fast.",
    ],
)
def test_markers_that_would_not_work_are_found(figures: ModuleType, text: str) -> None:
    assert figures.rendered(text, "p.md", figures.Results(RESULTS))[1]


def test_markers_in_code_are_left_alone(figures: ModuleType) -> None:
    text = "```\nIt is <!--=any-->1<!--/-->.\n<!-- table: any -->\n```\n"
    assert figures.rendered(text, "p.md", figures.Results(RESULTS)) == (text, [])


def test_measurements_that_are_not_rendered_are_found(figures: ModuleType) -> None:
    text = "A run is 1.7x as fast.\nIt takes 20 ms, or 12% at worst.\n`2x` <!--=a-->3x<!--/-->\n"
    found = said(figures.strays(text, "p.md"))
    assert [line.split(" is not")[0] for line in found] == [
        "p.md:1: '1.7x'",
        "p.md:2: '20 ms'",
        "p.md:2: '12% at worst'",
    ]
    assert figures.strays("drafting made less than 1.03x the tokens", "docs/sight.md") == []


def test_given_numbers_are_still_in_the_text(figures: ModuleType) -> None:
    for page, given in figures.GIVEN.items():
        for text in given:
            assert text in (ROOT / page).read_text(), f"{page} no longer says {text!r}"


def test_the_tables_of_the_scaling_page_are_those_of_the_script() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "volumes.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    page = set((ROOT / "docs" / "scaling.md").read_text().splitlines())
    assert [line for line in made.splitlines() if line.startswith("|") and line not in page] == []
