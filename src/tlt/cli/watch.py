"""`tlt watch`: a run in progress, in a terminal."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tlt.cli.options import print_json

if TYPE_CHECKING:
    from tlt.observe.health import Finding
    from tlt.observe.live import Now, WorkerNow
    from tlt.observe.summary import Record
    from tlt.simulate.saved import Saved
    from tlt.spans import Span

COLOURS = {
    "generating": "blue",
    "training": "green",
    "idle": "yellow",
    "updating": "magenta",
    "lost": "red",
}
MAX_ROWS = 24
STALE_S = 15.0
"""Age at which `live.json` is that of a killed run."""
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
    """What the files of a run say about its latest RL steps."""

    records: list[Record] = field(default_factory=list)
    arms: dict[str, tuple[str, float]] = field(default_factory=dict)
    """The arm that each worker decoded with for longest, and its acceptance length."""
    findings: list[Finding] = field(default_factory=list)
    saved: Saved | None = None
    fault: str = ""
    """Why the files cannot be read."""


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run in progress.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the state once, as JSON, and exit.")
    ] = False,
) -> None:
    """Watch a run: every worker, the end of the RL step, leases, the gain, what holds it back."""
    from rich.live import Live

    from tlt.errors import ConfigError
    from tlt.train.folder import is_open

    if not (run / "config.toml").exists():
        raise ConfigError(f"{run} holds no run of `tlt train`; give the folder that run.out named")
    if as_json:
        print_json(_data(_read(run), read_past(run)))
        return
    console = Console()
    if once:
        console.print(_view(run))
        return
    with Live(_view(run), console=console, refresh_per_second=2) as live:
        try:
            # A run takes minutes to start, and has its folder open all the time.
            while _read(run) is not None or is_open(run):
                time.sleep(0.5)
                live.update(_view(run))
        except KeyboardInterrupt:
            return
    console.print(
        f"the run is not in progress; see: tlt report {run}", highlight=False, markup=False
    )


# --- what is known --------------------------------------------------------------------------------


def _read(run: Path) -> Now | None:
    """Return the contents of `live.json`; None if there is none or the run was killed."""
    from tlt.observe.live import read_live

    found = read_live(run / "live.json")
    return found if found is not None and time.time() - found.at_s < STALE_S else None


def read_past(run: Path) -> Past:
    """Return what the run's files say; they are read again only when an RL step has been added."""
    files = [run / name for name in ("metrics.jsonl", "timeline.json", "config.toml")]
    found = [path.stat() for path in files if path.exists()]
    return _read_past(run, tuple((file.st_mtime_ns, file.st_size) for file in found))


@lru_cache(maxsize=1)
def _read_past(run: Path, marks: tuple[tuple[int, int], ...]) -> Past:
    """Read the latest RL steps; a file that is damaged costs only what it would have said."""
    from tlt.errors import ConfigError
    from tlt.report.findings import findings
    from tlt.report.view import look_at

    if not (run / "metrics.jsonl").exists():
        return Past()
    try:
        view = look_at(run, NUM_STEPS)
        arms = _arms(view.timelines[-1].rows) if view.timelines else {}
        past = Past(view.records, arms, [f for f in findings(view) if f.kind != "nothing"])
        if importlib.util.find_spec("numpy") is not None:
            from tlt.simulate.saved import saved

            past.saved = saved(view)
        return past
    except (ConfigError, OSError) as error:
        return Past(fault=str(error))


def _arms(rows: Mapping[str, Sequence[Span]]) -> dict[str, tuple[str, float]]:
    found = {}
    for worker, spans in rows.items():
        seconds: dict[str, float] = {}
        for span in spans:
            if span.state == "generating" and span.arm:
                seconds[span.arm] = seconds.get(span.arm, 0.0) + span.seconds
        if seconds:
            arm = max(seconds, key=seconds.__getitem__)
            own = [span for span in spans if span.arm == arm]
            drafts, accepted = sum(s.drafts for s in own), sum(s.accepted for s in own)
            found[worker] = arm, 1 + accepted / drafts if drafts else 1.0
    return found


