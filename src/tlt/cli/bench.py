"""`tlt bench`: measure modes and strategies side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tlt.cli.options import (
    Engines,
    Gpus,
    Json,
    MaxTokens,
    Seed,
    Temperature,
    TopP,
    command_line,
    named_by_options,
    number,
    print_json,
    result_table,
    say_written,
)
from tlt.cli.progress import progress_bar
from tlt.cli.verify import local_models, verify

HEAD_ROOM = 33
"""Tokens beyond prompt and response, for the longest draft that an engine supports."""

app = typer.Typer(no_args_is_help=True, help="Measure modes and strategies side by side.")
app.command("same", hidden=True)(verify)


@app.command()
def rollout(
    model: Annotated[Path, typer.Option(help="Folder or Hub id of the policy.")],
    drafter: Annotated[
        Path | None, typer.Option(help="Folder or Hub id of an EAGLE-3 drafter.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode to measure: off, ngram:K, eagle3:K, tail:K@B (EAGLE-3 while at "
            "most B requests run), adaptive, or beg_mab. Repeatable; the first mode is the "
            "baseline."
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="Task that provides the prompts.")] = "chain_sum",
    size: Annotated[
        int | None,
        number("Size of every problem; large ones have answers longer than --longest.", 2, 100_000),
    ] = None,
    engines: Engines = 2,
    gpus: Gpus = 0,
    repeats: Annotated[int, number("Runs per mode.", 1, 10_000)] = 3,
    requests: Annotated[int, number("Number of requests.", 1, 1_000_000)] = 64,
    median: Annotated[int, number("Median response length in tokens.", 1, 10_000_000)] = 60,
    p95: Annotated[int, number("95th percentile of the response lengths.", 1, 10_000_000)] = 500,
    longest: MaxTokens = 1500,
    lengths: Annotated[
        Path | None, typer.Option(help="File of response lengths, used instead of drawing them.")
    ] = None,
    natural: Annotated[
        bool,
        typer.Option("--natural", help="Let responses end by themselves, after --longest at most."),
    ] = False,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option("--engine-arg", help="KEY=JSON argument for vLLM. Repeatable."),
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Allow engine arguments that load Python code.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for rollout.json and rollout.svg.")] = Path(
        "runs/bench-rollout"
    ),
    as_json: Json = False,
) -> None:
    """Generate one workload in several modes, interleaved: the same lengths or the same seeds."""
    import asyncio

    from tlt.bench import charts, workload
    from tlt.bench import rollout as bench
    from tlt.config.rollout import EngineConfig
    from tlt.hardware import compute_dtype
    from tlt.node.cluster import start_ray
    from tlt.observe.provenance import provenance
    from tlt.strategy.spec import LEARNING
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems
    from tlt.tasks.rewards import exact_score
    from tlt.tasks.tail import HeavyTail

    console = Console(stderr=as_json)
    modes = tuple(
        bench.Mode.parse(text, drafter is not None) for text in mode or _default_modes(drafter)
    )
    source: dict[str, int] | str
    if natural:
        source, sizes = "natural", [longest] * requests
    elif lengths is not None:
        source, sizes = "file", workload.read_lengths(lengths)
    else:
        source = {"num_requests": requests, "median": median, "p95": p95, "longest": longest}
        source |= {"seed": seed}
        sizes = workload.draw_lengths(requests, HeavyTail(median, p95, longest), seed)
    model, drafter = local_models(model, drafter)
    chat = Chat(str(model))
    difficulty = HeavyTail(size, size, size) if size else None
    with named_by_options():
        made = problems(task, len(sizes), seed, "bench", sizes=difficulty)
    prompts = [chat.prompt(problem.question) for problem in made]
    arguments: dict[str, Any] = {
        "dtype": compute_dtype(on_gpu=gpus > 0),  # vLLM would take bfloat16 on any CPU
        "enforce_eager": True,
        "max_num_seqs": 32,
        "max_model_len": max(map(len, prompts)) + max(sizes) + HEAD_ROOM,
    }
    plan = bench.Plan(
        engine=EngineConfig(
            model=str(model),
            drafter=str(drafter) if drafter else None,
            num_gpus=gpus,
            engine_args=arguments | _engine_args(engine_arg or []),
            allow_code=allow_code,
        ),
        num_engines=engines,
        modes=modes,
        repeats=repeats,
        lengths=tuple(sizes),
        length_source=source,
        prompts=tuple(prompts),
        temperature=temperature,
        top_p=top_p,
        score=lambda index, tokens: exact_score(made[index], chat.text(tokens)),
    )
    setups = bench.setups(plan)
    for setup in setups:
        bench.engine_for(plan, setup)  # refuses bad settings before Ray starts
    with progress_bar(console) as show:
        show("starting Ray", 0, 1)
        start_ray(engines * len(setups))  # setups take turns on the cores
        result = asyncio.run(bench.run(plan, show))
    out.mkdir(parents=True, exist_ok=True)
    result["provenance"] = provenance(command_line())
    (out / "rollout.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "rollout.svg").write_text(charts.running(result))
    for text in result["decisions"].keys() & LEARNING:
        picture = charts.decisions(result["decisions"][text], text)
        (out / f"{text}.svg").write_text(picture)
    if as_json:
        print_json(result)
        return
    console.print(_table(result))
    say_written(console, f"{out}/rollout.json and {out}/rollout.svg")


def _default_modes(drafter: Path | None) -> list[str]:
    return ["off", "ngram:4", "eagle3:2", "eagle3:4"] if drafter else ["off", "ngram:4"]


def _engine_args(pairs: list[str]) -> dict[str, Any]:
    from tlt.errors import ConfigError

    arguments = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--engine-arg {pair!r} is not KEY=JSON; e.g. max_num_seqs=16")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments


def _table(result: dict[str, Any]) -> Table:
    workload = result["workload"]
    table = result_table(
        f"{workload['num_requests']} requests, {workload['total_tokens']} tokens "
        f"(median {workload['median']}, longest {workload['longest']}), "
        f"{result['num_engines']} engines, {result['repeats']} runs each: "
        "median (low-high), idle seconds per engine",
    )
    table.add_column("mode")
    for heading, width in (("tokens/s", 8), ("speed", 11), ("wall s", 9)):
        table.add_column(heading, justify="right", min_width=width)  # a range fits on its line
    for heading in ("accept length", "tail share", "idle s"):
        table.add_column(heading, justify="right")
    for row in result["summary"]:
        table.add_row(
            row["mode"],
            _cell(row["tokens_per_s"], "{:.0f}"),
            _cell(row["speed_vs_first"], "{:.2f}", "x"),
            _cell(row["wall_s"], "{:.0f}"),
            f"{row['acceptance_length']['median']:.2f}",
            f"{row['tail_share']['median']:.0%}",
            f"{row['idle_s_per_engine']['median']:.1f}",
        )
    return table


def _cell(value: dict[str, float], form: str, unit: str = "") -> str:
    """Return median and range, or the value alone if there is one run."""
    median, low, high = (form.format(value[key]) for key in ("median", "low", "high"))
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low}-{high})"
