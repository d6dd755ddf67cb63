"""`tlt verify`: show that drafts do not change samples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tlt.cli import options as opt
from tlt.cli.output import Output, command_line

SMOLLM2 = Path("models/smollm2")


def verify(
    model: Annotated[
        Path | None,
        opt.option(
            "Folder or Hub id of the policy; by default models/smollm2 if it exists, else a "
            "tiny random model."
        ),
    ] = None,
    drafter: Annotated[
        Path | None,
        opt.option("Folder or Hub id of an EAGLE-3 drafter, for modes that use it."),
    ] = None,
    task: opt.Task = "chain_sum",
    prompts: opt.Prompts = None,
    samples: Annotated[int, opt.number("Number of samples, one per prompt.", 1, 1_000_000)] = 12,
    max_tokens: opt.MaxTokens = 48,
    temperature: opt.Temperature = 1.0,
    top_p: opt.TopP = 1.0,
    top_k: Annotated[
        int,
        opt.number("Likeliest tokens to sample from; 0 for all.", 0, 10_000_000, **opt.SAMPLING),
    ] = 0,
    dtype: opt.Dtype = "float32",
    seed: opt.Seed = 0,
    num_gpus: Annotated[
        int,
        opt.number("GPUs per engine; both engines use the same.", 0, 10_000, **opt.HARDWARE),
    ] = 0,
    as_json: opt.Json = False,
) -> None:
    """Generate with and without drafts, and compare every token: drafts change no sample.

    Exit code 1 means a fault: any difference in float32, and in bfloat16 one that is not a
    near-tie.
    """
    from tlt.bench import same
    from tlt.contracts import SamplingSpec
    from tlt.observe.provenance import provenance

    output = Output(as_json)
    with _policy(model) as (folder, name):
        folder, drafter = opt.local_models(folder, drafter)
        plan = same.Plan(
            model=str(folder),
            drafter=str(drafter) if drafter else None,
            dtype=dtype,
            prompts=tuple(
                opt.read_prompts(folder, task, prompts, samples, seed, "same", "--samples")
            ),
            sampling=SamplingSpec(max_tokens, temperature, top_p, top_k, logprobs=False),
            seed=seed,
            num_gpus=num_gpus,
        )
        with output.progress() as show:
            result = same.run(plan, show)
    result |= {"model": name, "provenance": provenance(command_line())}
    output.result(result)
    settings = f"temperature {result['temperature']:g}"
    settings += f", top-p {result['top_p']:g}" if result["top_p"] < 1 else ""
    settings += f", top-k {result['top_k']}" if result["top_k"] else ""
    mode, *counts, sameness = same.HEADS
    columns = (f"|{mode}", *(f">{heading}" for heading in counts), sameness)
    output.table(f"{name}, {result['dtype']}, {settings}", columns, same.cells(result))
    output.say(result["verdict"])
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
