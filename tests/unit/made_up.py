"""Records and folders of runs that never were, by the same writers as in a run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from tlt.observe.record import MetricsLog, StepLog
from tlt.observe.timeline import TimelineLog, step_timeline
from tlt.spans import Span

TAIL = [40] * 14 + [120, 600]
PLAIN = (("off", 2.0, 16, 600, 0), ("off", 8.0, 1, 300, 0))
"""Arm, seconds, running requests, tokens and accepted tokens of an engine's spans."""


def made_up_run(num_steps: int) -> list[dict[str, float]]:
    """A record for every step, as a run would write them, that learns and grows its answers."""
    draw = random.Random(0)
    records = [{"step": 0, "eval/reward_mean": 0.1, "time/eval_s": 9.0}]
    for step in range(1, num_steps + 1):
        done = step / num_steps
        median_tokens = 200 * (1 + done) * draw.uniform(0.9, 1.1)
        seconds = {
            "time/rollout_s": 40 + 20 * done + draw.uniform(-5, 5),
            "time/reward_wait_s": draw.uniform(0.1, 1),
            "time/update_s": 18 + draw.uniform(-1, 1),
            "time/sync_s": 2.0,
            "time/checkpoint_s": 0.0 if step % 10 else 4.0,
            "time/other_s": 0.5,
        }
        if step % 10 == 0:
            seconds["time/eval_s"] = 9.0
        values = {
            "step": step,
            "reward/mean": min(1, 0.1 + 0.7 * done + draw.gauss(0, 0.06)),
            "response/median_tokens": median_tokens,
            "response/p99_tokens": median_tokens * 7,
            "response/longest_tokens": min(4096, median_tokens * draw.uniform(8, 16)),
            "rollout/output_tokens": 50_000,
            "rollout/tokens_per_s": 50_000 / seconds["time/rollout_s"],
            "learner/tokens_per_s": 60_000 / seconds["time/update_s"],
            "learner/gap_mean": 0.01 + draw.uniform(0, 0.003),
            **seconds,
            "time/step_s": sum(seconds.values()),
        }
        if step % 10 == 0:
            values["eval/reward_mean"] = 0.12 + 0.68 * done
        records.append(values)
    return records


def made_up_folder(
    folder: Path,
    lengths: Sequence[int] = TAIL,
    arms: Sequence[tuple[str, float, float, int, int]] = PLAIN,
    config: dict[str, Any] | None = None,
    steps: int = 4,
    **changed: float,
) -> Path:
    """Write a run with settings, metrics, lengths and a timeline, and return its folder.

    `changed` are metrics, with `__` for the slash in their names.
    """
    folder.mkdir()
    settings: dict[str, Any] = {"run": {"out": folder.name}, "tlt": {"enabled": False}}
    settings |= config or {}
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    metrics, lines = MetricsLog(folder / "metrics.jsonl"), StepLog(folder / "lengths.jsonl")
    log = TimelineLog(folder / "timeline.json", ["engine-0", "engine-1"])
    log.rewind(-1)
    at_s = 1000.0
    for step in range(1, steps + 1):
        found = made_up_record(step, **changed)
        metrics.append(found)
        lines.append({"step": step, "group_size": 8, "tokens": list(lengths)})
        end_s = at_s + found["time/step_s"]
        rollout_end_s = at_s + found["time/rollout_s"]
        log.append(
            step_timeline(
                step,
                at_s,
                end_s,
                [
                    ("rollout", at_s, rollout_end_s),
                    ("update", rollout_end_s, rollout_end_s + found["time/update_s"]),
                ],
                {"engine-0": _spans(at_s, arms), "engine-1": _spans(at_s, arms[:1])},
                {"engine-1": [Span("training", at_s + 4, at_s + 9)]}
                if settings["tlt"]["enabled"]
                else {},
            )
        )
        at_s = end_s
    metrics.close()
    lines.close()
    return folder


def made_up_record(step: int, **changed: float) -> dict[str, float]:
    """Return the record of an RL step; `__` in a name stands for its slash."""
    found = {
        "step": step,
        "reward/mean": 0.1 * step,
        "reward/groups_with_signal_share": 0.5,
        "response/truncated_share": 0.0,
        "rollout/output_tokens": 1000.0,
        "rollout/acceptance_length": 2.0,
        "rollout/engine_restarts": 0,
        "learner/restarts": 0,
        "drafter_version": 0,
        "time/rollout_s": 10.0,
        "time/reward_wait_s": 0.1,
        "time/update_s": 3.0,
        "time/sync_s": 0.5,
        "time/checkpoint_s": 0.0,
        "time/eval_s": 0.0,
        "time/other_s": 0.1,
    }
    found |= {key.replace("__", "/"): value for key, value in changed.items()}
    found["time/step_s"] = sum(v for k, v in found.items() if k.startswith("time/"))
    return found


def _spans(at_s: float, arms: Sequence[tuple[str, float, float, int, int]]) -> list[Span]:
    found = []
    for arm, seconds, load, tokens, accepted in arms:
        drafts = 0 if arm == "off" else tokens - accepted
        found.append(Span("generating", at_s, at_s + seconds, load, arm, tokens, drafts, accepted))
        at_s += seconds
    return found
