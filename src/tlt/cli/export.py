"""`tlt models export`: the policy of a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tlt.cli import options as opt
from tlt.cli.output import Output


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, also a running one.")
    ],
    out: Annotated[Path, opt.option("Folder to write.")],
    step: opt.CheckpointStep = None,
    as_json: opt.Json = False,
) -> None:
    """Write the policy of a checkpoint as a folder that transformers and vLLM load."""
    from tlt.errors import ConfigError
    from tlt.train.export import export_policy

    if out.exists():
        raise ConfigError(f"--out {out} exists; remove it, or name another folder")
    found = export_policy(run, step, out)
    output = Output(as_json)
    output.result({"run": str(run), "step": found, "out": str(out)})
    output.wrote(f"{out}: the policy of {run} after RL step {found}")
