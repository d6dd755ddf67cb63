"""`tlt drafter train`: from a policy alone to a drafter that follows it.

The pool generates from the training prompts, the policy runs over the samples once for its
hidden states, and the trainer learns from the buffer until the budget is spent. Each new version
must beat the previous one on held-out samples. The engines then measure the drafter's acceptance
on prompts that it never saw, before and after training.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tlt.config.rollout import EngineConfig, PoolConfig
from tlt.contracts import EngineStats, Sample, SampleRequest, SamplingSpec, ShowProgress
from tlt.drafter import checkpoint, vocabulary
from tlt.drafter.eagle3.config import default_draft_vocabulary
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.evaluation import Acceptance, compare, evaluate_samples
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
from tlt.errors import ConfigError
from tlt.node.shared import SharedFolder
from tlt.rollout.actor import ray_spawner
from tlt.rollout.pool import RolloutPool
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import capture
from tlt.tasks.tail import length_summary

HELD_OUT_TOKENS = 2048
"""Tokens that versions are evaluated on."""
EVALUATE_EVERY_S = 90.0
"""Longest session between two evaluations."""
MEASURED_TEMPERATURES = (0.0, 1.0)
"""Sampling temperatures of the measurements in the engines."""
BUFFER_BYTES = 4 * 2**30
MAX_SAMPLE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """One run of `tlt drafter train`."""

    engine: EngineConfig
    """The engine, without a drafter."""
    num_engines: int
    prompts: tuple[tuple[int, ...], ...]
    held_out_prompts: tuple[tuple[int, ...], ...]
    out: Path
    max_tokens: int
    temperature: float
    budget_s: float
    draft_vocab_size: int | None
    trainer: TrainerSettings
    dtype: str
    init: Path | None
    """Drafter to continue from, with its optimizer's state if it is there; None for a new one."""


async def train_drafter(plan: DrafterPlan, show: ShowProgress) -> dict[str, Any]:
    """Train and measure a drafter, store its versions under `plan.out`, and return the report.

    Ray must be running.
    """
    if (plan.out / "versions").exists():
        raise ConfigError(f"{plan.out} already holds a training run; choose another --out")
    started_at = time.monotonic()
    policy, trainer = _load_policy(plan)
    drafter = trainer.drafter
    initial = checkpoint.save_drafter(drafter, plan.out / "initial", getattr(torch, plan.dtype))
    engine = plan.engine.model_copy(
        update={
            "drafter": str(initial),
            "strategy": {"kind": "off"},
            "max_draft_tokens": plan.trainer.num_draft_tokens,
        }
    )
    shared = SharedFolder.make("samples")
    buffer = SampleBuffer(
        BufferSettings(
            folder=str(shared.path),
            capacity_bytes=BUFFER_BYTES,
            max_sample_tokens=MAX_SAMPLE_TOKENS,
            held_out_share=max(1 / 16, 8 / len(plan.prompts)),
        )
    )
    seconds: dict[str, float] = {}

    def took(stage: str) -> None:
        seconds[stage] = time.monotonic() - started_at - sum(seconds.values())

    try:
        show("starting engines", 0, 1)
        spawner = ray_spawner(engine)
        async with RolloutPool(PoolConfig(num_engines=plan.num_engines), spawner) as pool:
            took("start")
            sampling = SamplingSpec(plan.max_tokens, plan.temperature, logprobs=False)
            what = "sampling from the policy"
            samples = await _generate(pool, "train", plan.prompts, sampling, what, show)
            took("sample")
            trainer.check_vocabulary([torch.tensor(s.token_ids) for s in samples])
            # Few drafts of an untrained drafter are accepted, and generating with it is slow: a
            # few prompts are enough.
            few = plan.held_out_prompts[:: 1 if plan.init else 4]
            before = await _measure(plan, pool, drafter, few, "before", show)
            took("measure before")
            await asyncio.to_thread(_capture, plan, policy, samples, drafter, buffer, show)
            took("capture")
            # The last measurement takes about as long as the first would take on all prompts.
            reserved_s = seconds["measure before"] * (1 if plan.init else 2)
            left = plan.budget_s - (time.monotonic() - started_at) - reserved_s
            history = await asyncio.to_thread(_train, plan, trainer, buffer, max(left, 1.0), show)
            took("train")
            after = await _measure(plan, pool, drafter, plan.held_out_prompts, "after", show)
            took("measure after")
    finally:
        shared.remove()
    return {
        "data": _describe(plan, drafter, samples),
        "num_draft_tokens": plan.trainer.num_draft_tokens,
        "num_held_out_prompts": len(plan.held_out_prompts),
        "acceptance": {"before": before, "after": after},
        "training": {"steps": trainer.step, "settings": asdict(plan.trainer), "history": history},
        "seconds": seconds,
        "budget_minutes": plan.budget_s / 60,
    }


