"""`tlt watch`: a run in progress, in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tlt.observe.live import Now, WorkerNow
    from tlt.observe.summary import Record

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


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run in progress.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
) -> None:
    """Watch a run: what every worker does, how long the tail will take, the last RL step."""
    from rich.live import Live

    from tlt.errors import ConfigError
    from tlt.run.folder import is_open

    if not (run / "config.toml").exists():
        raise ConfigError(f"{run} holds no run of `tlt train`; give the folder that run.out named")
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


def _read(run: Path) -> Now | None:
    """Return the contents of `live.json`; None if there is none or the run was killed."""
    from tlt.observe.live import read_live

    found = read_live(run / "live.json")
    return found if found is not None and time.time() - found.at_s < STALE_S else None


def _view(run: Path) -> RenderableType:
    now = _read(run)
    if now is None:
        return Text(f"{run}: no step is under way (starting up, or ended)")
    workers = _workers(now.workers, now.total)
    return Group(*_ill(now.record), _headline(now), workers, _last(now.record))


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


def _headline(now: Now) -> Text:
    text = Text(f"{now.what} of {now.num_steps} steps", style="bold")
    text.append(f"  {now.done:.0f} of {now.total:.0f}", style="")
    text.append(f"  for {now.at_s - now.since_s:.0f} s", style="dim")
    if now.remaining_s is not None:
        text.append(f"  about {now.remaining_s:.0f} s to the end of the tail", style="yellow")
    return text


def _workers(workers: Mapping[str, WorkerNow], total: float) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "state", "requests", ""):
        table.add_column(heading, justify="right" if heading == "requests" else "left")
    most = max([1, *(worker.running for worker in workers.values())])
    # Too many workers: show the busiest.
    shown = list(workers.items())
    if len(shown) > MAX_ROWS:
        shown = sorted(shown, key=lambda item: -item[1].running)[:MAX_ROWS]
    for name, worker in shown:
        colour = COLOURS.get(worker.state, "dim")
        bar = "█" * round(30 * worker.running / max(most, total / max(1, len(workers))))
        state = f"[{colour}]{escape(worker.state)}[/]"
        table.add_row(escape(name), state, str(worker.running), f"[{colour}]{bar}[/]")
    if len(workers) > MAX_ROWS:
        states = [worker.state for worker in workers.values()]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        table.add_row(f"... {len(workers)} in all", escape(counts), "", "")
    return table


def _last(record: Mapping[str, float]) -> Text:
    if not {"reward/mean", "step"} <= record.keys():
        return Text("no RL step is done yet", style="dim")
    cells = [f"{title} {form.format(record[n])}" for title, n, form in LAST_STEP if n in record]
    return Text(f"RL step {record['step']:.0f}: " + ", ".join(cells))
