"""`tlt bench`: measure modes and strategies side by side, and compare their samples."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tlt.cli.options import (
    Dtype,
    Engines,
    Gpus,
    Json,
    MaxTokens,
    Prompts,
    Seed,
    Temperature,
    TopP,
    command_line,
    named_by_options,
    number,
    print_json,
    read_prompts,
    require_plots,
    result_table,
    say_written,
)
from tlt.cli.progress import progress_bar

HEAD_ROOM = 33
"""Tokens beyond prompt and response, for the longest draft that an engine supports."""

Median = Annotated[int, number("Median response length in tokens.", 1, 10_000_000)]
P95 = Annotated[int, number("95th percentile of the response lengths.", 1, 10_000_000)]
Longest = MaxTokens
MEDIAN, P95TH, LONGEST = 60, 500, 1500

SMOLLM2 = Path("models/smollm2")

app = typer.Typer(no_args_is_help=True, help="Measure modes and strategies side by side.")


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
    median: Median = MEDIAN,
    p95: P95 = P95TH,
    longest: Longest = LONGEST,
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
    out: Annotated[Path, typer.Option(help="Folder for rollout.json and rollout.png.")] = Path(
        "runs/bench-rollout"
    ),
    as_json: Json = False,
) -> None:
    """Generate one workload in several modes, interleaved: the same lengths or the same seeds."""
    import asyncio

    from tlt.bench import rollout as bench
    from tlt.bench import workload
    from tlt.bench.plot import plot_decisions, plot_running
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
    require_plots()
    modes = tuple(
        bench.Mode.parse(text, drafter is not None) for text in mode or _default_modes(drafter)
    )
    source: workload.LengthSpec | str
    if natural:
        source, sizes = "natural", [longest] * requests
    elif lengths is not None:
        source, sizes = "file", workload.read_lengths(lengths)
    else:
        source = workload.LengthSpec(requests, median, p95, longest, seed)
        sizes = source.draw()
    model, drafter = _local_models(model, drafter)
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
    plot_running(result, out / "rollout.png")
    for text in result["decisions"].keys() & LEARNING:
        plot_decisions(result["decisions"][text], text, out / f"{text}.png")
    if as_json:
        print_json(result)
        return
    console.print(_table(result))
    say_written(console, f"{out}/rollout.json and {out}/rollout.png")


@app.command()
def strategy(
    recorded: Annotated[
        Path | None,
        typer.Argument(help="File rollout.json of a `tlt bench rollout` with several arms."),
    ] = None,
    requests: Annotated[int, number("Requests per rollout.", 1, 100_000)] = 64,
    rollouts: Annotated[int, number("Number of rollouts, one after another.", 1, 10_000)] = 12,
    median: Median = MEDIAN,
    p95: P95 = P95TH,
    longest: Longest = LONGEST,
    seeds: Annotated[int, number("Repeats with different seeds.", 1, 10_000)] = 5,
    out: Annotated[Path, typer.Option(help="Folder for strategy.json and strategy.png.")] = Path(
        "runs/bench-strategy"
    ),
    as_json: Json = False,
) -> None:
    """Replay strategies on recorded step times, and compare them with the best arm.

    The comparison always includes a table of step times from published H100 figures.
    """
    import random

    from tlt.bench import replay
    from tlt.bench.plot import plot_replay
    from tlt.observe.provenance import provenance
    from tlt.tasks.tail import HeavyTail

    console = Console(stderr=as_json)
    require_plots()
    tables = {}
    if recorded is not None:
        tables[f"recorded: {recorded}"] = replay.StepTable.load(recorded)
    tables["made from published H100 figures"] = replay.published_h100()
    rng = random.Random(0)
    tail = HeavyTail(median, p95, longest)
    work = [[tail.draw(rng) for _ in range(requests)] for _ in range(rollouts)]
    results = {}
    with progress_bar(console) as show:
        for index, (name, table) in enumerate(tables.items()):
            show(f"replaying, {name}", index, len(tables))
            limit = replay.largest_batch(table)
            rows = replay.compare(
                table, replay.contenders(table), [lengths[:limit] for lengths in work], range(seeds)
            )
            results[name] = rows
            if not as_json:
                console.print(_strategy_table(name, rows))
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "provenance": provenance(command_line()),
        "tables": {name: table.as_dict() for name, table in tables.items()},
        "results": results,
    }
    (out / "strategy.json").write_text(json.dumps(report, indent=1) + "\n")
    plot_replay(results, out / "strategy.png")
    if as_json:
        print_json(report)
        return
    say_written(console, f"{out}/strategy.json and {out}/strategy.png")


@app.command()
def same(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder or Hub id of the policy; by default models/smollm2 if it exists, else a "
            "tiny random model."
        ),
    ] = None,
    drafter: Annotated[
        Path | None,
        typer.Option(help="Folder or Hub id of an EAGLE-3 drafter, for modes that use it."),
    ] = None,
    task: Annotated[str, typer.Option(help="Task that provides the prompts.")] = "chain_sum",
    prompts: Prompts = None,
    samples: Annotated[int, number("Number of samples, one per prompt.", 1, 1_000_000)] = 12,
    max_tokens: MaxTokens = 48,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: Annotated[
        int, number("Number of likeliest tokens to sample from; 0 for all.", 0, 10_000_000)
    ] = 0,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    num_gpus: Annotated[
        int, number("GPUs of each engine; both engines use the same ones.", 0, 10_000)
    ] = 0,
    as_json: Json = False,
) -> None:
    """Show that drafts do not change samples: generate with and without, and compare all tokens.

    Exit code 1 means that a difference is a fault: any in float32, and in bfloat16 one that is no
    near-tie.
    """
    from tlt.bench import same as bench
    from tlt.contracts import SamplingSpec
    from tlt.observe.provenance import provenance
    from tlt.tasks.chat import Chat

    console = Console(stderr=as_json)
    with _policy(model) as (folder, name):
        folder, drafter = _local_models(folder, drafter)
        chat = Chat(str(folder))
        if prompts is not None:
            texts = read_prompts(prompts, samples, "--samples")
        else:
            from tlt.tasks.gym import problems

            texts = [problem.question for problem in problems(task, samples, seed, "same")]
        plan = bench.Plan(
            model=str(folder),
            drafter=str(drafter) if drafter else None,
            dtype=dtype,
            prompts=tuple(chat.prompt(text) for text in texts),
            sampling=SamplingSpec(max_tokens, temperature, top_p, top_k, logprobs=False),
            seed=seed,
            num_gpus=num_gpus,
        )
        with progress_bar(console) as show:
            result = bench.run(plan, show)
    result |= {"model": name, "provenance": provenance(command_line())}
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        console.print(_same_table(result))
        console.print(result["verdict"], highlight=False, soft_wrap=True)
    if not result["lossless"]:
        raise typer.Exit(1)


@contextmanager
def _policy(model: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield a model's folder and its name: the given one, SmolLM2, or a tiny one made here."""
    from tlt.models import tiny

    if model is not None or SMOLLM2.exists():
        folder = model or SMOLLM2
        yield folder, str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="tlt-same-") as made:
        yield tiny.make(Path(made) / "tiny"), "a tiny random model"


