"""Render the measurements stated in the documentation from the results under benchmarks/results.

    python benchmarks/figures.py             rewrite README.md, docs/*.md and those of benchmarks
    python benchmarks/figures.py --check     list what disagrees with the results, and exit with 1

A figure within a sentence stands between two comments, a table between two lines:

    TLT is <!--=e2e.tail.tlt-->1.60x and 1.79x<!--/--> as fast.

    <!-- table: e2e.tail -->
    ...
    <!-- /table -->

The names are declared in benchmarks/registry, grouped by result file. `strays` finds text that
looks like a measurement and is not rendered; numbers that are settings or published elsewhere and
look the same are listed in `GIVEN`, with their source. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from registry import Results, UnknownFigure, render

ROOT = Path(__file__).parents[1]
MARKED = re.compile(
    r"<!--=(?P<figure>[^\s>]+)-->(?P<stated>(?:(?!<!--).)*)<!--/-->"
    r"|<!-- table: (?P<table>\S+) -->\n(?P<rows>(?:(?!<!--).)*)<!-- /table -->",
    re.S,
)
OPENED = re.compile(r"<!--=|<!-- table:")
FENCED = re.compile(r"^```.*?^```", re.S | re.M)

MEASURED = re.compile(
    r"\b\d+(?:\.\d+)?x(?!\w)"  # a speed-up
    r"|\b\d[\d,.]* (?:ms|µs|microseconds|MiB|tokens/s|tokens a (?:second|step)|events a second)\b"
    r"|\bp = 0\.\d+"
    r"|\(\d+\.\d+(?: to |-)\d+\.\d+"  # a range
    r"|\b(?:\d+|half an?|two|three|four|five|ten|twenty) (?:minutes?|hours?)\b"
    r"|\b\d+% (?:in the median|at worst|faster|slower|shorter)"
)
"""Text that looks like a measurement."""

GIVEN = {
    "README.md": {"trained for five minutes": "the budget of benchmarks/emulated.py"},
    "benchmarks/README.md": {"22 minutes": "the budget that `tlt models sft` was given"},
    "docs/commands.md": {"at most five minutes": "limit of cli/demo.py"},
    "docs/compared.md": {
        "50% slower": "verl's documentation, docs/advance/mtp.md",
        "20% faster": "the README of verl-SpeCo",
        "up to 2.1x": "verl pull request 4535",
        "rollouts 2.03x, RL steps 1.62x": "SkyRL's documentation, examples/spec_decode",
        "rollouts 1.8x": "NeMo-RL's paper, arXiv 2604.26779",
        "up to 2.5x end": "NeMo-RL's paper, arXiv 2604.26779",
        "1.7x to 2.1x end": "the TLT paper, arXiv 2511.16665",
    },
    "docs/quickstart.md": {"at most five minutes": "limit of cli/demo.py"},
    "docs/drafter.md": {"trained for five minutes": "the budget of benchmarks/emulated.py"},
    "docs/operations.md": {
        "above 64 MiB": "limit of observe/timeline.py",
        "less than 1.03x": "limit of report/findings.py",
    },
    "docs/simulator.md": {"trained for five minutes": "the budget of benchmarks/emulated.py"},
}
"""Numbers that look like measurements and are not, by page, with where they come from."""


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages whose figures are rendered."""
    benchmarks = [root / "benchmarks" / name for name in ("README.md", "results/README.md")]
    return [root / "README.md", *benchmarks, *sorted(root.glob("docs/*.md"))]


def rendered(text: str, page: str, results: Results) -> tuple[str, list[str]]:
    """Return a page with every figure as the results have it, and what was wrong in the text."""
    wrong = []
    code = [found.span() for found in FENCED.finditer(text)]
    parts, end = [], 0
    for found in MARKED.finditer(text):
        if any(begin <= found.start() < stop for begin, stop in code):
            continue
        at = f"{page}:{text.count(chr(10), 0, found.start()) + 1}"
        name, kind = found["figure"] or found["table"], "stated" if found["figure"] else "rows"
        made = stated = found[kind]
        try:
            made = render(name, results)
            if found["table"]:
                made = f"\n{made.strip()}\n\n"
        except UnknownFigure as error:
            wrong.append(f"{at}: {error}")
        if (
            found["figure"]
            and not text[text.rfind("\n", 0, found.start()) + 1 : found.start()].strip()
        ):
            # Markdown takes a line that begins with a comment for HTML, and ends the paragraph.
            wrong.append(f"{at}: {name} may not begin a line")
        if made != stated:
            said = f"the text says {stated!r}, the data {made!r}"
            wrong.append(f"{at}: {said if found['figure'] else f'the table {name} differs'}")
        begin, stop = found.span(kind)
        parts += [text[end:begin], made]
        end = stop
    result = "".join([*parts, text[end:]])
    if opened := OPENED.search(MARKED.sub("", FENCED.sub("", result))):
        wrong.append(f"{page}: {opened[0]} is not closed, or holds another marker")
    return result, wrong


def strays(text: str, page: str) -> list[str]:
    """Return what looks like a measurement outside markers, code and `GIVEN`."""
    for pattern in (FENCED, MARKED, re.compile(r"`[^`]*`"), re.compile(r"\]\([^)]*\)")):
        text = pattern.sub(lambda m: "\n" * m[0].count("\n"), text)
    for given in GIVEN.get(page, {}):
        text = text.replace(given, "")
    return [
        f"{page}:{number}: {match[0]!r} is not rendered; add a marker, or to GIVEN"
        for number, line in enumerate(text.split("\n"), 1)
        for match in MEASURED.finditer(line)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="rewrite nothing; 1 on differences")
    options = parser.parse_args()
    results = Results(ROOT / "benchmarks" / "results")
    wrong: list[str] = []
    for path in pages():
        name, before = path.relative_to(ROOT).as_posix(), path.read_text()
        after, differences = rendered(before, name, results)
        if not options.check:
            if after != before:
                path.write_text(after)
                print(f"rewrote {name}: {len(differences)} figures")
            _, differences = rendered(after, name, results)  # what no rewriting mends
        wrong += [*differences, *strays(after, name)]
    if wrong:
        print("\n".join(wrong))
        sys.exit(f"{len(wrong)} figures disagree with benchmarks/results; run `make figures`")


if __name__ == "__main__":
    main()
