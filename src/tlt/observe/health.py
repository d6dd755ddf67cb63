"""Signs that a run does not learn as it should, from its records. Pure; every threshold is here.

`signs` is what `tlt watch`, `tlt doctor --run` and the report say first. `HealthWatch` ends a run
that has had nothing to learn from for several RL steps in a row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tlt.errors import TrainingFailed
from tlt.observe.summary import Record, series

logger = logging.getLogger(__name__)

FAULT_SHARE = 0.01
"""Share of an RL step's samples without a reward that is reported."""
MANY_FAULTS = 0.5
"""Share of an RL step's samples without a reward above which the RL step teaches too little."""
LATE_SHARE = 0.02
"""Share of the engines' time beyond its emulated length that is reported."""
MAX_STEPS = 8
"""RL steps that a sign names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault or a bottleneck of a run: what was measured, and what to change."""

    kind: str
    says: str
    change: str
    weight: float = 0.0
    """Share of the run time at stake, estimated."""


def signs(records: Sequence[Record]) -> Iterator[Finding]:
    """Yield what is wrong with these RL steps, the worst first."""
    if skipped := steps_with(records, "learner/skipped_updates"):
        yield Finding(
            "skipped_updates",
            f"In {skipped} the gradient was not finite: the policy did not change.",
            "Lower learner.lr or learner.max_grad_norm, set policy.dtype = 'float32', and look at "
            "the rewards in samples/: one huge reward is enough.",
        )
    if faulty := steps_with(records, "reward/fault_share", FAULT_SHARE):
        total = sum(series(records, "reward/faults")[1])
        worst = max(series(records, "reward/fault_share")[1])
        yield Finding(
            "reward_faults",
            f"In {faulty} the reward function failed, timed out or returned no number, for up to "
            f"{worst:.0%} of the samples ({total:.0f} in all). They were not trained on.",
            "See run.log in run.out for the reward's errors, and `fault` in samples/. Raise "
            "reward.timeout_s or reward.num_workers if it is too slow.",
        )
    if unwritten := steps_with(records, "checkpoint/faults"):
        yield Finding(
            "checkpoint_faults",
            f"In {unwritten} a checkpoint could not be written.",
            "Make room in run.out; run.log says why it failed.",
        )


def late(records: Sequence[Record]) -> Iterator[Finding]:
    """Yield that the machine is too slow for what a run emulates, if it is."""
    if steps := steps_with(records, "emulate/late_s_share", LATE_SHARE):
        worst = max(series(records, "emulate/late_s_share")[1])
        yield Finding(
            "late",
            f"In {steps} up to {worst:.0%} of the engine seconds went beyond their emulated time: "
            "the CPU cores are too slow for this emulation.",
            "Raise emulate.dilation, or lower pool.num_engines.",
        )


def steps_with(records: Sequence[Record], name: str, above: float = 0.0) -> str:
    """Return the RL steps in which the metric is above a threshold, in words; empty if none."""
    steps, values = series(records, name)
    found = [f"{step:.0f}" for step, value in zip(steps, values, strict=True) if value > above]
    if not found:
        return ""
    more = f" and {len(found) - MAX_STEPS} more" if len(found) > MAX_STEPS else ""
    return f"RL step{'s' if len(found) > 1 else ''} {', '.join(found[:MAX_STEPS])}{more},"


class HealthWatch:
    """Ends a run that learns nothing: `observe` every record."""

    def __init__(self, max_steps: int, updates_per_step: int) -> None:
        self._max_steps = max_steps
        self._updates_per_step = updates_per_step
        self._in_a_row = 0

    def observe(self, record: Record) -> None:
        """Log what is wrong with an RL step, and raise if it stays wrong for too long."""
        found = list(signs([record]))
        for sign in (*found, *late([record])):
            logger.warning("%s %s", sign.says, sign.change)
        none_updated = record.get("learner/skipped_updates", 0) >= self._updates_per_step
        lost = none_updated or record.get("reward/fault_share", 0) > MANY_FAULTS
        self._in_a_row = self._in_a_row + 1 if lost else 0
        if self._max_steps and self._in_a_row >= self._max_steps:
            raise TrainingFailed(
                f"the last {self._in_a_row} RL steps taught the policy almost nothing. "
                f"{found[0].says} {found[0].change} alarm.max_lost_steps = 0 continues anyway"
            )
