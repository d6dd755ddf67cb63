"""Figures in the text come from data: any difference between text and results is found."""

import json
import subprocess
import sys
from pathlib import Path

from script_files import ROOT, script

figures = script("benchmarks/figures.py")
RESULTS = figures.Results(ROOT / "benchmarks" / "results")


def test_text_and_results_agree() -> None:
    """The check of `make lint`: on every page all names resolve and nothing differs."""
    for path in figures.pages():
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        assert figures.rendered(text, name, RESULTS) == (text, [])
        assert figures.strays(text, name) == []


def test_changed_text_and_unknown_names_are_found() -> None:
    text = "One\nrow took <!--=history.own-->9.99<!--/--> as long.\n"
    after, (found,) = figures.rendered(text, "p.md", RESULTS)
    assert found.startswith("p.md:2: the text says '9.99', the data '")
    assert figures.rendered(after, "p.md", RESULTS) == (after, [])
    for wrong in (
        "It is <!--=history.ownn-->1<!--/-->.",
        "It is <!--=history.own-->1.",
        "<!-- table: overhead -->\n| a |\n",
        f"It is\n{after.split(' took ')[1]}",
    ):
        assert figures.rendered(wrong, "p.md", RESULTS)[1], wrong


def test_changed_data_is_found(tmp_path: Path) -> None:
    right, _ = figures.rendered("<!-- table: overhead -->\n<!-- /table -->\n", "p.md", RESULTS)
    doc = json.loads((ROOT / "benchmarks" / "results" / "overhead.json").read_text())
    doc["results"][0]["ratios"]["tlt / bare"] = [7.0]
    (tmp_path / "overhead.json").write_text(json.dumps(doc))
    assert figures.rendered(right, "p.md", figures.Results(tmp_path))[1]
    del doc["provenance"]
    (tmp_path / "overhead.json").write_text(json.dumps(doc))
    assert "provenance" in figures.rendered(right, "p.md", figures.Results(tmp_path))[1][0]


def test_measurements_that_are_not_rendered_are_found() -> None:
    text = "A run is 1.7x as fast.\nIt takes 20 ms.\n`2x` <!--=a-->3x<!--/-->\n"
    found = figures.strays(text, "p.md")
    assert [line.split(" is not")[0] for line in found] == ["p.md:1: '1.7x'", "p.md:2: '20 ms'"]


def test_the_volumes_of_large_clusters_are_those_of_the_script() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "volumes.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "benchmarks" / "results" / "volumes.md").read_text() == made
    page = (ROOT / "docs" / "simulator.md").read_text()
    shares = page.partition("| 7B / 32B / 70B |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(shares) > 5
    assert set(shares) <= set(made.splitlines())
