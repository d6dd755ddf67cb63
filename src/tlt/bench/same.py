"""`tlt verify`: the same samples with and without drafts, compared token by token.

Two engines generate the same prompts with the same seeds. One engine cannot draft, and the other
one drafts. The first mode is plain decoding of all samples together; every other mode must draw its
tokens. A difference is examined with separately computed logits: two tokens are nearly tied if the
rounding of the logits decides between them.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.contracts import EngineStats, SampleRequest, SamplingSpec, ShowProgress
from tlt.rollout.client import Engine
from tlt.rollout.offline import ChildEngine
from tlt.rollout.recheck import NEAR_TIES
from tlt.rollout.recheck import first_difference as first_position
from tlt.vllm.args import engine_args
from tlt.vllm.lossless_checks import check_sampling

FEW = 3
"""Samples at a time in the mode that decodes plainly in small batches."""
LONGEST_DRAFT = 8
SHARE_OF_A_GPU = 0.4
"""Share of a GPU's memory for each of the two engines."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way through all samples."""

    name: str
    strategy: dict[str, Any]
    at_a_time: int
    """Samples that run at the same time, at most."""
    drafts: bool
    """Whether the engine that can draft runs it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of `tlt verify`."""

    model: str
    drafter: str | None
    dtype: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingSpec
    """The settings of all samples, without their seeds."""
    seed: int
    """The seed that the seeds of the samples follow from."""
    num_gpus: int = 0
    """GPUs that each engine is tensor-parallel over; the two engines share them."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """vLLM arguments that override this module's; None leaves an argument to vLLM."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which a mode differs from plain decoding."""

    sample: int
    """The sample's number, from 1."""
    position: int
    """The token's place in the response, from 1."""
    expected: int | None
    """The token of plain decoding; None if its response has ended."""
    got: int | None
    num_samples: int
    """Samples that differ anywhere."""
    apart: float | None = None
    """Nats by which the tokens miss a tie; None if a response ended too early."""
    near_tie: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tokens of one mode, and how they were drafted."""

    mode: str
    stats: EngineStats
    """The engine's counters for these samples."""
    seconds: float
    tokens: tuple[tuple[int, ...], ...]
    """The responses, in the order of the prompts."""


def modes(num_samples: int, has_drafter: bool) -> tuple[Mode, ...]:
    """Return the modes to compare; the first one is plain decoding of all samples together."""
    off = {"kind": "off"}
    drafting = {"ngram:4": _fixed("ngram", 4)}
    drafting |= {"eagle3:3": _fixed("eagle3", 3)} if has_drafter else {}
    drafting |= {"random switching": _switching(has_drafter)}
    return (
        Mode(f"off, {num_samples} at a time", off, num_samples, drafts=False),
        Mode(f"off, {FEW} at a time", off, FEW, drafts=False),
        *(Mode(name, of, num_samples, drafts=True) for name, of in drafting.items()),
    )


def _switching(has_drafter: bool) -> dict[str, Any]:
    arms = [["off", 0], ["ngram", 1], ["ngram", 3], ["ngram", LONGEST_DRAFT]]
    if has_drafter:
        arms += [["eagle3", 1], ["eagle3", 2], ["eagle3", 5]]
    return {"kind": "random", "arms": arms, "seed": 1}


def _fixed(drafter: str, num_draft_tokens: int) -> dict[str, Any]:
    return {"kind": "fixed", "drafter": drafter, "num_draft_tokens": num_draft_tokens}


def engine_config(plan: Plan, drafts: bool) -> EngineConfig:
    """Return the config of the engine that drafts, or of the one that cannot."""
    longest = max(map(len, plan.prompts)) + plan.sampling.max_tokens + LONGEST_DRAFT + 1
    # Each engine gets its own core, unless there is only one.
    alone = len(os.sched_getaffinity(0)) < 2
    args: dict[str, Any] = {
        "dtype": plan.dtype,
        "enforce_eager": True,
        "max_model_len": longest,
        "max_num_seqs": len(plan.prompts),
    }
    if plan.num_gpus:
        args["gpu_memory_utilization"] = SHARE_OF_A_GPU
    return EngineConfig(
        model=plan.model,
        drafter=plan.drafter if drafts else None,
        # The first strategy names all arms: a GPU engine captures the graphs of these.
        strategy=_switching(plan.drafter is not None) if drafts else {"kind": "off"},
        max_draft_tokens=LONGEST_DRAFT if drafts else None,
        num_gpus=plan.num_gpus,
        core_group=f"bench-same-{'drafts' if drafts else 'off'}" if alone else "bench-same",
        engine_args={k: v for k, v in (args | plan.engine_args).items() if v is not None},
    )


def requests(plan: Plan) -> list[SampleRequest]:
    """Return a request per prompt, each with its own seed."""
    rng = random.Random(plan.seed)
    return [
        SampleRequest(str(index), prompt, replace(plan.sampling, seed=rng.getrandbits(63)))
        for index, prompt in enumerate(plan.prompts)
    ]


