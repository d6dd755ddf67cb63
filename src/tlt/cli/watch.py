"""`tlt watch`: a run in progress, in a terminal."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tlt.cli.options import print_json

if TYPE_CHECKING:
    from tlt.observe.live import Now, WorkerNow
    from tlt.observe.summary import Record
    from tlt.report.findings import Bottleneck
    from tlt.simulate.saved import Saved

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

ALARMS = {
    "learner/gap_alarms": "engines and learner disagree about the samples of this RL step",
    "recheck/faults": "samples of this RL step come out different without drafts",
    "rollout/policy_mismatches": "an engine held another policy than the learner's",
}


@dataclass(frozen=True, slots=True)
class WorkerArm:
    """What a worker decoded with in the last RL step."""

    arm: str
    acceptance_length: float


@dataclass(slots=True)
class Past:
    """What the files of a run say about its latest RL steps."""

    records: list[Record] = field(default_factory=list)
    arms: dict[str, WorkerArm] = field(default_factory=dict)
    findings: list[Bottleneck] = field(default_factory=list)
    saved: Saved | None = None
    fault: str = ""
    """Why the files cannot be read."""


class Files:
    """The run's files, read again only when an RL step has been added."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: tuple[Any, ...] | None = None
        self._past = Past()

    def past(self) -> Past:
        marks = tuple(
            (found.st_mtime_ns, found.st_size) if (found := _stat(self._run / name)) else None
            for name in ("metrics.jsonl", "timeline.json", "config.toml")
        )
        if marks != self._seen:
            self._seen, self._past = marks, _read_past(self._run)
        return self._past


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
    files = Files(run)
    if as_json:
        print_json(_data(_read(run), files.past()))
        return
    console = Console()
    if once:
        console.print(_view(run, files))
        return
    with Live(_view(run, files), console=console, refresh_per_second=2) as live:
        try:
            # A run takes minutes to start, and has its folder open all the time.
            while _read(run) is not None or is_open(run):
                time.sleep(0.5)
                live.update(_view(run, files))
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


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:
        return None


def _read_past(run: Path) -> Past:
    """Read the latest RL steps; a file that is damaged costs only what it would have said."""
    from tlt.errors import ConfigError
    from tlt.report.findings import findings
    from tlt.report.view import look_at

    if not (run / "metrics.jsonl").exists():
        return Past()
    try:
        view = look_at(run, NUM_STEPS)
        past = Past(view.records)
        if view.timelines:
            past.arms = _arms(view.timelines[-1].rows)
        past.findings = findings(view)
        if importlib.util.find_spec("numpy") is not None:
            from tlt.simulate.saved import saved

            past.saved = saved(view)
        return past
    except (ConfigError, OSError) as error:
        return Past(fault=str(error))


def _arms(rows: Mapping[str, Sequence[Any]]) -> dict[str, WorkerArm]:
    """Return the arm that every worker decoded with for longest, and its acceptance length."""
    found = {}
    for worker, spans in rows.items():
        seconds: dict[str, float] = {}
        for span in spans:
            if span.state == "generating" and span.arm:
                seconds[span.arm] = seconds.get(span.arm, 0.0) + span.seconds
        if seconds:
            arm = max(seconds, key=lambda each: seconds[each])
            own = [span for span in spans if span.arm == arm]
            drafts, accepted = (sum(getattr(s, n) for s in own) for n in ("drafts", "accepted"))
            found[worker] = WorkerArm(arm, 1 + accepted / drafts if drafts else 1.0)
    return found


def _data(now: Now | None, past: Past) -> dict[str, Any]:
    """Return what is shown, ready for JSON."""
    from tlt.observe.live import step_remaining_s

    told = [f for f in past.findings if f.kind != "nothing"]
    return {
        "now": now.model_dump() if now else None,
        "step_remaining_s": step_remaining_s(now, past.records) if now else None,
        "arms": {
            worker: {"arm": of.arm, "acceptance_length": of.acceptance_length}
            for worker, of in past.arms.items()
        },
        "leased": sum(w.state == "training" for w in now.workers.values()) if now else 0,
        "gain": None
        if past.saved is None
        else {
            "modelled": past.saved.gain,
            "is_bound": past.saved.is_bound,
            "measured_s": past.saved.measured_s,
            "plain_s": past.saved.plain_s,
        },
        "findings": [{"kind": f.kind, "says": f.says, "change": f.change} for f in told],
        "fault": past.fault or None,
    }


