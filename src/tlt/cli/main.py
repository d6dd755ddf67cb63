"""The `tlt` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import tlt
from tlt.cli import bench, doctor, drafter, models, report, sft, simulate, train, watch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fast, lossless RL training of reasoning LLMs on stock vLLM, Ray and PyTorch.",
)
app.command("doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.command("sft")(sft.sft)
app.command("train")(train.train)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.add_typer(drafter.app, name="drafter")
app.add_typer(bench.app, name="bench")
app.command("calibrate")(simulate.calibrate)
app.command("simulate")(simulate.simulate)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"tlt {tlt.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command, and report a user's mistake in one line without a traceback."""
    from tlt.errors import (
        CheckpointFailed,
        ConfigError,
        EngineError,
        LearnerLost,
        Terminated,
        TrainingFailed,
    )
    from tlt.hardware import thread_environment

    os.environ.update(thread_environment())  # must precede the import of torch
    # Commands show their own progress bars, and load models from local folders only.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    known = (CheckpointFailed, ConfigError, EngineError, LearnerLost, TrainingFailed)
    try:
        app()
    except known as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)
    except Terminated as end:
        typer.secho(str(end), fg=typer.colors.YELLOW, err=True)
        sys.exit(end.exit_code)
