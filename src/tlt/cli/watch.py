"""`tlt watch`: a run in progress, in a terminal."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tlt.cli.options import option
from tlt.cli.output import Output

if TYPE_CHECKING:
    from tlt.observe.health import Finding
    from tlt.observe.live import Now
    from tlt.observe.summary import Record
    from tlt.simulate.saved import Saved

COLOURS = {
    "generating": "blue",
    "tools": "cyan",
    "training": "green",
    "idle": "yellow",
    "updating": "magenta",
    "lost": "red",
}
MAX_ROWS = 24
STALE_S = 15.0
"""Age from which `live.json` counts as left behind by a killed run."""
NUM_STEPS = 12
"""Latest RL steps that findings, arms and the gain are about."""
NUM_FINDINGS = 3
LAST_STEP = (
    ("reward", "reward/mean", "{:.3f}"),
    ("acceptance length", "rollout/acceptance_length", "{:.2f}"),
    ("tokens/s", "rollout/tokens_per_s", "{:.0f}"),
    ("seconds", "time/step_s", "{:.1f}"),
    ("policy", "policy_version", "v{:.0f}"),
    ("drafter", "drafter_version", "v{:.0f}"),
)

GRAVE = 1.0
"""Weight from which a finding is about samples or learning, not about speed."""


@dataclass(slots=True)
class Past:
    """A run's latest RL steps, read from its files."""

    records: list[Record] = field(default_factory=list)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The arm that each worker decoded with for longest, and its acceptance length."""
    findings: list[Finding] = field(default_factory=list)
    saved: Saved | None = None
    fault: str = ""
    """Why the files cannot be read."""


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run in progress.")],
    once: Annotated[bool, option("Print the state once and exit.", "--once")] = False,
    as_json: Annotated[bool, option("Print the state once, as JSON, and exit.", "--json")] = False,
) -> None:
    """Watch a run: workers, progress of the RL step, leases, gain, and what holds it back."""
    from rich.live import Live

    from tlt.errors import ConfigError
    from tlt.train.folder import is_open

    if not (run / "config.toml").exists():
        raise ConfigError(f"{run} holds no run of `tlt train`; give the folder that run.out named")
    output = Output(as_json)
    if as_json:
        output.result(_data(_read(run), read_past(run)))
        return
    if once:
        output.console.print(_view(run))
        return
    with Live(_view(run), console=output.console, refresh_per_second=2) as live:
        try:
            # A run takes minutes to start, and holds its folder all the time.
            while _read(run) is not None or is_open(run):
                time.sleep(0.5)
                live.update(_view(run))
        except KeyboardInterrupt:
            return
    output.say(f"the run is not in progress; see: tlt report {run}")


# --- what is known --------------------------------------------------------------------------------


def _read(run: Path) -> Now | None:
    """Return the contents of `live.json`; None if there is none or the run was killed."""
    from tlt.observe.live import read_live

    found = read_live(run / "live.json")
    return found if found is not None and time.time() - found.at_s < STALE_S else None


def read_past(run: Path) -> Past:
    """Return the run's latest RL steps; its files are read again only after an RL step."""
    files = [run / name for name in ("metrics.jsonl", "timeline.json", "config.toml")]
    found = [path.stat() for path in files if path.exists()]
    return _read_past(run, tuple((file.st_mtime_ns, file.st_size) for file in found))


@lru_cache(maxsize=1)
def _read_past(run: Path, marks: tuple[tuple[int, int], ...]) -> Past:
    """Read the latest RL steps; a damaged file costs only its own content."""
    from tlt.errors import ConfigError
    from tlt.report.findings import findings
    from tlt.report.view import by_arm, look_at

    if not (run / "metrics.jsonl").exists():
        return Past()
    try:
        view = look_at(run, NUM_STEPS)
        past = Past(view.records, findings=[f for f in findings(view) if f.kind != "nothing"])
        for worker, spans in view.timelines[-1].rows.items() if view.timelines else ():
            used = by_arm(span for span in spans if span.state == "generating" and span.arm)
            for arm, of in list(used.items())[:1]:
                length = of["acceptance_length"]
                past.arms[worker] = {"arm": arm, "acceptance_length": length}
        if importlib.util.find_spec("numpy") is not None:
            from tlt.simulate.saved import saved

            past.saved = saved(view)
        return past
    except (ConfigError, OSError) as error:
        return Past(fault=str(error))


