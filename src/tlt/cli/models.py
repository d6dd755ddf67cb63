"""`tlt models`: make and export policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tlt.cli.export import export
from tlt.cli.options import Seed, number, option
from tlt.cli.output import Output
from tlt.cli.sft import sft

app = typer.Typer(no_args_is_help=True, help="Make small policies, and export trained ones.")

Out = Annotated[Path | None, option("Folder to write.", "--out")]


@app.command()
def smollm2(out: Out = None) -> None:
    """Make a Hugging Face folder of SmolLM2-135M-Instruct, a small real model."""
    from tlt.models import smollm2

    target = out or Path("models/smollm2")
    with _making(target, "expanding SmolLM2-135M-Instruct to bfloat16"):
        smollm2.make(target)


@app.command()
def tiny(
    out: Out = None,
    hidden_size: Annotated[int, number("Hidden size, a multiple of 64.", 64, 65_536)] = 128,
    layers: Annotated[int, number("Number of decoder layers, at least 3.", 3, 1000)] = 4,
    experts: Annotated[
        int, number("Experts in each layer, of which a token uses two; 0 for none.", 0, 1024)
    ] = 0,
    seed: Seed = 0,
) -> None:
    """Make a small random Llama, or Qwen3-MoE, with a byte tokenizer, for tests."""
    from tlt.errors import ConfigError
    from tlt.models import tiny

    if hidden_size % 64:
        raise ConfigError(f"--hidden-size {hidden_size} is not a multiple of 64; e.g. 128")
    target = out or Path("models/tiny")
    with _making(target, "making a tiny random model"):
        tiny.make(
            target, hidden_size=hidden_size, num_layers=layers, num_experts=experts, seed=seed
        )


@app.command()
def words(
    out: Out = None,
    untrained: Annotated[
        bool, option("Write random weights and the tokenizer, for `tlt models sft`.", "--untrained")
    ] = False,
    seed: Seed = 0,
) -> None:
    """Make a small policy that solves word problems, with a token for each word."""
    from tlt.models import words
    from tlt.tasks.stories import texts

    target = out or Path("models/words")
    with _making(target, "making a policy for word problems"):
        if untrained:
            words.untrained(target, texts(words.NUM_TEXTS), seed=seed)
        else:
            words.make(target)


app.command()(sft)
app.command()(export)


@contextmanager
def _making(target: Path, what: str) -> Iterator[None]:
    output = Output()
    with output.console.status(what):
        yield
    size = sum(f.stat().st_size for f in target.iterdir()) / 2**20
    output.wrote(f"{target} ({size:.0f} MiB)")