def check(plan: Plan) -> None:
    """Refuse bad settings before an engine starts."""
    check_sampling(plan.sampling, speculating=True)
    for drafts in (False, True):
        engine_args(engine_config(plan, drafts))


def run(plan: Plan, show: ShowProgress) -> dict[str, Any]:
    """Generate in all modes, compare, and return the result as plain data."""
    check(plan)
    work = requests(plan)
    todo = modes(len(work), plan.drafter is not None)
    total = len(todo) * len(work)
    show("starting two engines", 0, total)
    outcomes: list[Outcome] = []
    with ExitStack() as engines:
        plain = engines.enter_context(ChildEngine(engine_config(plan, drafts=False), "plain"))
        if plan.num_gpus:
            plain.report()  # a starting engine measures the free memory of its GPU
        drafting = engines.enter_context(ChildEngine(engine_config(plan, drafts=True), "drafting"))
        warm_up = [replace(r, sampling=replace(r.sampling, max_tokens=4)) for r in work[:2]]
        for engine in (plain, drafting):
            engine.report()
            _generate(engine, warm_up, len(warm_up), lambda done: None)
        for number, mode in enumerate(todo):
            engine = drafting if mode.drafts else plain

            def note(done: int, what: str = mode.name, before: int = number * len(work)) -> None:
                show(what, before + done, total)

            outcomes.append(_outcome(engine, mode, work, note))
    differences = [first_difference(outcomes[0], other) for other in outcomes]
    if any(differences):
        show("examining the differences", total, total)
        differences = examine(plan, work, outcomes[0], differences)
    return summary(plan, outcomes, differences)


def _outcome(
    engine: ChildEngine, mode: Mode, work: Sequence[SampleRequest], note: Callable[[int], None]
) -> Outcome:
    engine.call(Engine.set_strategy, mode.strategy)
    engine.call(Engine.reset_prefix_cache)  # clears the n-grams of earlier modes, too
    before = engine.call(Engine.stats)
    started_s = time.perf_counter()
    tokens = _generate(engine, work, mode.at_a_time, note)
    seconds = time.perf_counter() - started_s
    counted = EngineStats.difference([before], [engine.call(Engine.stats)])
    return Outcome(mode.name, counted, seconds, tokens)


def _generate(
    engine: ChildEngine,
    work: Sequence[SampleRequest],
    at_a_time: int,
    note: Callable[[int], None],
) -> tuple[tuple[int, ...], ...]:
    """Return the responses; `note` hears how many are done."""
    waiting = list(work)
    tokens: dict[str, tuple[int, ...]] = {}
    while len(tokens) < len(work):
        free = at_a_time - (len(work) - len(waiting) - len(tokens))
        if new := waiting[:free]:
            engine.call(Engine.submit, new)
            del waiting[:free]
        note(len(tokens))
        tokens |= {s.sample_id: s.token_ids for s in engine.call(Engine.take_finished, 1.0)}
    return tuple(tokens[request.sample_id] for request in work)


# --- comparison ---------------------------------------------------------------------------------


def first_difference(expected: Outcome, got: Outcome) -> Difference | None:
    """Return the first difference; None if all tokens are the same."""
    found = [
        (number, place, a, b)
        for number, (a, b) in enumerate(zip(expected.tokens, got.tokens, strict=True), 1)
        if (place := first_position(a, b)) is not None
    ]
    if not found:
        return None
    number, place, a, b = found[0]
    one, other = (of[place] if place < len(of) else None for of in (a, b))
    return Difference(number, place + 1, one, other, len(found))


def examine(
    plan: Plan,
    work: Sequence[SampleRequest],
    expected: Outcome,
    differences: Sequence[Difference | None],
) -> list[Difference | None]:
    """Return the differences, each with whether its two tokens are nearly tied.

    A draw of a GPU engine is not examined: its noise is vLLM's, not `keyed`'s.
    """
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    by_vllm = bool(plan.num_gpus) and plan.sampling.temperature > 0

    def examined(difference: Difference) -> Difference:
        tokens = [t for t in (difference.expected, difference.got) if t is not None]
        if by_vllm or len(tokens) < 2:
            return difference
        request = work[difference.sample - 1]
        before = expected.tokens[difference.sample - 1][: difference.position - 1]
        with torch.no_grad():
            row = policy(torch.tensor([[*request.prompt_token_ids, *before]])).logits[0, -1]
        limit = NEAR_TIES[plan.dtype]
        apart = max(missed(row, request.sampling, len(before), token, limit) for token in tokens)
        return replace(difference, apart=apart, near_tie=apart <= limit)

    return [difference and examined(difference) for difference in differences]


