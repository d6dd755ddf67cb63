"""`tlt drafter bench`: measure modes and strategies side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from tlt.cli import options as opt
from tlt.cli.output import Output, command_line, write_json

HEAD_ROOM = 33
"""Tokens beyond prompt and response, for the longest draft that an engine supports."""


def bench(
    model: opt.Policy,
    drafter: Annotated[Path | None, opt.option("Folder or Hub id of an EAGLE-3 drafter.")] = None,
    mode: Annotated[
        list[str] | None,
        opt.option(
            "Mode to measure: off, ngram:K, eagle3:K, tail:K@B (EAGLE-3 while at "
            "most B requests run), adaptive, or beg_mab. Repeatable; the first mode is the "
            "baseline."
        ),
    ] = None,
    task: opt.Task = "chain_sum",
    size: Annotated[
        int | None,
        opt.number(
            "Size of every problem; large ones have answers longer than --longest.", 2, 100_000
        ),
    ] = None,
    engines: opt.Engines = 2,
    gpus: opt.Gpus = 0,
    repeats: Annotated[int, opt.number("Runs per mode.", 1, 10_000)] = 3,
    requests: Annotated[int, opt.number("Number of requests.", 1, 1_000_000)] = 64,
    median: Annotated[int, opt.number("Median response length in tokens.", 1, 10_000_000)] = 60,
    p95: Annotated[
        int, opt.number("95th percentile of the response lengths.", 1, 10_000_000)
    ] = 500,
    longest: opt.MaxTokens = 1500,
    lengths: Annotated[
        Path | None, opt.option("File of response lengths, used instead of drawing them.")
    ] = None,
    natural: Annotated[
        bool,
        opt.option("Let responses end by themselves, after --longest at most.", "--natural"),
    ] = False,
    temperature: opt.Temperature = 1.0,
    top_p: opt.TopP = 1.0,
    seed: opt.Seed = 0,
    engine_arg: Annotated[
        list[str] | None,
        opt.option("KEY=JSON argument for vLLM. Repeatable.", "--engine-arg"),
    ] = None,
    allow_code: Annotated[
        bool, opt.option("Allow engine arguments that load Python code.", "--allow-code")
    ] = False,
    out: Annotated[Path, opt.option("Folder for rollout.json and rollout.svg.")] = Path(
        "runs/bench-rollout"
    ),
    as_json: opt.Json = False,
) -> None:
    """Generate one workload in several modes, interleaved: the same lengths or the same seeds."""
    import asyncio
    import random

    from tlt.bench import charts, rollout, workload
    from tlt.config.rollout import EngineConfig
    from tlt.hardware import compute_dtype
    from tlt.node.cluster import start_ray
    from tlt.observe.provenance import provenance
    from tlt.strategy.spec import LEARNING
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems
    from tlt.tasks.rewards import exact_score
    from tlt.tasks.tail import HeavyTail

    output = Output(as_json)
    usual = ["off", "ngram:4", *(["eagle3:2", "eagle3:4"] if drafter else [])]
    modes = tuple(rollout.Mode.parse(text, drafter is not None) for text in mode or usual)
    source: dict[str, int] | str
    if natural:
        source, sizes = "natural", [longest] * requests
    elif lengths is not None:
        source, sizes = "file", workload.read_lengths(lengths)
    else:
        source = {"num_requests": requests, "median": median, "p95": p95, "longest": longest}
        source |= {"seed": seed}
        tail, rng = HeavyTail(median, p95, longest), random.Random(seed)
        sizes = [tail.draw(rng) for _ in range(requests)]
    model, drafter = opt.local_models(model, drafter)
    chat = Chat(str(model))
    difficulty = HeavyTail(size, size, size) if size else None
    with opt.named_by_options():
        made = problems(task, len(sizes), seed, "bench", sizes=difficulty)
    prompts = [chat.prompt(problem.question) for problem in made]
    arguments: dict[str, Any] = {
        "dtype": compute_dtype(on_gpu=gpus > 0),  # vLLM would take bfloat16 on any CPU
        "enforce_eager": True,
        "max_num_seqs": 32,
        "max_model_len": max(map(len, prompts)) + max(sizes) + HEAD_ROOM,
    }
    plan = rollout.Plan(
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
    setups = rollout.setups(plan)
    for setup in setups:
        rollout.engine_for(plan, setup)  # refuses bad settings before Ray starts
    with output.progress() as show:
        show("starting Ray", 0, 1)
        start_ray(engines * len(setups))  # setups take turns on the cores
        result = asyncio.run(rollout.run(plan, show))
    out.mkdir(parents=True, exist_ok=True)
    result["provenance"] = provenance(command_line())
    write_json(out / "rollout.json", result)
    (out / "rollout.svg").write_text(charts.running(result))
    for text in result["decisions"].keys() & LEARNING:
        (out / f"{text}.svg").write_text(charts.decisions(result["decisions"][text], text))
    output.result(result)
    work = result["workload"]
    output.table(
        f"{work['num_requests']} requests, {work['total_tokens']} tokens (median "
        f"{work['median']}, longest {work['longest']}), {engines} engines, {repeats} runs each: "
        "median (low-high), idle seconds per engine",
        ("mode", ">tokens/s", ">speed", ">wall s", ">accept length", ">tail share", ">idle s"),
        [
            [
                row["mode"],
                _cell(row["tokens_per_s"], "{:.0f}"),
                _cell(row["speed_vs_first"], "{:.2f}", "x"),
                _cell(row["wall_s"], "{:.0f}"),
                f"{row['acceptance_length']['median']:.2f}",
                f"{row['tail_share']['median']:.0%}",
                f"{row['idle_s_per_engine']['median']:.1f}",
            ]
            for row in result["summary"]
        ],
    )
    output.wrote(f"{out}/rollout.json and {out}/rollout.svg")


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


def _cell(value: dict[str, float], form: str, unit: str = "") -> str:
    """Return median and range, or the value alone if there is one run."""
    median, low, high = (form.format(value[key]) for key in ("median", "low", "high"))
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low}-{high})"