def _data(now: Now | None, past: Past) -> dict[str, Any]:
    """Return what is shown, ready for JSON."""
    from tlt.observe.live import step_remaining_s

    saved = past.saved
    return {
        "now": now.model_dump() if now else None,
        "step_remaining_s": step_remaining_s(now, past.records) if now else None,
        "arms": {
            worker: {"arm": arm, "acceptance_length": length}
            for worker, (arm, length) in past.arms.items()
        },
        "leased": sum(w.state == "training" for w in now.workers.values()) if now else 0,
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


# --- what is shown --------------------------------------------------------------------------------


def _view(run: Path) -> RenderableType:
    now, past = _read(run), read_past(run)
    shown: list[RenderableType] = [Text(f"{run}: no step is under way (starting up, or ended)")]
    if now is not None:
        workers = _workers(now.workers, now.total, past.arms)
        shown = [_headline(now, past), workers, *_leases(now), _last(now.record)]
    rest = [Text(f"no findings: {past.fault}", style="dim")] if past.fault else []
    # What is wrong with samples or learning comes first; what costs time, last.
    grave = [finding for finding in past.findings if finding.weight > GRAVE]
    costly = past.findings[len(grave) :][:NUM_FINDINGS]
    return Group(
        *_findings(grave, "bold red"), *shown, *_gain(past), *rest,
        *_findings(costly, "yellow"),
    )  # fmt: skip


def _headline(now: Now, past: Past) -> Text:
    from tlt.observe.live import step_remaining_s

    step, colon, stage = now.what.partition(":")
    what = f"{step} of {now.num_steps}:{stage}" if colon else now.what
    text = Text(what, style="bold")
    text.append(f"  {now.done:.0f} of {now.total:.0f}", style="")
    text.append(f"  for {now.at_s - now.since_s:.0f} s", style="dim")
    if now.remaining_s is not None:
        text.append(f"  about {now.remaining_s:.0f} s to the end of the tail", style="yellow")
    to_the_end_s = step_remaining_s(now, past.records)
    if to_the_end_s is not None:
        text.append(f"  {to_the_end_s:.0f} s to the end of the RL step", style="yellow")
    return text


def _workers(
    workers: Mapping[str, WorkerNow], total: float, arms: Mapping[str, tuple[str, float]]
) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "state", "requests", "last arm", "accepts", ""):
        right = heading in ("requests", "accepts")
        table.add_column(heading, justify="right" if right else "left")
    most = max([total / max(1, len(workers)), 1, *(worker.running for worker in workers.values())])
    # Too many workers: show the busiest.
    shown = list(workers.items())
    if len(shown) > MAX_ROWS:
        shown = sorted(shown, key=lambda item: -item[1].running)[:MAX_ROWS]
    for name, worker in shown:
        colour = COLOURS.get(worker.state, "dim")
        arm, length = arms.get(name, ("-", None))
        table.add_row(
            escape(name),
            f"[{colour}]{escape(worker.state)}[/]",
            str(worker.running),
            arm,
            "-" if length is None else f"{length:.2f}",
            f"[{colour}]{'█' * round(30 * worker.running / most)}[/]",
        )
    if len(workers) > MAX_ROWS:
        states = Counter(worker.state for worker in workers.values())
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        table.add_row(f"... {len(workers)} in all", escape(counts))
    return table


def _leases(now: Now) -> list[Text]:
    """Return who trains the drafter now, and what came of it in the last RL step."""
    record = now.record
    if "harvest/used_s" not in record:
        return []
    training = sum(worker.state == "training" for worker in now.workers.values())
    text = (
        f"leases: {training} of {len(now.workers)} workers train the drafter, "
        f"{record['harvest/used_s']:.1f} of {record.get('harvest/idle_s', 0.0):.1f} idle seconds "
        f"used in the last RL step, {record.get('harvest/published', 0):.0f} published"
    )
    if length := record.get("harvest/held_out_length"):
        text += f", held-out acceptance length {length:.2f}"
    return [Text(text, style="green" if training else "")]


def _last(record: Mapping[str, float]) -> Text:
    if not {"reward/mean", "step"} <= record.keys():
        return Text("no RL step is done yet", style="dim")
    cells = [f"{title} {form.format(record[n])}" for title, n, form in LAST_STEP if n in record]
    return Text(f"RL step {record['step']:.0f}: " + ", ".join(cells))


def _gain(past: Past) -> list[Text]:
    if past.saved is None:
        return []
    found = past.saved
    if found.is_bound:
        says = f"rollouts at most {found.gain:.2f}x as fast as without drafts (engines hardly ever "
        says += "decode plainly, so there is nothing to model it by"
    else:
        says = f"rollouts {found.gain:.2f}x as fast as without drafts (modelled: "
        says += f"{found.measured_s:.0f} s instead of {found.plain_s:.0f} s in the last RL steps"
    return [Text(f"{says}; measure with `tlt report OFF TLT`)")]


def _findings(found: Sequence[Finding], style: str) -> list[Text]:
    return [Text(f"{each.says}\n  -> {each.change}", style=style) for each in found]
