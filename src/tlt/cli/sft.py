"""`tlt sft`: the supervised start on worked solutions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tlt.cli.options import (
    Compute,
    Dtype,
    Lr,
    RowTokens,
    Seed,
    number,
    result_table,
    say_written,
)
from tlt.cli.progress import progress_bar

if TYPE_CHECKING:
    from tlt.tasks.tail import HeavyTail


def sft(
    model: Annotated[Path, typer.Option(help="Folder or Hub id of the model to start from.")],
    out: Annotated[Path, typer.Option(help="Folder to write the policy to.")],
    task: Annotated[
        str, typer.Option(help="Task: chain_sum, gcd, letter_counting or word_problems.")
    ] = "chain_sum",
    sizes: Annotated[
        str | None,
        typer.Option(help="Problem sizes as median,p95,longest; by default those of the task."),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(help="Parameter of the task, such as max_digits=1. Repeatable."),
    ] = None,
    num_problems: Annotated[int, number("Worked solutions to train on.", 1, 10_000_000)] = 3000,
    steps: Annotated[int, number("Optimizer steps.", 1, 100_000_000)] = 300,
    row_tokens: RowTokens = 1024,
    lr: Lr = 1e-4,
    budget_minutes: Annotated[float, number("Time budget of the training.", 0)] = math.inf,
    dtype: Dtype = "bfloat16",
    compute: Compute = "auto",
    seed: Seed = 0,
) -> None:
    """Train a model to solve a task in written-out steps, as a start for RL."""
    from tlt.config.load import apply_overrides
    from tlt.hardware import compute_dtype
    from tlt.learner.sft import SftSettings, SftStep
    from tlt.offline.sft import train_policy

    console = Console()
    history: list[SftStep] = []
    with progress_bar(console) as show:

        def note(step: SftStep) -> None:
            history.append(step)
            text = f"step {step.step}, loss {step.loss:.2f}, right tokens {step.accuracy:.0%}"
            show(text, step.progress, 1)

        data = train_policy(
            model,
            out,
            task=task,
            num_problems=num_problems,
            sizes=_sizes(sizes),
            parameters=apply_overrides({}, parameter or []),
            dtype=dtype,
            settings=SftSettings(
                steps, row_tokens, lr, 60 * budget_minutes, seed, compute_dtype(compute)
            ),
            on_step=note,
        )
    table = result_table(
        f"{data['num_problems']} solutions: median {data['median_tokens']} tokens, "
        f"99th percentile {data['p99_tokens']}, longest {data['longest_tokens']}",
    )
    for heading in ("", "loss", "right tokens", "tokens/s"):
        table.add_column(heading, justify="right" if heading else "left")
    tenth = max(1, len(history) // 10)
    seconds = history[-1].elapsed_s
    for label, part in (("first tenth", history[:tenth]), ("last tenth", history[-tenth:])):
        table.add_row(
            label,
            f"{sum(s.loss for s in part) / len(part):.3f}",
            f"{sum(s.accuracy for s in part) / len(part):.1%}",
            f"{sum(s.num_tokens for s in history) / seconds:.0f}",
        )
    console.print(table)
    say_written(
        console, f"{out} after {len(history)} optimizer steps in {seconds / 60:.1f} minutes"
    )


def _sizes(text: str | None) -> HeavyTail | None:
    from tlt.errors import ConfigError
    from tlt.tasks.tail import HeavyTail

    if text is None:
        return None
    try:
        median, p95, longest = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--sizes {text!r} is not three numbers; e.g. 6,30,60") from None
    return HeavyTail(median, p95, longest)
