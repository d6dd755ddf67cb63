"""Records of a run that never was."""

from __future__ import annotations

import random


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
