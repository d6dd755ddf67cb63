"""`tlt train`: run RL training from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tlt.cli.options import (
    Json,
    LogLevel,
    command_line,
    print_json,
    result_table,
    say_written,
)
from tlt.cli.progress import progress_bar

if TYPE_CHECKING:
    from tlt.config.train import TrainConfig
    from tlt.train.memory import Place

COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("response/median_tokens", "median", "{:.0f}"),
    ("response/longest_tokens", "longest", "{:.0f}"),
    ("rollout/tokens_per_s", "tokens/s", "{:.0f}"),
    ("rollout/acceptance_length", "accepts", "{:.2f}"),
    ("time/rollout_s", "rollout", "{:.1f}"),
    ("time/update_s", "update", "{:.1f}"),
    ("time/step_s", "step s", "{:.1f}"),
)

LINE: dict[str, Any] = {"highlight": False, "soft_wrap": True}


def train(
    config: Annotated[Path, typer.Argument(help="TOML file of the run, such as one of configs/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to override, as section.key=value.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in run.out.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", "--dry-run", help="Check settings, model and data; start nothing."),
    ] = False,
    log_level: LogLevel = "info",
    as_json: Json = False,
) -> None:
    """Train a policy with RL for run.num_steps RL steps."""
    from tlt.config.load import load_config
    from tlt.config.train import TrainConfig, resolve_defaults

    settings = resolve_defaults(load_config(TrainConfig, config, overrides or []))
    console = Console(stderr=as_json)
    if check:
        places = check_run(console, settings, resume, show=not as_json)
        if as_json:
            steps = settings.run.num_steps
            print_json({"config": str(config), "num_steps": steps, "memory": memory_data(places)})
            return
        console.print(f"[green]ok[/] {escape(str(config))}: {settings.run.num_steps} steps")
        return
    from tlt.train.launch import launch

    console.print(" ".join(f"{title:>8}" for _, title, _ in COLUMNS), **LINE)

    def show_record(record: dict[str, float]) -> None:
        if "reward/mean" in record:
            cells = [form.format(record[name]) for name, _, form in COLUMNS]
            console.print(" ".join(f"{cell:>8}" for cell in cells), **LINE)
        if "eval/reward_mean" in record:
            console.print(
                f"         {record['eval/reward_mean']:.3f} held-out reward after step "
                f"{record['step']:.0f}",
                **LINE,
            )

    with progress_bar(console, Path(settings.run.out) / "run.log") as show:
        records = launch(settings, resume, command_line(), show, show_record, log_level)
    _report(console, settings.run.out, records, as_json)


def check_run(
    console: Console, settings: TrainConfig, resume: bool, show: bool = True
) -> list[Place]:
    """Check a run without starting it; show its memory plan, and return it."""
    from tlt.train.folder import RunFolder
    from tlt.train.inputs import check_inputs, with_local_models
    from tlt.train.preflight import check_outline, prepare
    from tlt.vllm.environment import ROUNDS_BY_BATCH, rounds_by_batch

    RunFolder(Path(settings.run.out)).check(settings, resume)
    settings = with_local_models(settings)
    places = check_outline(settings)
    if places is None:
        places = prepare(settings).memory
    else:
        console.print(
            f"[yellow]only planned[/]: {escape(settings.policy.model)} holds a config.json and "
            "nothing else; tokenizer, weights, data and reward were not checked",
            **LINE,
        )
    if resume:
        check_inputs(Path(settings.run.out), settings)
    if not show:
        return places
    if places:
        console.print(_memory_table(places))
    if rounds_by_batch(settings.engine.num_gpus):
        console.print(ROUNDS_BY_BATCH, **LINE)
    if any(place.capacity is None for place in places):
        console.print(
            "memory of ? GiB is not known here: describe a node with node.num_gpus, node.gpu_gib "
            "and node.host_gib",
            **LINE,
        )
    return places


def memory_data(places: list[Place]) -> list[dict[str, Any]]:
    """Return the memory plan, ready for JSON."""
    return [
        {
            "place": place.name,
            "need_bytes": place.need,
            "capacity_bytes": place.capacity,
            "parts": dict(place.parts),
            "note": place.note,
        }
        for place in places
    ]


def _memory_table(places: list[Place]) -> Table:
    """Return the memory plan as a table, in GiB."""
    gib = 2**30
    table = result_table("memory plan, GiB (calculated)")
    for heading in ("place", "need", "of", "parts"):
        table.add_column(heading, justify="right" if heading in ("need", "of") else "left")
    for place in places:
        parts = ", ".join(f"{name} {size / gib:.1f}" for name, size in place.parts)
        table.add_row(
            place.name,
            f"{place.need / gib:.1f}",
            "?" if place.capacity is None else f"{place.capacity / gib:.1f}",
            f"{parts}. {place.note}" if place.note else parts,
        )
    return table


def _report(
    console: Console, out: str, records: list[dict[str, float]], as_json: bool = False
) -> None:
    from tlt.observe.summary import stage_table, summary

    folder = Path(out)
    steps = [record for record in records if "reward/mean" in record]
    found = summary(steps)["reward"]
    if as_json:
        stages = [{"stage": s, "median_s": m, "share": share} for s, m, share in stage_table(steps)]
        print_json(summary(steps) | {"out": out, "stages": stages})
        return
    table = result_table(f"{len(steps)} RL steps: where the seconds of a step go")
    for heading in ("stage", "median s", "share"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage, median_s, share in stage_table(steps):
        table.add_row(stage.replace("_", " "), f"{median_s:.2f}", f"{share:.0%}")
    console.print(table)
    console.print(
        f"reward {found['first_fifth']:.3f} (first fifth of the RL steps) -> "
        f"{found['last_fifth']:.3f} (last fifth)",
        highlight=False,
    )
    say_written(console, f"{folder}: metrics.jsonl, samples/, policy/, run.log")
