"""Arms, reports of engine steps, and a table of step times for tests of strategies."""

import random
from collections.abc import Callable
from functools import partial

from benchmarks.replay import Run, StepTable

from tlt.contracts import OFF, Arm, StepReport, Strategy
from tlt.strategy.spec import Fixed
from tlt.tasks.tail import HeavyTail

EAGLE = [Arm("eagle3", k) for k in (1, 2, 4)]
NGRAM = [Arm("ngram", k) for k in (2, 4)]
ARMS = [OFF, *EAGLE, *NGRAM]


def report(
    arms: tuple[Arm, Arm],
    num_decodes: int,
    elapsed_s: float,
    accepted_at: tuple[int, ...] = (),
) -> StepReport:
    verified, proposed = arms
    return StepReport(
        step=0,
        verified=verified,
        proposed=proposed,
        num_decodes=num_decodes,
        num_prefill_tokens=0,
        num_drafts=num_decodes if verified.num_draft_tokens else 0,
        num_draft_tokens=num_decodes * verified.num_draft_tokens,
        num_accepted_tokens=sum(accepted_at),
        accepted_at=accepted_at,
        num_output_tokens=num_decodes + sum(accepted_at),
        elapsed_s=elapsed_s,
    )


def recorded() -> StepTable:
    """Return the table of a small engine on one core, where verifying costs compute."""
    off = [(1.0, 0.030), (8.0, 0.032), (32.0, 0.045), (64.0, 0.065)]
    seconds = {OFF: off}
    for arm in EAGLE:
        k = arm.num_draft_tokens
        seconds[arm] = [(b, s + 0.002 + 0.0014 * k + 0.0011 * k * b) for b, s in off]
    for arm in NGRAM:
        seconds[arm] = [(b, s + 0.0005 * arm.num_draft_tokens * b) for b, s in off]
    accepted = {"eagle3": [0.72, 0.52, 0.40, 0.30], "ngram": [0.3, 0.15, 0.1, 0.07]}
    return StepTable(seconds, accepted, {"eagle3": 1.0, "ngram": 0.5})


def rollouts(count: int, requests: int, scale: int = 1) -> list[list[int]]:
    rng = random.Random(0)
    tail = HeavyTail(60, 300, 500)
    return [[scale * tail.draw(rng) for _ in range(requests)] for _ in range(count)]


def given_strategy(strategy: Strategy, run: Run) -> Strategy:
    return strategy


def always(arm: Arm) -> Callable[[Run], Strategy]:
    return partial(given_strategy, Fixed(arm))
