"""Checks of the start and of losslessness: an engine drafts, and drafts change no token."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tlt.bench import same
from tlt.contracts import SamplingSpec
from tlt.doctor.engines import LEAST_ACCEPTED, engine_config, started, tokens_of, work
from tlt.doctor.place import Place


def start(place: Place) -> dict[str, Any]:
    """Start an engine, and check what it says about itself."""
    began_s = time.monotonic()
    with started(engine_config(place)) as engine:
        seconds = time.monotonic() - began_s
        report = engine.report()
        if report["faults"]:
            raise AssertionError(f"the self-test found: {'; '.join(report['faults'])}")
        if not str(report["proposer"]).startswith("Switching"):
            raise AssertionError(f"{report['proposer']} drafts, which cannot switch the drafter")
        tokens_of(engine, work(4, 16))
        trace = engine.call("take_trace")
    steps_s = sorted(step.elapsed_s for step in trace)
    return {"start_s": seconds, "report": report, "step_s_median": steps_s[len(steps_s) // 2]}


def greedy(place: Place) -> dict[str, Any]:
    """Compare greedy tokens in float32; CPU engines must not differ even at near-ties."""
    sampling = SamplingSpec(64, 0.0, logprobs=False)
    return _same(place, "float32", sampling, near_ties=place.num_gpus > 0)


def sampled(place: Place) -> dict[str, Any]:
    """Compare sampled tokens in float32."""
    return _same(place, "float32", SamplingSpec(64, 1.0, logprobs=False))


def graphs(place: Place) -> dict[str, Any]:
    """Compare sampled tokens of engines that capture the CUDA graphs of all their arms."""
    return _same(place, "bfloat16", SamplingSpec(64, 1.0, logprobs=False), {"enforce_eager": None})


def bfloat16(place: Place) -> dict[str, Any]:
    """Compare greedy tokens, and examine whether the logits of each difference are nearly tied."""
    args = {"enforce_eager": None} if place.num_gpus else {}
    return _same(place, "bfloat16", SamplingSpec(64, 0.0, logprobs=False), args, near_ties=True)


def tensor_parallel(place: Place) -> dict[str, Any]:
    """Compare sampled tokens of tensor-parallel engines."""
    return _same(place, "float32", SamplingSpec(64, 1.0, logprobs=False), num_gpus=2)


def _same(
    place: Place,
    dtype: str,
    sampling: SamplingSpec,
    args: Mapping[str, Any] | None = None,
    num_gpus: int | None = None,
    near_ties: bool = False,
) -> dict[str, Any]:
    """Run `tlt verify`; raise if a mode differs, or if too few drafts were accepted.

    With `near_ties`, differences that the rounding of logits explains are allowed.
    """
    plan = same.Plan(
        model=str(place.policy),
        drafter=str(place.drafter),
        dtype=dtype,
        prompts=tuple(request.prompt_token_ids for request in work(16, 1)),
        sampling=sampling,
        seed=0,
        num_gpus=place.engine_gpus if num_gpus is None else num_gpus,
        engine_args=place.room() | dict(args or {}),
    )
    result = same.run(plan, lambda what, done, total: None)
    rows = result["modes"]
    table = [dict(zip(same.HEADS, cells, strict=True)) for cells in same.cells(result)]
    found = {row["mode"]: row["difference"] for row in rows if row["difference"]}
    if not all(near_ties and difference["near_tie"] for difference in found.values()):
        counts = [f"{d['num_samples']} of 16 samples in '{mode}'" for mode, d in found.items()]
        raise AssertionError(
            f"tokens differ from those without drafts: {', '.join(counts)}. A few samples point to "
            f"kernels that round by batch size, many to a fault of losslessness. {table}"
        )
    for row in rows:
        share = row["accepted_tokens"] / max(1, row["draft_tokens"])
        if row["mode"].startswith("eagle3") and share < LEAST_ACCEPTED:
            raise AssertionError(
                f"the policy accepted {share:.0%} of the trained drafter's tokens, at least "
                f"{LEAST_ACCEPTED:.0%} is right: the drafter reads wrong states; {table}"
            )
    return {"verdict": result["verdict"], "modes": table}
