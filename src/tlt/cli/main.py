"""The `tlt` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

import tlt
from tlt.cli import (
    data,
    demo,
    doctor,
    drafter,
    evaluate,
    init,
    models,
    report,
    simulate,
    train,
    verify,
    watch,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fast, lossless RL training of reasoning LLMs on stock vLLM, Ray and PyTorch.",
)
PANELS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Begin": {"demo": demo.demo, "doctor": doctor.doctor, "verify": verify.verify},
    "Prepare": {"models": models.app, "data": data.app, "init": init.init},
    "Train": {"train": train.train, "drafter": drafter.app, "eval": evaluate.evaluate},
    "Look": {"watch": watch.watch, "report": report.report, "simulate": simulate.app},
}
"""All commands, in the order and under the headings of the help."""
for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)
for group in (app, *(inside.typer_instance for inside in app.registered_groups)):
    for each in group.registered_commands if group else ():
        # The help breaks lines at the width of the terminal, not where the docstring does.
        paragraphs = (inspect.getdoc(each.callback) or "").split("\n\n")
        each.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


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


EXTRAS = {
    "simulate": ("numpy",),
    "cpu,train": ("torch", "ray", "vllm", "numba"),
    "train": (
        *("transformers", "safetensors", "pyarrow", "reasoning_gym", "gguf", "pebble"),
        "math_verify",
    ),
}
"""Modules that the extras of the package bring."""


def main() -> None:
    """Prepare the process, and run the command that its arguments name."""
    from tlt.hardware import thread_environment

    os.environ.update(thread_environment())  # must precede the import of torch
    os.environ.setdefault("TQDM_DISABLE", "1")  # commands show their own progress bars
    run()


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit, with one line and without a traceback for a user's mistake."""
    from tlt import errors as of

    told = (of.CheckpointFailed, of.ConfigError, of.EngineError, of.LearnerLost, of.TrainingFailed)
    try:
        app(arguments)
    except told as error:
        _refuse(str(error))
    except OSError as error:
        if error.filename is None or not isinstance(error.filename, str | bytes | os.PathLike):
            raise  # not about a user's file
        _refuse(
            f"{os.fsdecode(error.filename)}: {error.strerror}; name another file or folder, or "
            "allow this one to be read and written"
        )
    except UnicodeEncodeError as error:
        if error.encoding.replace("-", "").lower() != "utf8":
            _refuse(f"this locale cannot write {error.object[error.start]!a}; set PYTHONUTF8=1")
        _refuse("a name contains bytes that are not UTF-8; rename the file or folder")
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = next((extra for extra, brought in EXTRAS.items() if module in brought), None)
        if extra is None:
            raise
        on_gpus = " (on GPUs [gpu,train])" if extra.startswith("cpu") else ""
        _refuse(f"this command needs {error.name}; run: pip install 'tlt-rl[{extra}]'{on_gpus}")
    except of.Terminated as end:
        typer.secho(str(end), fg=typer.colors.YELLOW, err=True)
        sys.exit(end.exit_code)
    sys.exit(0)


def _refuse(why: str) -> NoReturn:
    typer.secho(f"error: {why}", fg=typer.colors.RED, err=True)
    sys.exit(2)
