"""Exports a drafter for deployment: a folder that stock vLLM loads, with its provenance.

Two formats. The plain layout goes beside the model it drafts for:

    vllm serve TARGET --speculative-config '{"method": "eagle3", "model": FOLDER,
                                             "num_speculative_tokens": 4}'

The speculators format names that model itself:

    vllm serve FOLDER

Both are read again (`tlt.drafter.checkpoint`), and an export from one to the other changes no
weight. `card` describes the drafter for its users.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlt.config.load import read_json
from tlt.drafter.card import card
from tlt.drafter.checkpoint import (
    STATE,
    WEIGHTS,
    build_drafter,
    read_drafter,
    read_moments,
    write_files,
    write_moments,
)
from tlt.drafter.speculators import is_speculators, speculators_config, speculators_tensors
from tlt.errors import ConfigError

PROVENANCE, CARD = "provenance.json", "README.md"
NUM_DRAFT_TOKENS = 4
"""Draft length of a drafter whose trained length is unknown."""
WAY_OUT = "pass the model it was trained for"

Format = Literal["eagle3", "speculators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """What to export, and how."""

    source: Path
    """A drafter, or the run of `tlt drafter train` or `tlt train` whose drafter is exported."""
    target: Path
    """Folder of the model that it drafts for."""
    out: Path
    target_name: str | None = None
    """Name of that model for others, such as its Hub id; by default its folder."""
    format: Format = "eagle3"
    num_draft_tokens: int | None = None
    """Draft length to serve with; by default the length of its training."""
    card: bool = False
    moments: bool = False
    """Whether to add the optimizer's state, to continue training from it."""


def export(plan: ExportPlan) -> dict[str, Any]:
    """Write a trained drafter to `plan.out` and return its provenance.

    The drafter must fit the target: the drafter of another model would load, but vLLM would accept
    none of its drafts.
    """
    version = _version_of(plan.source)
    target_config = read_json(plan.target / "config.json", "the config of a model", WAY_OUT)
    num_layers = target_config.get("num_hidden_layers")
    config, weights = read_drafter(version, num_layers)
    build_drafter(version, config, weights)  # refuses a damaged one
    for key in ("hidden_size", "vocab_size"):
        if target_config.get(key) != getattr(config, key):
            raise ConfigError(
                f"{version} drafts for a model with {key} {getattr(config, key)}, but "
                f"{plan.target} has {target_config.get(key)}; {WAY_OUT}"
            )
    provenance: dict[str, Any] = {
        "target": {
            "path": plan.target_name or str(plan.target),
            "architectures": target_config.get("architectures"),
        },
        "drafter": {
            "method": "eagle3",
            "format": plan.format,
            "draft_vocab_size": config.draft_vocab_size,
        },
    }
    provenance |= _record(plan.source, version)
    trained = _num_draft_tokens(plan.source, version, provenance)
    num_draft_tokens = plan.num_draft_tokens or trained or NUM_DRAFT_TOKENS
    provenance["drafter"]["num_draft_tokens"] = num_draft_tokens

    dtype = str(weights["fc.weight"].dtype).removeprefix("torch.")
    if plan.format == "speculators":
        name = plan.target_name or str(plan.target.resolve())
        architectures = target_config.get("architectures") or ()
        hf_config = speculators_config(config, dtype, name, architectures, num_draft_tokens)
        weights = speculators_tensors(weights, config)
    else:
        hf_config = config.to_hf(dtype)
    write_moments(_moments(version) if plan.moments else None, plan.out)
    write_files(plan.out, hf_config, weights)
    sha256 = hashlib.sha256((plan.out / WEIGHTS).read_bytes()).hexdigest()
    provenance["drafter"]["sha256"] = sha256
    (plan.out / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
    if plan.card:
        (plan.out / CARD).write_text(_card(plan.source, provenance))
    return provenance


def _card(source: Path, provenance: dict[str, Any]) -> str:
    try:
        return card(provenance)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--card: what {source} says of the drafter's training is damaged ({error!r}); fix "
            "report.json or provenance.json, or leave --card out"
        ) from error


def _version_of(source: Path) -> Path:
    if (source / "config.json").exists():
        return source
    versions = sorted((source / "versions").glob("v*"))
    if versions:
        return versions[-1]
    if (source / "drafter" / "config.json").exists():
        return source / "drafter"
    raise ConfigError(
        f"{source} holds neither a drafter (config.json) nor versions/ of a training run; make "
        "one with `tlt drafter train`"
    )


def _moments(version: Path) -> dict[str, Any]:
    moments = read_moments(version)
    if moments is None:
        raise ConfigError(
            f"--moments: {version} holds no state of an optimizer; runs of `tlt drafter train` do, "
            "and checkpoints of `tlt train`, e.g. runs/first/checkpoints/step-000010/drafter"
        )
    return moments


# --- what runs recorded ---------------------------------------------------------------------------


def _record(source: Path, version: Path) -> dict[str, Any]:
    """Return the records of the drafter's training and its measurements."""
    found: dict[str, Any] = {}
    before = version / PROVENANCE
    if before.exists():  # an export of an export
        known = read_json(before, "the provenance of a drafter", f"remove {before}")
        kept = {key: known.get(key) for key in ("training", "measured")}
        found |= {key: value for key, value in kept.items() if isinstance(value, dict)}
    state = version / STATE
    if state.exists():
        saved = read_json(state, "the state of a training run", f"remove {state}")
        progress = saved.get("progress")
        steps = progress.get("step") if isinstance(progress, dict) else None
        notes = saved.get("notes")
        found["training"] = {"steps": steps, **(notes if isinstance(notes, dict) else {})}
    report = source / "report.json"
    if report.exists():
        measured = read_json(report, "the report of a training run", f"remove {report}")
        keep = (
            *("data", "acceptance", "num_draft_tokens", "num_held_out_prompts"),
            *("budget_minutes", "provenance"),
        )
        found["measured"] = {key: measured[key] for key in keep if key in measured}
    if (metrics := source / "metrics.jsonl").exists() and version.parent == source:
        found["measured"] = _measured_by_run(metrics)
    return found


def _measured_by_run(metrics: Path) -> dict[str, Any]:
    """Return an RL run's last measurement of its drafter."""
    measured: dict[str, Any] = {}
    for line in metrics.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a line that a kill cut off
        if isinstance(record, dict) and (length := record.get("harvest/held_out_length")):
            measured = {"held_out_length": length, "rl_step": record.get("step")}
    return measured


def _num_draft_tokens(source: Path, version: Path, provenance: dict[str, Any]) -> int | None:
    """Return the draft length that the drafter was trained for, where something says it."""
    said = provenance.get("measured", {}).get("num_draft_tokens")
    config = read_json(version / "config.json", "the config of a drafter", "copy it again")
    with suppress(LookupError, TypeError, ValueError):
        if said is None and is_speculators(config):
            said = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        if said is None and (source / "config.toml").exists():
            said = tomllib.loads((source / "config.toml").read_text())["tlt"]["num_draft_tokens"]
    return said if isinstance(said, int) and said > 0 else None
