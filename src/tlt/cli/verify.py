"""`tlt verify`: show that drafts do not change samples."""

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
    Json,
    MaxTokens,
    Prompts,
    Seed,
    Temperature,
    TopP,
    command_line,
    number,
    read_prompts,
    result_table,
)
from tlt.cli.progress import progress_bar

SMOLLM2 = Path("models/smollm2")


def verify(
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
    from tlt.bench import same
    from tlt.contracts import SamplingSpec
    from tlt.observe.provenance import provenance
    from tlt.tasks.chat import Chat

    console = Console(stderr=as_json)
    with _policy(model) as (folder, name):
        folder, drafter = local_models(folder, drafter)
        chat = Chat(str(folder))
        if prompts is not None:
            texts = read_prompts(prompts, samples, "--samples")
        else:
            from tlt.tasks.gym import problems

            texts = [problem.question for problem in problems(task, samples, seed, "same")]
        plan = same.Plan(
            model=str(folder),
            drafter=str(drafter) if drafter else None,
            dtype=dtype,
            prompts=tuple(chat.prompt(text) for text in texts),
            sampling=SamplingSpec(max_tokens, temperature, top_p, top_k, logprobs=False),
            seed=seed,
            num_gpus=num_gpus,
        )
        with progress_bar(console) as show:
            result = same.run(plan, show)
    result |= {"model": name, "provenance": provenance(command_line())}
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        console.print(_table(result))
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


def _table(result: dict[str, Any]) -> Table:
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


def local_models(model: Path, drafter: Path | None) -> tuple[Path, Path | None]:
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
