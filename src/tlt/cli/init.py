"""`tlt init`: from a model, data and hardware to the TOML file of a run."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlt.cli.options import Json, named_by_options, number, option
from tlt.cli.output import Output
from tlt.cli.train import check_run, memory_data

if TYPE_CHECKING:
    from tlt.train.recipe import Hardware

OPTIONS = {"policy.model": "--model", "task.path": "--data", "task.name": "--data"}
"""The setting that each option of this command sets."""


def init(
    model: Annotated[
        str | None, option("Model folder, or id of the Hub such as Qwen/Qwen3-8B.")
    ] = None,
    data: Annotated[
        str | None,
        option("File of problems, .jsonl or .parquet, or a task such as gcd."),
    ] = None,
    hardware: Annotated[
        str | None,
        option("here, cpu, or GPUs by number and memory in GB: 8x80, or 4x8x80 for four nodes."),
    ] = None,
    out: Annotated[Path, option("TOML file to write.")] = Path("run.toml"),
    run_out: Annotated[
        str | None, option("Folder of the run; by default runs/ and the file's name.")
    ] = None,
    steps: Annotated[int, number("RL steps of the run.", 1, 100_000_000)] = 200,
    as_json: Json = False,
) -> None:
    """Write the settings of a run that fits your hardware, and check them.

    Asks for missing options if there is a terminal.
    """
    from tlt.config.load import load_config
    from tlt.config.train import TrainConfig, resolve_defaults
    from tlt.errors import ConfigError
    from tlt.models.folder import read_settings
    from tlt.models.hub import hub_id, local_folder
    from tlt.tasks.file import task_of
    from tlt.train import recipe

    if out.suffix != ".toml":
        raise ConfigError(f"--out {out} should end in .toml; e.g. {out.with_suffix('.toml')}")
    if out.exists():
        raise ConfigError(f"--out {out} exists; remove it, or name another file")
    output = Output(as_json)
    here = _here()
    name = model or _ask("--model", "Model folder, or id of the Hub", "Qwen/Qwen3-8B")
    problems = data or _ask("--data", "File of problems (.jsonl, .parquet), or a task", "gcd")
    asked = hardware or _ask(
        "--hardware", f"Hardware: here ({here}), cpu, or GPUs such as 8x80", "here"
    )
    chosen = recipe.parse_hardware(asked, here, len(os.sched_getaffinity(0)))
    from_hub = hub_id(name) is not None
    folder = local_folder(name, "--model", ("config.json",))
    way_out = "name a Hugging Face folder, or an id of the Hub such as Qwen/Qwen3-8B"
    read_settings(folder, "--model", way_out)
    task = task_of(problems)
    with named_by_options(OPTIONS):
        run = run_out or f"runs/{out.stem}"
        settings, places = recipe.choose(name, folder, task, chosen, run, steps)
    header = [
        f"{name} on {problems}, {chosen}. Made by `tlt init`; all settings: docs/configuration.md.",
        "",
        f"  tlt train {out} --check",
        f"  tlt train {out}",
        f"  tlt watch {run}",
        "",
        *recipe.plan_lines(places),
    ]
    text = "".join(f"# {line}".rstrip() + "\n" for line in header) + settings
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        out.write_text(text)
        checked = resolve_defaults(load_config(TrainConfig, out))
        if not from_hub:
            with named_by_options(OPTIONS):
                places = check_run(output, checked, resume=False)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    output.result(
        {"path": str(out), "settings": tomllib.loads(text), "memory": memory_data(places)}
    )
    output.wrote(str(out))
    if from_hub and not as_json:
        output.marked(
            "only planned:",
            "yellow",
            f"weights and data are checked by tlt train {out} --check, which downloads the model",
        )
    output.say(f"next: tlt train {out} --check, then without --check")


def _here() -> Hardware:
    """Return what this machine has: its GPUs, or else its cores."""
    from tlt.hardware import this_machine
    from tlt.train.recipe import Hardware

    machine = this_machine()
    host_gib = machine.host_bytes // 2**30 if machine.host_bytes else None
    if not machine.num_gpus:
        return Hardware(cores=len(os.sched_getaffinity(0)), host_gib=host_gib)
    gpu_gib = machine.gpu_bytes // 2**30 if machine.gpu_bytes else None
    return Hardware(gpus=machine.num_gpus, gpu_gib=gpu_gib, host_gib=host_gib)


def _ask(option: str, question: str, example: str) -> str:
    """Ask at the terminal; refuse if there is none."""
    from tlt.errors import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError(
            f"{option} is missing, and without a terminal nothing can be asked; e.g. {example}"
        )
    return str(typer.prompt(question, default=example, err=True))
