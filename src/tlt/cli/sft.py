"""`tlt sft`: the supervised start on worked solutions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tlt.cli.options import (
    Compute,
    Dtype,
    Json,
    Lr,
    Parameters,
    RowTokens,
    Seed,
    Sizes,
    named_by_options,
    number,
    print_json,
    read_sizes,
    result_table,
    say_written,
)
from tlt.cli.progress import progress_bar


def sft(
    model: Annotated[Path, typer.Option(help="Folder or Hub id of the model to start from.")],
    out: Annotated[Path, typer.Option(help="Folder to write the policy to.")],
    task: Annotated[
        str, typer.Option(help="Task: chain_sum, gcd, letter_counting or word_problems.")
    ] = "chain_sum",
    sizes: Sizes = None,
    parameter: Parameters = None,
    num_problems: Annotated[int, number("Worked solutions to train on.", 1, 10_000_000)] = 3000,
    steps: Annotated[int, number("Optimizer steps.", 1, 100_000_000)] = 300,
    row_tokens: RowTokens = 1024,
    lr: Lr = 1e-4,
    budget_minutes: Annotated[float, number("Time budget of the training.", 0)] = math.inf,
    dtype: Dtype = "bfloat16",
    compute: Compute = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a model to solve a task in written-out steps, as a start for RL."""
    from tlt.config.load import apply_overrides
    from tlt.hardware import compute_dtype
    from tlt.learner.sft import SftSettings, SftStep
    from tlt.offline.sft import train_policy

    console = Console(stderr=as_json)
    history: list[SftStep] = []
    with named_by_options(), progress_bar(console) as show:

        def note(step: SftStep) -> None:
            history.append(step)
            text = f"step {step.step}, loss {step.loss:.2f}, right tokens {step.accuracy:.0%}"
            show(text, step.progress, 1)

        data = train_policy(
            model,
            out,
            task=task,
            num_problems=num_problems,
            sizes=read_sizes(sizes),
            parameters=apply_overrides({}, parameter or []),
            dtype=dtype,
            settings=SftSettings(
                steps, row_tokens, lr, 60 * budget_minutes, seed, compute_dtype(compute)
            ),
            on_step=note,
        )
    tenth = max(1, len(history) // 10)
    seconds = history[-1].elapsed_s
    parts: dict[str, dict[str, Any]] = {
        label: {
            "loss": sum(s.loss for s in part) / len(part),
            "accuracy": sum(s.accuracy for s in part) / len(part),
        }
        for label, part in (("first tenth", history[:tenth]), ("last tenth", history[-tenth:]))
    }
    speed = sum(s.num_tokens for s in history) / seconds
    if as_json:
        print_json(
            {
                **{"out": str(out), "data": data, "steps": len(history), "seconds": seconds},
                **{"tokens_per_s": speed, "parts": parts},
            }
        )
        return
    table = result_table(
        f"{data['num_problems']} solutions: median {data['median_tokens']} tokens, "
        f"99th percentile {data['p99_tokens']}, longest {data['longest_tokens']}",
    )
    for heading in ("", "loss", "right tokens", "tokens/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, of in parts.items():
        table.add_row(label, f"{of['loss']:.3f}", f"{of['accuracy']:.1%}", f"{speed:.0f}")
    console.print(table)
    say_written(
        console, f"{out} after {len(history)} optimizer steps in {seconds / 60:.1f} minutes"
    )
