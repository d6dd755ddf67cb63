"""What a run's folder tells about one RL step, for the record of a turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.observe.record import read
from tlt.observe.timeline import LEARNER, StepTimeline, read_timeline

NOT_TRAINING = ("time/eval_s", "time/checkpoint_s")
"""Stages that measure or save; end to end is the RL step without them."""


def record(out: Path, step: int) -> dict[str, Any]:
    """Return seconds, lengths, engine steps, leases, metrics and a digest of the samples."""
    metrics = _line(out / "metrics.jsonl", step)
    timelines = {each.step: each for each in read_timeline(out / "timeline.json")}
    found = {
        "end_to_end_s": metrics["time/step_s"] - sum(metrics[name] for name in NOT_TRAINING),
        "rollout_s": metrics["time/rollout_s"],
        "output_tokens": metrics["rollout/output_tokens"],
        "samples": digest(out / "samples" / f"step-{step:06d}.jsonl"),
        "lengths": _line(out / "lengths.jsonl", step)["tokens"],
        "metrics": {name: value for name, value in metrics.items() if name != "step"},
    }
    if step in timelines:
        found |= {"decoding": decoding(timelines[step]), "leases": leases(timelines[step])}
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


def decoding(timeline: StepTimeline) -> list[dict[str, Any]]:
    """Return the engine steps of an RL step by arm and batch size, the longest time first.

    A request gets one token per engine step and those accepted, so the counts give the engine
    steps. Batch sizes are grouped: 1, 2, up to 4, up to 8, and so on.
    """
    found: dict[tuple[str, int], dict[str, float]] = {}
    for worker, spans in timeline.rows.items():
        for span in spans:
            if worker == LEARNER or span.state != "generating" or span.running <= 0:
                continue
            batch = 1 << max(0, round(span.running) - 1).bit_length()
            of = found.setdefault(
                (span.arm, batch),
                dict.fromkeys(("seconds", "engine_steps", "tokens", "drafts", "accepted"), 0.0),
            )
            of["seconds"] += span.seconds
            of["engine_steps"] += (span.tokens - span.accepted) / span.running
            for name in ("tokens", "drafts", "accepted"):
                of[name] += getattr(span, name)
    rows = [{"arm": arm, "batch_up_to": batch, **of} for (arm, batch), of in found.items()]
    return sorted(rows, key=lambda row: -row["seconds"])


def leases(timeline: StepTimeline) -> dict[str, list[float]]:
    """Return the seconds of every lease, by worker."""
    found = {
        worker: [span.seconds for span in spans if span.state == "training"]
        for worker, spans in timeline.rows.items()
        if worker != LEARNER
    }
    return {worker: seconds for worker, seconds in found.items() if seconds}


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