def missed(row: Any, sampling: SamplingSpec, position: int, token: int, slack: float) -> float:
    """Return by how many nats a token misses the draw from a row of logits.

    A token just outside of top-k or top-p counts as inside: rounding moves that border, too.
    """
    import numpy as np

    from tlt.vllm.keyed import shortfall

    key = np.uint64(sampling.seed or 0)
    if sampling.temperature == 0:
        return shortfall(row.numpy(), key, position, np.float32(0), token)
    scaled = row / sampling.temperature
    cuts = {(sampling.top_k, sampling.top_p)}
    cuts.add((sampling.top_k and sampling.top_k + 1, min(1.0, sampling.top_p + slack)))
    return min(
        shortfall(keep_top(scaled, *cut).numpy(), key, position, np.float32(1), token)
        for cut in cuts
    )


def keep_top(row: Any, top_k: int, top_p: float) -> Any:
    """Return a row of logits without the tokens that top-k and top-p leave out."""
    ordered, order = row.sort(descending=True)
    probabilities = ordered.softmax(-1)
    out = (probabilities.cumsum(-1) - probabilities >= top_p) & (top_p < 1)
    if top_k:
        out[top_k:] = True
    return row.index_fill(0, order[out], float("-inf"))


# --- result -------------------------------------------------------------------------------------


def summary(
    plan: Plan, outcomes: Sequence[Outcome], differences: Sequence[Difference | None]
) -> dict[str, Any]:
    """Return the result as plain data."""
    rows = [
        {
            "mode": outcome.mode,
            "samples": len(outcome.tokens),
            "tokens": sum(map(len, outcome.tokens)),
            "draft_tokens": outcome.stats.draft_tokens,
            "accepted_tokens": outcome.stats.accepted_tokens,
            "acceptance_length": outcome.stats.acceptance_length,
            "seconds": outcome.seconds,
            "difference": asdict(difference) if difference else None,
        }
        for outcome, difference in zip(outcomes, differences, strict=True)
    ]
    sampling = asdict(plan.sampling)
    return {
        "model": plan.model,
        "drafter": plan.drafter,
        "dtype": plan.dtype,
        **{name: sampling[name] for name in ("max_tokens", "temperature", "top_p", "top_k")},
        "seed": plan.seed,
        "modes": rows,
        "lossless": is_lossless(rows, plan.dtype),
        "verdict": verdict(rows, plan.dtype),
    }


HEADS = (
    *("mode", "samples", "tokens", "draft tokens accepted", "tokens per draft", "seconds"),
    "same tokens as off",
)
"""The head of the table of a result."""


def cells(result: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a result's table as text."""
    return [
        [
            row["mode"],
            str(row["samples"]),
            str(row["tokens"]),
            f"{row['accepted_tokens']}/{row['draft_tokens']}" if row["draft_tokens"] else "",
            f"{row['acceptance_length']:.2f}" if row["draft_tokens"] else "",
            f"{row['seconds']:.1f}",
            _sameness(row["difference"]) if number else "reference",
        ]
        for number, row in enumerate(result["modes"])
    ]


def _sameness(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "yes"
    apart, kind = difference["apart"], "an early end"
    if apart is not None:
        kind = f"{'a' if difference['near_tie'] else 'no'} near-tie ({apart:.2g} nats)"
    elif _unexamined(difference):
        kind = "not examined"
    return f"no: sample {difference['sample']}, token {difference['position']}, {kind}"


def _unexamined(difference: dict[str, Any]) -> bool:
    """Return whether two tokens differ whose logits were not compared."""
    return difference["apart"] is None and None not in (difference["expected"], difference["got"])


def is_lossless(rows: Sequence[dict[str, Any]], dtype: str) -> bool:
    """Return whether no difference is a fault; in float32 every difference is one."""
    found = [row["difference"] for row in rows if row["difference"]]
    return not found or (dtype != "float32" and all(each["near_tie"] for each in found))


def verdict(rows: Sequence[dict[str, Any]], dtype: str) -> str:
    """Return the result in one sentence."""
    reference, *others = rows
    differing = [row["mode"] for row in others if row["difference"]]
    accepted = sum(row["accepted_tokens"] for row in others)
    if not differing:
        drew = f"Same samples: all {len(rows)} modes drew the same {reference['tokens']} tokens"
        if not accepted:
            return (
                f"{drew}, but no draft token was accepted, so this shows little; raise "
                "--max-tokens or pass --drafter."
            )
        drafted = sum(row["draft_tokens"] for row in others)
        return f"{drew}, and accepted {accepted} of {drafted} draft tokens on the way."
    names = " and ".join(f"'{name}'" for name in differing)
    if is_lossless(rows, dtype):
        return (
            f"Samples differ at near-ties only, in {names}: in {dtype}, other batch shapes round "
            "the logits differently; --dtype float32 gives the same tokens."
        )
    if any(row["difference"] and _unexamined(row["difference"]) for row in others):
        return (
            f"Different samples in {names}: a fault of losslessness, or kernels that round by "
            "batch size; run it again with VLLM_BATCH_INVARIANT=1, which leaves only the fault."
        )
    return (
        f"Different samples in {names}: this is a fault of losslessness; please report it with "
        "this table and the output of `tlt doctor`."
    )