# --- what is shown --------------------------------------------------------------------------------


def _view(run: Path, files: Files) -> RenderableType:
    now, past = _read(run), files.past()
    if now is None:
        nothing = Text(f"{run}: no step is under way (starting up, or ended)")
        last = past.records[-1] if past.records else {}
        return Group(nothing, *_gain(past), *_findings(past, last))
    return Group(
        *_ill(now.record),
        _headline(now, past),
        _workers(now.workers, now.total, past.arms),
        *_leases(now),
        _last(now.record),
        *_gain(past),
        *_findings(past, now.record),
    )


def _ill(record: Record) -> list[Text]:
    """Return what is wrong with the last RL step."""
    from tlt.observe.health import signs

    lines = [
        f"{sign.says}\n  {sign.change}" for sign in signs([record] if "step" in record else [])
    ]
    lines += [
        f"{says}: see `tlt doctor --run`" for name, says in ALARMS.items() if record.get(name)
    ]
    return [Text(line, style="bold red") for line in lines]


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
    workers: Mapping[str, WorkerNow], total: float, arms: Mapping[str, WorkerArm]
) -> Table:
    table = Table(box=None, pad_edge=False)
    headings = ["worker", "state", "requests", ""]
    if arms:
        headings[3:3] = ["last arm", "accepts"]
    for heading in headings:
        right = heading in ("requests", "accepts")
        table.add_column(heading, justify="right" if right else "left")
    most = max([1, *(worker.running for worker in workers.values())])
    # Too many workers: show the busiest.
    shown = list(workers.items())
    if len(shown) > MAX_ROWS:
        shown = sorted(shown, key=lambda item: -item[1].running)[:MAX_ROWS]
    for name, worker in shown:
        colour = COLOURS.get(worker.state, "dim")
        bar = "█" * round(30 * worker.running / max(most, total / max(1, len(workers))))
        cells = [escape(name), f"[{colour}]{escape(worker.state)}[/]", str(worker.running)]
        if arms:
            of = arms.get(name)
            cells += [of.arm, f"{of.acceptance_length:.2f}"] if of else ["-", "-"]
        table.add_row(*cells, f"[{colour}]{bar}[/]")
    if len(workers) > MAX_ROWS:
        states = [worker.state for worker in workers.values()]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        table.add_row(f"... {len(workers)} in all", escape(counts))
    return table


def _leases(now: Now) -> list[Text]:
    """Return who trains the drafter now, and what came of it in the last RL step."""
    record = now.record
    if "harvest/used_s" not in record:
        return []
    training = sum(worker.state == "training" for worker in now.workers.values())
    cells = [
        f"{training} of {len(now.workers)} workers train the drafter",
        f"{record['harvest/used_s']:.1f} of {record.get('harvest/idle_s', 0.0):.1f} idle seconds "
        "used in the last RL step",
        f"{record.get('harvest/published', 0):.0f} published",
    ]
    if record.get("harvest/held_out_length"):
        cells.append(f"held-out acceptance length {record['harvest/held_out_length']:.2f}")
    return [Text("leases: " + ", ".join(cells), style="green" if training else "")]


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


def _findings(past: Past, record: Record) -> list[Text]:
    """Return what the report would open with, the costliest first, but for what stands above."""
    from tlt.observe.health import signs

    if past.fault:
        return [Text(f"no findings: {past.fault}", style="dim")]
    told = {sign.kind for sign in signs([record] if "step" in record else [])}
    found = [f for f in past.findings if f.kind not in {"nothing", *told}][:NUM_FINDINGS]
    return [Text(f"{f.says}\n  -> {f.change}", style="yellow") for f in found]
