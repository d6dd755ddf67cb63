"""`tlt models sft`: the supervised start on worked solutions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from tlt.cli import options as opt
from tlt.cli.output import Output


def sft(
    model: Annotated[Path, opt.option("Folder or Hub id of the model to start from.")],
    out: Annotated[Path, opt.option("Folder to write the policy to.")],
    task: Annotated[
        str, opt.option("Task: chain_sum, gcd, letter_counting or word_problems.")
    ] = "chain_sum",
    environment: Annotated[
        str | None, opt.option("Environment whose `worked` solves the task with its tools.")
    ] = None,
    parser: Annotated[
        str, opt.option("How the policy writes tool calls, as in tools.parser.")
    ] = "hermes",
    sizes: opt.Sizes = None,
    parameter: opt.Parameters = None,
    num_problems: Annotated[int, opt.number("Worked solutions to train on.", 1, 10_000_000)] = 3000,
    steps: Annotated[int, opt.number("Optimizer steps.", 1, 100_000_000)] = 300,
    row_tokens: opt.RowTokens = 1024,
    lr: opt.Lr = 1e-4,
    budget_minutes: Annotated[float, opt.number("Time budget of the training.", 0)] = math.inf,
    dtype: opt.Dtype = "bfloat16",
    compute: opt.Compute = "auto",
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Train a model to solve a task in written-out steps, as a start for RL."""
    from tlt.config.load import apply_overrides
    from tlt.hardware import compute_dtype
    from tlt.learner.sft import SftSettings, SftStep
    from tlt.offline.sft import train_policy

    output = Output(as_json)
    history: list[SftStep] = []
    with opt.named_by_options(), output.progress() as show:

        def note(step: SftStep) -> None:
            history.append(step)
            text = f"step {step.step}, loss {step.loss:.2f}, right tokens {step.accuracy:.0%}"
            show(text, step.progress, 1)

        data = train_policy(
            model,
            out,
            task=task,
            environment=environment,
            parser=parser,
            num_problems=num_problems,
            sizes=opt.read_sizes(sizes),
            parameters=apply_overrides({}, parameter or []),
            dtype=dtype,
            settings=SftSettings(
                steps, row_tokens, lr, 60 * budget_minutes, seed, compute_dtype(compute)
            ),
            on_step=note,
        )
    tenth = max(1, len(history) // 10)
    seconds = history[-1].elapsed_s
    speed = sum(s.num_tokens for s in history) / seconds
    parts = {
        label: {
            "loss": sum(s.loss for s in part) / len(part),
            "accuracy": sum(s.accuracy for s in part) / len(part),
        }
        for label, part in (("first tenth", history[:tenth]), ("last tenth", history[-tenth:]))
    }
    result = {"out": str(out), "data": data, "steps": len(history), "seconds": seconds}
    output.result(result | {"tokens_per_s": speed, "parts": parts})
    output.table(
        f"{data['num_problems']} solutions: median {data['median_tokens']} tokens, "
        f"99th percentile {data['p99_tokens']}, longest {data['longest_tokens']}",
        ("", ">loss", ">right tokens", ">tokens/s"),
        [
            [label, f"{of['loss']:.3f}", f"{of['accuracy']:.1%}", f"{speed:.0f}"]
            for label, of in parts.items()
        ],
    )
    output.wrote(f"{out} after {len(history)} optimizer steps in {seconds / 60:.1f} minutes")
