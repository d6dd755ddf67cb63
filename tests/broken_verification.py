"""A fault for tests to find: a sampler that lets the first token of every draft stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def break_verification(sampler: Any, num_good: int = 0) -> None:
    """Break `tlt.vllm.v1.sampler` in this process, after `num_good` draws with drafts."""
    draw, num_draws = sampler.draw, 0

    def broken(logits: Any, num_drafts: Sequence[int], drafts: Any, *others: Any) -> Any:
        nonlocal num_draws
        out = draw(logits, num_drafts, drafts, *others)
        num_draws += any(num_drafts)
        begin = 0
        for request, count in enumerate(num_drafts):
            if count and num_draws > num_good:
                out.sampled_token_ids[request, 0] = drafts[begin]
            begin += count
        return out

    sampler.draw = broken


def break_engine(engine: Any) -> None:
    """Break the process of an engine."""
    from tlt.vllm.v1 import sampler

    break_verification(sampler)