def _data(now: Now | None, past: Past) -> dict[str, Any]:
    """Return the shown data, ready for JSON."""
    from tlt.observe.live import step_remaining_s

    saved = past.saved
    return {
        "now": now.model_dump() if now else None,
        "step_remaining_s": step_remaining_s(now, past.records) if now else None,
        "arms": past.arms,
        "leased": _leased(now) if now else 0,
        "gain": saved
        and {
            "modelled": saved.gain,
            "is_bound": saved.is_bound,
            "measured_s": saved.measured_s,
            "plain_s": saved.plain_s,
        },
        "findings": [{"kind": f.kind, "says": f.says, "change": f.change} for f in past.findings],
        "fault": past.fault or None,
    }


def _leased(now: Now) -> int:
    return sum(worker.state == "training" for worker in now.workers.values())


# --- what is shown --------------------------------------------------------------------------------


def _view(run: Path) -> RenderableType:
    now, past = _read(run), read_past(run)
    # What is wrong with samples or learning comes first; what costs time, last.
    grave = [finding for finding in past.findings if finding.weight > GRAVE]
    shown: list[RenderableType] = [_finding(each, "bold red") for each in grave]
    if now is None:
        shown.append(Text(f"{run}: no step is under way (starting up, or ended)"))
    else:
        shown += [_headline(now, past), _workers(now, past), *_last_step(now)]
    if past.saved is not None:
        shown.append(Text(_gain(past.saved)))
    if past.fault:
        shown.append(Text(f"no findings: {past.fault}", style="dim"))
    costly = past.findings[len(grave) :][:NUM_FINDINGS]
    return Group(*shown, *(_finding(each, "yellow") for each in costly))


def _headline(now: Now, past: Past) -> Text:
    from tlt.observe.live import step_remaining_s

    step, colon, stage = now.what.partition(":")
    what = f"{step} of {now.num_steps}:{stage}" if colon else now.what
    parts = [(what, "bold"), (f"  {now.done:.0f} of {now.total:.0f}", "")]
    parts.append((f"  for {now.at_s - now.since_s:.0f} s", "dim"))
    if now.remaining_s is not None:
        parts.append((f"  about {now.remaining_s:.0f} s to the end of the tail", "yellow"))
    if (left_s := step_remaining_s(now, past.records)) is not None:
        parts.append((f"  {left_s:.0f} s to the end of the RL step", "yellow"))
    return Text.assemble(*parts)


def _workers(now: Now, past: Past) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "state", "requests", "last arm", "accepts", ""):
        right = heading in ("requests", "accepts")
        table.add_column(heading, justify="right" if right else "left")
    shown = list(now.workers.items())
    most = max([now.total / max(1, len(shown)), 1, *(worker.running for _, worker in shown)])
    if len(shown) > MAX_ROWS:  # show the busiest
        shown = sorted(shown, key=lambda item: -item[1].running)[:MAX_ROWS]
    for name, worker in shown:
        colour = COLOURS.get(worker.state, "dim")
        arm = past.arms.get(name)
        table.add_row(
            Text(name),
            Text(worker.state, colour),
            str(worker.running),
            arm["arm"] if arm else "-",
            f"{arm['acceptance_length']:.2f}" if arm else "-",
            Text("█" * round(30 * worker.running / most), colour),
        )
    if len(now.workers) > MAX_ROWS:
        states = Counter(worker.state for worker in now.workers.values())
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        table.add_row(f"... {len(now.workers)} in all", Text(counts))
    return table


def _last_step(now: Now) -> Iterator[Text]:
    """Yield how many workers train the drafter, its progress, and the last RL step's figures."""
    record = now.record
    if "harvest/used_s" in record:
        leased, length = _leased(now), record.get("harvest/held_out_length")
        yield Text(
            f"leases: {leased} of {len(now.workers)} workers train the drafter, "
            f"{record['harvest/used_s']:.1f} of {record.get('harvest/idle_s', 0.0):.1f} idle "
            f"seconds used in the last RL step, {record.get('harvest/published', 0):.0f} published"
            + (f", held-out acceptance length {length:.2f}" if length else ""),
            style="green" if leased else "",
        )
    if {"reward/mean", "step"} <= record.keys():
        cells = [f"{title} {form.format(record[n])}" for title, n, form in LAST_STEP if n in record]
        yield Text(f"RL step {record['step']:.0f}: " + ", ".join(cells))
    else:
        yield Text("no RL step is done yet", style="dim")


def _gain(found: Saved) -> str:
    says = f"rollouts {found.gain:.2f}x as fast as without drafts (modelled: "
    says += f"{found.measured_s:.0f} s instead of {found.plain_s:.0f} s in the last RL steps"
    if found.is_bound:
        says = f"rollouts at most {found.gain:.2f}x as fast as without drafts (engines rarely "
        says += "decode plainly, so there is no data to model it"
    return f"{says}; measure with `tlt report OFF TLT`)"


def _finding(found: Finding, style: str) -> Text:
    return Text(f"{found.says}\n  -> {found.change}", style=style)
