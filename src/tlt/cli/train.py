"""`tlt train`: run RL training from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlt.cli.options import Json, LogLevel, Overrides, option
from tlt.cli.output import Output, command_line

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


def train(
    config: Annotated[Path, typer.Argument(help="TOML file of the run, such as one of configs/.")],
    overrides: Overrides = None,
    resume: Annotated[bool, option("Resume the run in run.out.", "--resume")] = False,
    check: Annotated[
        bool,
        option("Check settings, model and data; start nothing.", "--check", "--dry-run"),
    ] = False,
    log_level: LogLevel = "info",
    as_json: Json = False,
) -> None:
    """Train a policy with RL for run.num_steps RL steps."""
    from tlt.config.load import load_config
    from tlt.config.train import TrainConfig, resolve_defaults

    settings = resolve_defaults(load_config(TrainConfig, config, overrides or []))
    output = Output(as_json)
    if check:
        places = check_run(output, settings, resume)
        steps = settings.run.num_steps
        output.result({"config": str(config), "num_steps": steps, "memory": memory_data(places)})
        if not as_json:
            output.marked("ok", "green", f"{config}: {steps} steps")
        return
    from tlt.observe.metrics import declared
    from tlt.train.launch import launch

    if label := settings.emulate.label(settings.pool.num_engines):
        output.note(label)
    output.note(" ".join(f"{title:>8}" for _, title, _ in COLUMNS))

    def show_record(record: dict[str, float]) -> None:
        if "reward/mean" in record:
            cells = [form.format(record[name]) for name, _, form in COLUMNS]
            output.note(" ".join(f"{cell:>8}" for cell in cells))
        for name in (name for name in record if declared(name) == "eval/reward_mean"):
            of = "" if name == "eval/reward_mean" else f", {name.split('/')[1]}"
            after = f"held-out reward after step {record['step']:.0f}{of}"
            output.note(f"         {record[name]:.3f} {after}")

    with output.progress(Path(settings.run.out) / "run.log") as show:
        records = launch(settings, resume, command_line(), show, show_record, log_level)
    _report(output, settings.run.out, records)


def check_run(output: Output, settings: TrainConfig, resume: bool) -> list[Place]:
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
        output.marked(
            "only planned:",
            "yellow",
            f"{settings.policy.model} holds a config.json and nothing else; tokenizer, weights, "
            "data and reward were not checked",
        )
    if resume:
        check_inputs(Path(settings.run.out), settings)
    if places:
        rows = [_memory_row(place) for place in places]
        output.table("memory plan, GiB (calculated)", ("place", ">need", ">of", "parts"), rows)
    if rounds_by_batch(settings.engine.num_gpus):
        output.say(ROUNDS_BY_BATCH)
    if any(place.capacity is None for place in places):
        output.say(
            "memory of ? GiB is not known here: describe a node with node.num_gpus, node.gpu_gib "
            "and node.host_gib"
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


def _memory_row(place: Place) -> list[str]:
    gib = 2**30
    parts = ", ".join(f"{name} {size / gib:.1f}" for name, size in place.parts)
    capacity = "?" if place.capacity is None else f"{place.capacity / gib:.1f}"
    note = f". {place.note}" if place.note else ""
    return [place.name, f"{place.need / gib:.1f}", capacity, parts + note]


def _report(output: Output, out: str, records: list[dict[str, float]]) -> None:
    from tlt.observe.summary import stage_table, summary

    steps = [record for record in records if "reward/mean" in record]
    found, stages = summary(steps), stage_table(steps)
    as_data = [{"stage": stage, "median_s": s, "share": share} for stage, s, share in stages]
    output.result(found | {"out": out, "stages": as_data})
    output.table(
        f"{len(steps)} RL steps: where the seconds of a step go",
        ("stage", ">median s", ">share"),
        [[stage.replace("_", " "), f"{s:.2f}", f"{share:.0%}"] for stage, s, share in stages],
    )
    reward = found["reward"]
    output.say(
        f"reward {reward['first_fifth']:.3f} (first fifth of the RL steps) -> "
        f"{reward['last_fifth']:.3f} (last fifth)"
    )
    output.wrote(f"{Path(out)}: metrics.jsonl, samples/, policy/, run.log")
