"""Checks of the start and of losslessness: an engine drafts, and drafts change no token."""

from __future__ import annotations

import time
from typing import Any

from tlt.bench import same
from tlt.contracts import SamplingSpec
from tlt.doctor.engines import LEAST_ACCEPTED, Place, engine_config, started, tokens_of, work
from tlt.rollout.client import Engine


def start(place: Place) -> dict[str, Any]:
    """An engine with n-grams and EAGLE-3 starts, and its sampler passes the self-test."""
    began_s = time.monotonic()
    with started(engine_config(place)) as engine:
        seconds = time.monotonic() - began_s
        report = engine.report()
        if report["faults"]:
            raise AssertionError(f"the self-test found: {'; '.join(report['faults'])}")
        if not str(report["proposer"]).startswith("Switching"):
            raise AssertionError(f"{report['proposer']} drafts, which cannot switch the drafter")
        tokens_of(engine, work(4, 16))
        steps_s = sorted(step.elapsed_s for step in engine.call(Engine.take_trace))
    return {"start_s": seconds, "report": report, "step_s_median": steps_s[len(steps_s) // 2]}


def greedy(place: Place) -> dict[str, Any]:
    """Greedy tokens are the same with and without drafts, with random switching."""
    return _same(place, temperature=0.0, near_ties=place.num_gpus > 0)


def sampled(place: Place) -> dict[str, Any]:
    """Sampled tokens are the same with and without drafts, with random switching."""
    return _same(place)


def graphs(place: Place) -> dict[str, Any]:
    """Sampled tokens are the same with and without drafts, in bfloat16 with CUDA graphs."""
    return _same(place, dtype="bfloat16", eager=False)


def bfloat16(place: Place) -> dict[str, Any]:
    """With the kernels of a real run, greedy tokens differ at near-ties only."""
    eager = not place.num_gpus
    return _same(place, dtype="bfloat16", temperature=0.0, near_ties=True, eager=eager)


def tensor_parallel(place: Place) -> dict[str, Any]:
    """Sampled tokens are the same with and without drafts on two GPUs."""
    return _same(place, num_gpus=2)


def _same(
    place: Place,
    dtype: str = "float32",
    temperature: float = 1.0,
    near_ties: bool = False,
    eager: bool = True,
    num_gpus: int | None = None,
) -> dict[str, Any]:
    """Run `tlt verify`; raise if a mode differs, or if too few drafts were accepted.

    With `near_ties`, differences that the rounding of logits explains are allowed.
    """
    plan = same.Plan(
        **place.models,
        dtype=dtype,
        prompts=tuple(request.prompt_token_ids for request in work(16, 1)),
        sampling=SamplingSpec(64, temperature, logprobs=False),
        seed=0,
        num_gpus=place.engine_gpus if num_gpus is None else num_gpus,
        engine_args=place.room if eager else place.room | {"enforce_eager": None},
    )
    result = same.run(plan, lambda what, done, total: None)
    table = [dict(zip(same.HEADS, cells, strict=True)) for cells in same.cells(result)]
    for row in result["modes"]:
        difference = row["difference"]
        if difference and not (near_ties and difference["near_tie"]):
            raise AssertionError(
                f"tokens differ from those without drafts: {difference['num_samples']} of 16 "
                f"samples in '{row['mode']}'. A few samples point to kernels that round by batch "
                f"size, many to a fault of losslessness. {table}"
            )
        share = row["accepted_tokens"] / max(1, row["draft_tokens"])
        if row["mode"].startswith("eagle3") and share < LEAST_ACCEPTED:
            raise AssertionError(
                f"the policy accepted {share:.0%} of the trained drafter's tokens, at least "
                f"{LEAST_ACCEPTED:.0%} is right: the drafter reads wrong states; {table}"
            )
    return {"verdict": result["verdict"], "modes": table}
