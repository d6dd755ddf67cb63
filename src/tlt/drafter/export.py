"""Exports a drafter for deployment: a folder that stock vLLM loads, with its provenance.

vllm serve TARGET --speculative-config '{"method": "eagle3", "model": FOLDER,
                                         "num_speculative_tokens": 4}'
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from tlt.config.load import read_json
from tlt.drafter.checkpoint import STATE, WEIGHTS, load_drafter
from tlt.errors import ConfigError

PROVENANCE = "provenance.json"


def export(source: Path, target: Path, out: Path) -> dict[str, Any]:
    """Copy a trained drafter to `out` and return its provenance.

    `source` is a drafter folder, or the folder of a training run, whose best version is exported.
    The drafter must fit `target`: the drafter of another model would load, but vLLM would accept
    none of its drafts.
    """
    version = _version_of(source)
    config = load_drafter(version).config
    way_out = "pass the model it was trained for"
    target_config = read_json(target / "config.json", "the config of a model", way_out)
    for key in ("hidden_size", "vocab_size"):
        if target_config.get(key) != getattr(config, key):
            raise ConfigError(
                f"{version} drafts for a model with {key} {getattr(config, key)}, but {target} has "
                f"{target_config.get(key)}; {way_out}"
            )
    state = version / STATE
    provenance: dict[str, Any] = {
        "target": {"path": str(target), "architectures": target_config.get("architectures")},
        "drafter": {
            "method": "eagle3",
            "draft_vocab_size": config.draft_vocab_size,
            "sha256": hashlib.sha256((version / WEIGHTS).read_bytes()).hexdigest(),
        },
    }
    if state.exists():
        saved = read_json(state, "the state of a training run", f"remove {state}")
        progress = saved.get("progress")
        steps = progress.get("step") if isinstance(progress, dict) else None
        notes = saved.get("notes")
        provenance["training"] = {"steps": steps, **(notes if isinstance(notes, dict) else {})}
    report = source / "report.json"
    if report.exists():
        measured = read_json(report, "the report of a training run", f"remove {report}")
        keep = ("data", "acceptance", "budget_minutes", "provenance")
        provenance["measured"] = {key: measured[key] for key in keep if key in measured}
    out.mkdir(parents=True, exist_ok=True)
    (out / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
    shutil.copyfile(version / "config.json", out / "config.json")
    partial = out / f"{WEIGHTS}.partial"
    shutil.copyfile(version / WEIGHTS, partial)
    partial.rename(out / WEIGHTS)
    return provenance


def _version_of(source: Path) -> Path:
    if (source / "config.json").exists():
        return source
    versions = sorted((source / "versions").glob("v*"))
    if not versions:
        raise ConfigError(
            f"{source} holds neither a drafter (config.json) nor versions/ of a training run; make "
            "one with `tlt drafter train`"
        )
    return versions[-1]
