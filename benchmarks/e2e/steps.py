"""What a run's folder tells about one RL step, for the record of a turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.observe.record import read

NOT_TRAINING = ("time/eval_s", "time/checkpoint_s")
"""Stages that measure or save; end to end is the RL step without them."""


def record(out: Path, step: int) -> dict[str, Any]:
    """Return seconds, lengths, metrics and a digest of the samples."""
    metrics = _line(out / "metrics.jsonl", step)
    found = {
        "end_to_end_s": metrics["time/step_s"] - sum(metrics[name] for name in NOT_TRAINING),
        "rollout_s": metrics["time/rollout_s"],
        "output_tokens": metrics["rollout/output_tokens"],
        "samples": digest(out / "samples" / f"step-{step:06d}.jsonl"),
        "lengths": _line(out / "lengths.jsonl", step)["tokens"],
        "metrics": {name: value for name, value in metrics.items() if name != "step"},
    }
    return rounded(found)


def _line(path: Path, step: int) -> dict[str, Any]:
    return next(each for each in reversed(read(path)) if each["step"] == step)


def digest(path: Path) -> str:
    """Return a digest of an RL step's samples: texts, lengths, rewards."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def policy(out: Path) -> str:
    """Return a digest of every bit of the policy that a run left."""
    found = hashlib.sha256()
    for path in sorted((out / "policy").glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def rounded(value: Any) -> Any:
    """Return a record with six significant digits, so that files stay small."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return value


def dtype(out: Path) -> str:
    """Return the dtype that a run computed in."""
    import tomllib

    return str(tomllib.loads((out / "config.toml").read_text())["policy"]["dtype"])


def write(path: Path, result: Mapping[str, Any], turns: list[dict[str, Any]]) -> None:
    """Write a result with its turns, one turn per line."""
    head = json.dumps(dict(result), indent=2).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(turn)}" for turn in turns)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n  "turns": [\n{lines}\n  ]\n}}\n')