def _load_policy(plan: DrafterPlan) -> tuple[Any, DrafterTrainer]:
    """Load the policy, and make the trainer of its drafter."""
    from transformers import AutoModelForCausalLM

    # States are computed from the engines' rounded weights, in the trainer's dtype.
    policy = AutoModelForCausalLM.from_pretrained(
        plan.engine.model, dtype=getattr(torch, plan.dtype)
    )
    if not plan.trainer.bfloat16:
        policy = policy.float()
    head = policy.get_output_embeddings().weight.detach()
    embedding = policy.get_input_embeddings().weight.detach()
    drafter = _first_drafter(plan, policy.config, head)
    trainer = DrafterTrainer(drafter, head, embedding, plan.trainer)
    if plan.init is not None and (moments := checkpoint.read_moments(plan.init)) is not None:
        trainer.take_moments(moments)
    return policy, trainer


def _describe(
    plan: DrafterPlan, drafter: Eagle3Drafter, samples: Sequence[Sample]
) -> dict[str, Any]:
    """Return the report's section about the training data."""
    responses = [torch.tensor(s.token_ids) for s in samples]
    counts = vocabulary.count_tokens(responses, drafter.config.vocab_size)
    return {
        "num_prompts": len(plan.prompts),
        "num_response_tokens": int(counts.sum()),
        "temperature": plan.temperature,
        "draft_vocabulary_coverage": vocabulary.coverage(counts, drafter.draft_token_ids()),
        **length_summary([len(s.token_ids) for s in samples]),
    }


def _first_drafter(plan: DrafterPlan, config: Any, head: torch.Tensor) -> Eagle3Drafter:
    if plan.init is not None:
        drafter = checkpoint.load_drafter(plan.init, num_target_layers=config.num_hidden_layers)
        fits = (drafter.config.hidden_size, drafter.config.vocab_size)
        if fits != (config.hidden_size, config.vocab_size):
            raise ConfigError(f"--init {plan.init} is a drafter of another model")
        if plan.draft_vocab_size not in (None, drafter.config.draft_vocab_size):
            raise ConfigError(
                f"--init {plan.init} drafts from {drafter.config.draft_vocab_size} tokens; leave "
                "--draft-vocab out"
            )
        return drafter
    size = plan.draft_vocab_size or default_draft_vocabulary(config.vocab_size)
    size = min(size, config.vocab_size)
    return fresh_drafter(config, head, torch.arange(size), plan.trainer.seed)


