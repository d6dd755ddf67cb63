"""Draw what the workers did in one RL step without and with TLT, on one time axis.

    python benchmarks/e2e/workers.py [OFF TLT] [--step N]

OFF and TLT are folders of runs that took turns (`runs/e2e/tail/0-off`, `runs/e2e/tail/0-tlt`).
Their states go to results/e2e/workers.json; without folders, the picture is drawn from that file.
Without `--step` it shows the RL step with an update whose speed-up is the median one. Writes
docs/pictures/workers.svg, whose ink can be read on a light and on a dark page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

from steps import rounded

from tlt.colours import INK, STATES
from tlt.observe.provenance import provenance
from tlt.observe.timeline import LEARNER, StepTimeline, read_timeline, worker_seconds

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "e2e" / "workers.json"
PICTURE = ROOT / "docs" / "pictures" / "workers.svg"
TITLES = {"off": "without TLT", "tlt": "with TLT"}
NAMES = {
    "generating": "generating",
    "idle": "idle",
    "training": "training the drafter",
    "updating": "updating the policy",
    "swapping": "weight sync",
    "waiting": "waiting",
}
WIDTH, LEFT, RIGHT, ROW, GAP = 690, 130, 76, 28, 6
LETTER = 9.2
"""Width of a letter in the legend; at 18 pixels, text can still be read on a phone."""


def states(timeline: StepTimeline) -> dict[str, list[list[Any]]]:
    """Return state, begin and end of every worker, in seconds since the rollout began.

    Before that, the run waits for its turn.
    """
    workers = {name: spans for name, spans in timeline.rows.items() if name != LEARNER}
    begun_s = min(s.start_s for spans in workers.values() for s in spans if s.state != "waiting")
    found: dict[str, list[list[Any]]] = {}
    for worker, spans in workers.items():
        row = found.setdefault(worker, [])
        for span in spans:
            begin_s, end_s = span.start_s - begun_s, span.end_s - begun_s
            if end_s <= 0:
                continue
            if row and row[-1][0] == span.state:
                row[-1][2] = end_s
            else:
                row.append([span.state, max(0.0, begin_s), end_s])
    return found


def seconds(timeline: StepTimeline) -> float:
    """Return the seconds from the rollout's begin to the RL step's end."""
    return float(max(row[-1][2] for row in states(timeline).values()))


def updating_s(timeline: StepTimeline) -> float:
    """Return the seconds of the worker that updated the policy for the shortest time."""
    return min(of["updating"] for of in worker_seconds([timeline]).values())


def typical(steps: dict[str, dict[int, StepTimeline]]) -> int:
    """Return the RL step, after the first, with an update, whose speed-up is the median one."""
    both = sorted(steps["off"].keys() & steps["tlt"].keys())[1:]
    both = [step for step in both if updating_s(steps["off"][step]) > 1]
    ordered = sorted(
        both, key=lambda step: seconds(steps["off"][step]) / seconds(steps["tlt"][step])
    )
    return ordered[(len(ordered) - 1) // 2]


def text(parent: Element, x: float, y: float, says: str, **attributes: str) -> None:
    SubElement(parent, "text", x=f"{x:.1f}", y=f"{y:.1f}", **attributes).text = says


def draw(doc: dict[str, Any]) -> Element:
    """Return the picture."""
    longest_s = max(row[-1][2] for rows in doc["arms"].values() for row in rows.values())
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    svg = Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
    svg.set("aria-label", "what two workers do in one RL step, without and with TLT")
    SubElement(svg, "style").text = (
        f"text{{font:18px system-ui,sans-serif;fill:{INK}}}.in{{fill:#fff;font-size:16px}}"
        ".total{font-weight:600}"
    )
    ends_s = {arm: max(row[-1][2] for row in rows.values()) for arm, rows in doc["arms"].items()}
    earlier_s = ends_s["off"] - ends_s["tlt"]
    title = f"Drafts end this RL step {earlier_s:.1f} s earlier; idle time trains the drafter"
    text(svg, WIDTH / 2, 20, title, **{"text-anchor": "middle", "class": "total"})
    y = 40.0
    used: list[str] = []
    for arm, rows in doc["arms"].items():
        end_s = ends_s[arm]
        middle = y + len(rows) * (ROW + GAP) / 2
        text(svg, LEFT - 12, middle + 3, TITLES[arm], **{"text-anchor": "end", "class": "total"})
        text(svg, LEFT + end_s * scale + 8, middle + 3, f"{end_s:.1f} s", **{"class": "total"})
        for spans in rows.values():
            for state, begin_s, stop_s in spans:
                x, width = LEFT + begin_s * scale, (stop_s - begin_s) * scale
                box = SubElement(svg, "rect", x=f"{x:.1f}", y=f"{y:.1f}", width=f"{width:.1f}")
                box.set("height", str(ROW))
                box.set("fill", STATES[state])
                if state not in used:
                    used.append(state)
                if state in ("idle", "training") and width > 40:
                    fill = {} if state == "training" else {"style": "fill:#57606a"}
                    says = f"{stop_s - begin_s:.1f} s"
                    anchor = {"text-anchor": "middle", "class": "in"}
                    text(svg, x + width / 2, y + ROW / 2 + 5, says, **anchor, **fill)
            y += ROW + GAP
        y += 12
    x = float(LEFT)
    for state in (name for name in NAMES if name in used):
        if x + 21 + LETTER * len(NAMES[state]) > WIDTH:
            x, y = float(LEFT), y + 28
        box = SubElement(svg, "rect", x=f"{x:.1f}", y=f"{y:.1f}", width="15", height="15")
        box.set("fill", STATES[state])
        text(svg, x + 21, y + 14, NAMES[state])
        x += 40 + LETTER * len(NAMES[state])
    svg.set("viewBox", f"0 0 {WIDTH} {y + 22:.0f}")
    return svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--step", type=int)
    options = parser.parse_args()
    if options.runs:
        found = {
            arm: {each.step: each for each in read_timeline(out / "timeline.json")}
            for arm, out in zip(TITLES, options.runs, strict=True)
        }
        step = options.step or typical(found)
        arms = {arm: states(found[arm][step]) for arm in TITLES}
        result = {"provenance": provenance(), "step": step, "arms": rounded(arms)}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PICTURE.write_bytes(tostring(draw(json.loads(RESULT.read_text()))) + b"\n")


if __name__ == "__main__":
    main()
