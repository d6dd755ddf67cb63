"""Rechecks: a share of the finished samples is generated again without drafts, and compared.

With keyed sampling (`keyed`) both must have the same tokens: a sample's seed and the policy decide
them, with any drafts and on any engine. Engines whose arithmetic depends on the batch may differ at
near-ties. Anything else is a fault: speculation, or the engine, changed a sample.

A recheck uses idle time only. The pool offers one to an engine that has nothing left to generate
while others have. Where harvest uses idle time too, an engine makes one recheck and is then free to
be leased. The engine ends a recheck when it gets a request or a command, or when the rollout ends;
such a recheck is counted, and is not a fault. A recheck bypasses the dispatcher, so its tokens
reach neither rewards nor learner, and the engine does not count them.

Pure: `Rechecks` decides which samples are generated again, and what a difference means.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tlt.contracts import LARGEST_SHORTFALL, Recheck, Sample, SampleRequest

logger = logging.getLogger(__name__)

NEAR_TIES = {"float32": 1e-3, "bfloat16": 1.0}
"""Largest shortfall of a near-tie, in nats, by the engines' dtype; for temperature 1."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a recheck that was not ended early."""

    differs_at: int | None
    """Position of the first token that differs; None if all are equal."""
    shortfall: float
    """Nats by which the expected token's log-probability missed the draw there."""


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the first position in which two responses differ; None if they are equal."""
    shorter = min(len(expected), len(found))
    at = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    return None if at == len(expected) == len(found) else at


def compare(expected: Sequence[int], found: Sequence[int], missed: Mapping[int, float]) -> Verdict:
    """Return the verdict on the tokens found; `missed` has the shortfall at each position."""
    at = first_difference(expected, found)
    if at is None:
        return Verdict(None, 0.0)
    # No draw was missed if only one of the two responses ended.
    return Verdict(at, min(missed.get(at, LARGEST_SHORTFALL), LARGEST_SHORTFALL))


class Rechecks:
    """The rechecks of a run: `rollout_started`, `finished` for each sample, `next`, `ended`.

    A rollout may start more than once in an RL step: extra problems follow (`train.dapo`).
    """

    def __init__(self, share: float, max_tokens: int, dtype: str) -> None:
        self._share = share
        self._max_tokens = max_tokens
        self._near_tie = NEAR_TIES[dtype]
        self._chosen: dict[str, SampleRequest] = {}
        self._due: deque[Recheck] = deque()
        self._forget_counts()

    def step_started(self) -> None:
        """Forget the faults of an earlier RL step, also of one that was given up."""
        self.num_faults = 0

    def rollout_started(self, requests: Iterable[SampleRequest]) -> None:
        """Choose the samples to generate again. The same samples have the same choice always.

        Only samples to train on are chosen.
        """
        trained_on = [r for r in requests if r.rl_step is not None]
        self._chosen |= {r.sample_id: r for r in trained_on if _fits(r) and self._takes(r)}

    def _takes(self, request: SampleRequest) -> bool:
        text = f"recheck/{request.sampling.seed}".encode()
        draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return draw < self._share * 2**64

    def finished(self, sample: Sample) -> None:
        """Note a finished sample of the rollout."""
        request = self._chosen.pop(sample.sample_id, None)
        if request is None or not sample.token_ids:
            return
        expected = sample.token_ids[: self._max_tokens]
        sampling = replace(request.sampling, max_tokens=len(expected), logprobs=False)
        name = f"recheck/{sample.sample_id}"
        again = SampleRequest(name, request.prompt_token_ids, sampling)
        self._due.append(Recheck(again, expected, sample.policy_version))

    def next(self) -> Recheck | None:
        """Return the next sample to generate again."""
        return self._due.popleft() if self._due else None

    def ended(self, recheck: Recheck, verdict: Verdict | None, engine: str, seconds: float) -> None:
        """Take note of a recheck's result; None if it was ended early."""
        self._counts["recheck/engine_s"] += seconds
        if verdict is None:
            self._counts["recheck/ended_early"] += 1
            return
        self._counts["recheck/samples"] += 1
        self._counts["recheck/tokens"] += len(recheck.token_ids)
        if verdict.differs_at is None:
            return
        self._counts["recheck/differing"] += 1
        worst = max(self._counts["recheck/shortfall_max"], verdict.shortfall)
        self._counts["recheck/shortfall_max"] = worst
        # A low temperature multiplies all differences of logits.
        temperature = recheck.request.sampling.temperature
        limit = self._near_tie / (min(1.0, temperature) or 1.0)
        if verdict.shortfall <= limit:
            return
        self.num_faults += 1
        logger.error(
            "%s: generated again without drafts on %s, the sample has another token at position "
            "%d; the sample's own token misses the draw by %.3g nats, more than the %.2g of a "
            "near-tie: speculation or the engine has changed a sample",
            recheck.request.sample_id,
            engine,
            verdict.differs_at,
            verdict.shortfall,
            limit,
        )

    def rollout_ended(self) -> None:
        """Drop what is left: the policy changes next."""
        self._counts["recheck/left_out"] += len(self._chosen) + len(self._due)
        self._chosen.clear()
        self._due.clear()

    def record(self) -> dict[str, float]:
        """Return the counts since the last call; empty in a run without rechecks."""
        counts = self._counts | {"recheck/faults": self.num_faults}
        self._forget_counts()
        return counts if self._share else {}

    def _forget_counts(self) -> None:
        self.num_faults = 0
        """Differences since the last record that are not near-ties."""
        self._counts = {
            "recheck/samples": 0.0,
            "recheck/tokens": 0.0,
            "recheck/ended_early": 0.0,
            "recheck/left_out": 0.0,
            "recheck/differing": 0.0,
            "recheck/shortfall_max": 0.0,
            "recheck/engine_s": 0.0,
        }


def _fits(request: SampleRequest) -> bool:
    """Return whether a request has a seed, and no setting but temperature.

    Rounding may add a token to the likeliest ones of top-k and top-p, or remove one: no near-tie of
    the draw.
    """
    sampling = request.sampling
    plain = sampling.top_p == 1.0 and not sampling.top_k and not sampling.extra
    return sampling.seed is not None and plain
