"""`tlt drafter train`: from a policy alone to a drafter that follows it.

The pool generates from the training prompts, the policy runs over the samples once for its
states, and the trainer learns from the buffer until the budget is spent. Each new version must
beat the one before it on held-out samples. What the drafter is worth is then measured where it
counts: in the same engines, on prompts it never saw, before and after.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tlt.config.rollout import EngineConfig, PoolConfig
from tlt.contracts import EngineStats, Sample, SampleRequest, SamplingSpec, ShowProgress
from tlt.drafter import vocabulary
from tlt.drafter.checkpoint import VersionStore, drafter_weights, load_drafter, save_drafter
from tlt.drafter.eagle3.loss import Acceptance
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
from tlt.errors import ConfigError
from tlt.rollout.actor import ray_spawner
from tlt.rollout.pool import RolloutPool
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import capture
from tlt.tasks.tail import length_summary

HELD_OUT_TOKENS = 2048
JUDGE_EVERY_S = 90.0


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    engine: EngineConfig
    """Without a drafter: it is made here."""
    num_engines: int
    prompts: tuple[tuple[int, ...], ...]
    held_out_prompts: tuple[tuple[int, ...], ...]
    out: Path
    max_tokens: int
    temperature: float
    budget_s: float
    draft_vocab_size: int | None
    trainer: TrainerSettings
    dtype: str = "bfloat16"
    init: Path | None = None
    """A drafter to go on from, instead of from nothing."""
    measured_temperatures: tuple[float, ...] = (0.0, 1.0)
    buffer_bytes: int = 4 * 2**30


async def train_drafter(plan: DrafterPlan, show: ShowProgress) -> dict[str, Any]:
    """Train, measure, keep the versions under `plan.out`; the report. Ray must be running."""
    from transformers import AutoModelForCausalLM

    if (plan.out / "versions").exists():
        raise ConfigError(f"{plan.out} already holds a training run; choose another --out")
    started_at = time.monotonic()
    dtype = getattr(torch, plan.dtype)
    # The states are those that the engines' weights give, computed in the trainer's dtype.
    policy = AutoModelForCausalLM.from_pretrained(plan.engine.model, dtype=dtype)
    if not plan.trainer.bfloat16:
        policy = policy.float()
    head = policy.get_output_embeddings().weight.detach()
    embedding = policy.get_input_embeddings().weight.detach()
    drafter = _first_drafter(plan, policy.config, head)
    initial = save_drafter(drafter, plan.out / "initial", dtype)
    trainer = DrafterTrainer(drafter, head, embedding, plan.trainer)
    num_drafts = plan.trainer.num_draft_tokens
    engine = plan.engine.model_copy(
        update={
            "drafter": str(initial),
            "strategy": {"kind": "off"},
            "max_draft_tokens": num_drafts,
        }
    )
    shared = tempfile.mkdtemp(prefix="tlt-buffer-", dir="/dev/shm")
    buffer = SampleBuffer(
        BufferSettings(
            folder=shared,
            capacity_bytes=plan.buffer_bytes,
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
            samples = await _sample(plan, pool, show)
            took("sample")
            responses = [torch.tensor(s.token_ids) for s in samples.values()]
            trainer.check_vocabulary(responses)
            # An untrained drafter accepts next to nothing, and that slowly: a few prompts will do.
            few = plan.held_out_prompts[:: 1 if plan.init else 4]
            before = await _measure(plan, pool, drafter, few, "before", show)
            took("measure before")
            await asyncio.to_thread(_capture, plan, policy, samples, drafter, buffer, show)
            took("capture")
            # The last measurement takes about as long as the first one would on all prompts.
            reserved_s = seconds["measure before"] * (1 if plan.init else 2)
            left = plan.budget_s - (time.monotonic() - started_at) - reserved_s
            history = await asyncio.to_thread(_train, plan, trainer, buffer, max(left, 1.0), show)
            took("train")
            after = await _measure(plan, pool, drafter, plan.held_out_prompts, "after", show)
            took("measure after")
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    counts = vocabulary.count_tokens(responses, drafter.config.vocab_size)
    return {
        "data": {
            "num_prompts": len(plan.prompts),
            "num_response_tokens": int(counts.sum()),
            "temperature": plan.temperature,
            "draft_vocabulary_coverage": vocabulary.coverage(counts, drafter.draft_token_ids()),
            **length_summary([len(s.token_ids) for s in samples.values()]),
        },
        "num_draft_tokens": num_drafts,
        "num_held_out_prompts": len(plan.held_out_prompts),
        "acceptance": {"before": before, "after": after},
        "training": {"steps": trainer.step, "settings": asdict(plan.trainer), "history": history},
        "seconds": seconds,
        "budget_minutes": plan.budget_s / 60,
    }


def _first_drafter(plan: DrafterPlan, config: Any, head: torch.Tensor) -> Eagle3Drafter:
    if plan.init is not None:
        drafter = load_drafter(plan.init)
        fits = (drafter.config.hidden_size, drafter.config.vocab_size)
        if fits != (config.hidden_size, config.vocab_size):
            raise ConfigError(f"--init {plan.init} is a drafter of another model")
        if plan.draft_vocab_size not in (None, drafter.config.draft_vocab_size):
            raise ConfigError(
                f"--init {plan.init} drafts from {drafter.config.draft_vocab_size} tokens; leave "
                "--draft-vocab out"
            )
        return drafter
    tokens = None if plan.draft_vocab_size is None else torch.arange(plan.draft_vocab_size)
    return fresh_drafter(config, head, tokens, plan.trainer.seed)


async def _sample(plan: DrafterPlan, pool: RolloutPool, show: ShowProgress) -> dict[int, Sample]:
    requests = _requests("train", plan.prompts, plan.max_tokens, plan.temperature)
    index_of = {request.sample_id: index for index, request in enumerate(requests)}
    samples: dict[int, Sample] = {}
    show("sampling from the policy", 0, len(requests))
    async for sample in pool.generate(requests):
        samples[index_of[sample.sample_id]] = sample
        show("sampling from the policy", len(samples), len(requests))
    return samples


def _capture(
    plan: DrafterPlan,
    policy: Any,
    samples: dict[int, Sample],
    drafter: Eagle3Drafter,
    buffer: SampleBuffer,
    show: ShowProgress,
) -> None:
    for done, (index, sample) in enumerate(samples.items(), 1):
        prompt = plan.prompts[index]
        token_ids = prompt + sample.token_ids
        states = capture(policy, token_ids, len(prompt), drafter.config.aux_layer_ids)
        buffer.put(str(index), 0, states)
        show("capturing the policy's states", done, len(samples))


def _train(
    plan: DrafterPlan,
    trainer: DrafterTrainer,
    buffer: SampleBuffer,
    budget_s: float,
    show: ShowProgress,
) -> list[dict[str, Any]]:
    """Short sessions; after each, a version is kept if it is better than the last one.

    Ends with the best version in the trainer's drafter; what each session came to.
    """
    store = VersionStore(plan.out / "versions", getattr(torch, plan.dtype))
    held_out = buffer.held_out(HELD_OUT_TOKENS)
    temperatures = plan.measured_temperatures
    gate = plan.trainer.temperature
    judged = trainer.evaluate(held_out, [gate, *temperatures])
    best, history = trainer.weights(), [_judgement(trainer.step, 0.0, None, judged)]
    store.save(trainer, {"held_out": history[0]})
    started_at = time.monotonic()

    def progress() -> float:
        return min(1.0, (time.monotonic() - started_at) / budget_s)

    while progress() < 1:
        session_ends = min(1.0, progress() + min(JUDGE_EVERY_S / budget_s, 0.25))
        losses: list[float] = []

        def note(step: int, loss: float, losses: list[float] = losses) -> None:
            losses.append(loss)
            length = history[-1][f"length@{gate:g}"]
            show(f"training, loss {loss:.2f}, accepts {length:.2f}", progress(), 1)

        trainer.session(
            buffer,
            partial(_reached, progress, session_ends),
            note,
            lambda: 0.05 + 0.475 * (1 + math.cos(math.pi * progress())),
        )
        better, judged = trainer.better_than(best, held_out, temperatures)
        elapsed_s = time.monotonic() - started_at
        loss = sum(losses) / max(len(losses), 1)
        history.append(_judgement(trainer.step, elapsed_s, loss, judged))
        if better:
            best = trainer.weights()
            store.save(trainer, {"held_out": history[-1]})
    store.wait()
    trainer.drafter.load_state_dict(best)
    return history


def _reached(progress: Callable[[], float], end: float) -> bool:
    return progress() >= end


def _judgement(
    step: int, elapsed_s: float, loss: float | None, judged: Acceptance
) -> dict[str, Any]:
    lengths = {f"length@{t:g}": judged.length(t) for t in judged.rates}
    agreement = {f"agreement@{i}": value for i, value in enumerate(judged.agreement, 1)}
    return {"step": step, "elapsed_s": elapsed_s, "loss": loss, **lengths, **agreement}


async def _measure(
    plan: DrafterPlan,
    pool: RolloutPool,
    drafter: Eagle3Drafter,
    prompts: Sequence[tuple[int, ...]],
    label: str,
    show: ShowProgress,
) -> dict[str, Any]:
    """Acceptance in the engines on held-out prompts, by temperature and draft position."""
    weights = drafter_weights(drafter.state_dict(), drafter.config, getattr(torch, plan.dtype))
    await pool.update_drafter(weights.items(), 1 if label == "before" else 2)
    num_drafts = plan.trainer.num_draft_tokens
    await pool.set_strategy({"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": num_drafts})
    result = {}
    for temperature in plan.measured_temperatures:
        text = f"measuring {label} at temperature {temperature:g}"
        run = f"{label}/{temperature:g}"
        requests = _requests(run, prompts, plan.max_tokens, temperature)
        earlier = await pool.stats()
        show(text, 0, len(requests))
        done = itertools.count(1)
        async for _ in pool.generate(requests):
            show(text, next(done), len(requests))
        result[f"{temperature:g}"] = _acceptance(earlier, await pool.stats(), num_drafts)
    await pool.set_strategy({"kind": "off"})
    return result


def _acceptance(
    before: Sequence[EngineStats], after: Sequence[EngineStats], num_drafts: int
) -> dict[str, Any]:
    """Acceptance length, and the share of drafts accepted at least up to each position."""

    def total(stats: Sequence[EngineStats], position: int) -> int:
        return sum(s.accepted_at[position] for s in stats if position < len(s.accepted_at))

    drafts = sum(s.drafts for s in after) - sum(s.drafts for s in before)
    accepted = [total(after, i) - total(before, i) for i in range(num_drafts)]
    return {
        "length": 1 + sum(accepted) / max(drafts, 1),
        "by_position": [count / max(drafts, 1) for count in accepted],
        "num_drafts": drafts,
    }


def _requests(
    run: str, prompts: Sequence[tuple[int, ...]], max_tokens: int, temperature: float
) -> list[SampleRequest]:
    spec = SamplingSpec(max_tokens=max_tokens, temperature=temperature, logprobs=False)
    return [SampleRequest(f"{run}/{i}", prompt, spec) for i, prompt in enumerate(prompts)]