def _same_table(result: dict[str, Any]) -> Table:
    from tlt.bench.same import HEADS, cells

    settings = [f"temperature {result['temperature']:g}"]
    settings += [f"top-p {result['top_p']:g}"] if result["top_p"] < 1 else []
    settings += [f"top-k {result['top_k']}"] if result["top_k"] else []
    table = result_table(f"{result['model']}, {result['dtype']}, {', '.join(settings)}")
    mode, *counts, same = HEADS
    table.add_column(mode, no_wrap=True)
    for heading in counts:
        table.add_column(heading, justify="right")
    table.add_column(same)
    for row in cells(result):
        table.add_row(*row)
    return table


def _strategy_table(name: str, rows: list[dict[str, Any]]) -> Table:
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    table = result_table(f"{name}: share of the oracle's throughput, median (low-high)")
    table.add_column("strategy")
    for scenario in scenarios:
        table.add_column(scenario, justify="right")
    table.add_column("switches per 1000 engine steps", justify="right")
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        table.add_row(
            strategy,
            *(f"{row['of_oracle']:.3f} ({row['low']:.2f}-{row['high']:.2f})" for row in mine),
            f"{max(row['switches_per_1000_steps'] for row in mine):.0f}",
        )
    return table


def _default_modes(drafter: Path | None) -> list[str]:
    return ["off", "ngram:4", "eagle3:2", "eagle3:4"] if drafter else ["off", "ngram:4"]


def _local_models(model: Path, drafter: Path | None) -> tuple[Path, Path | None]:
    """Return the folders of policy and drafter, downloaded if need be; refuse damaged ones."""
    from tlt.models.folder import check_drafter, read_model
    from tlt.models.hub import local_folder

    folder = local_folder(model, "--model")
    policy = read_model(folder, "--model")
    if drafter is None:
        return folder, None
    drafter = local_folder(drafter, "--drafter")
    check_drafter(drafter, policy, "--drafter")
    return folder, drafter


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