async def _generate(
    pool: RolloutPool,
    run: str,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingSpec,
    what: str,
    show: ShowProgress,
) -> list[Sample]:
    """Return one sample per prompt, in the order of the prompts."""
    requests = [SampleRequest(f"{run}/{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    samples: dict[str, Sample] = {}
    show(what, 0, len(requests))
    async for sample in pool.generate(requests):
        samples[sample.sample_id] = sample
        show(what, len(samples), len(requests))
    return [samples[request.sample_id] for request in requests]


def _capture(
    plan: DrafterPlan,
    policy: Any,
    samples: Sequence[Sample],
    drafter: Eagle3Drafter,
    buffer: SampleBuffer,
    show: ShowProgress,
) -> None:
    layers = drafter.config.aux_layer_ids
    for index, (prompt, sample) in enumerate(zip(plan.prompts, samples, strict=True)):
        states = capture(policy, prompt + sample.token_ids, len(prompt), layers)
        buffer.put(str(index), 0, states)
        show("capturing the policy's states", index + 1, len(samples))


def _train(
    plan: DrafterPlan,
    trainer: DrafterTrainer,
    buffer: SampleBuffer,
    budget_s: float,
    show: ShowProgress,
) -> list[dict[str, Any]]:
    """Train in short sessions, and store a version after each session that made it better.

    Leave the best version's weights in the trainer's drafter. Return the evaluation after every
    session.
    """
    store = checkpoint.VersionStore(plan.out / "versions", getattr(torch, plan.dtype))
    held_out = buffer.held_out(HELD_OUT_TOKENS)
    gate = plan.trainer.temperature
    acceptance = evaluate_samples(trainer.passes, held_out, [gate, *MEASURED_TEMPERATURES])
    best, history = trainer.weights(), [_evaluation(trainer.step, 0.0, None, acceptance)]
    store.save(trainer, {"held_out": history[0]})
    started_at = time.monotonic()

    def progress() -> float:
        return min(1.0, (time.monotonic() - started_at) / budget_s)

    def lr_scale() -> float:
        return 0.05 + 0.475 * (1 + math.cos(math.pi * progress()))

    while progress() < 1:
        session_ends = min(1.0, progress() + min(EVALUATE_EVERY_S / budget_s, 0.25))
        losses: list[float] = []

        def is_over(end: float = session_ends) -> bool:
            return progress() >= end

        def note(step: int, loss: float, losses: list[float] = losses) -> None:
            losses.append(loss)
            length = history[-1][f"length@{gate:g}"]
            show(f"training, loss {loss:.2f}, accepts {length:.2f}", progress(), 1)

        trainer.session(buffer, is_over, note, lr_scale)
        better, acceptance = compare(trainer.passes, best, held_out, gate, MEASURED_TEMPERATURES)
        elapsed_s = time.monotonic() - started_at
        loss = sum(losses) / max(len(losses), 1)
        history.append(_evaluation(trainer.step, elapsed_s, loss, acceptance))
        if better:
            best = trainer.weights()
            store.save(trainer, {"held_out": history[-1]})
    store.wait()
    trainer.drafter.load_state_dict(best)
    return history


def _evaluation(
    step: int, elapsed_s: float, loss: float | None, acceptance: Acceptance
) -> dict[str, Any]:
    lengths = {f"length@{t:g}": acceptance.length(t) for t in acceptance.rates}
    agreement = {f"agreement@{i}": value for i, value in enumerate(acceptance.agreement, 1)}
    return {"step": step, "elapsed_s": elapsed_s, "loss": loss, **lengths, **agreement}


async def _measure(
    plan: DrafterPlan,
    pool: RolloutPool,
    drafter: Eagle3Drafter,
    prompts: Sequence[tuple[int, ...]],
    label: str,
    show: ShowProgress,
) -> dict[str, Any]:
    """Measure acceptance in the engines on held-out prompts, by temperature and position."""
    weights = checkpoint.drafter_weights(
        drafter.state_dict(), drafter.config, getattr(torch, plan.dtype)
    )
    await pool.update_drafter(weights.items(), 1 if label == "before" else 2)
    num_drafts = plan.trainer.num_draft_tokens
    await pool.set_strategy({"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": num_drafts})
    result = {}
    for temperature in MEASURED_TEMPERATURES:
        sampling = SamplingSpec(plan.max_tokens, temperature, logprobs=False)
        earlier = await pool.stats()
        what = f"measuring {label} at temperature {temperature:g}"
        await _generate(pool, f"{label}/{temperature:g}", prompts, sampling, what, show)
        result[f"{temperature:g}"] = _acceptance(earlier, await pool.stats(), num_drafts)
    await pool.set_strategy({"kind": "off"})
    return result


def _acceptance(
    before: Sequence[EngineStats], after: Sequence[EngineStats], num_drafts: int
) -> dict[str, Any]:
    """Return the acceptance length, and the share of drafts accepted up to each position."""

    def total(stats: Sequence[EngineStats], position: int) -> int:
        return sum(s.accepted_at[position] for s in stats if position < len(s.accepted_at))

    drafts = EngineStats.difference(before, after).drafts
    shares = [(total(after, i) - total(before, i)) / max(drafts, 1) for i in range(num_drafts)]
    return {"length": 1 + sum(shares), "by_position": shares, "num_drafts": drafts}
