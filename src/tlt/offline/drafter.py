"""`tlt drafter train`: from a policy alone to a drafter that follows it.

The pool generates from the training prompts, the policy runs over the samples once for its
hidden states, and the trainer learns from the buffer until the budget is spent, on one rank or
several (`actor`, `training`). Each new version must beat the previous one on held-out samples. The
engines then measure the drafter's acceptance on prompts that it never saw, before and after
training. Engines on GPUs sleep while ranks use their GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tlt.config.rollout import PoolConfig
from tlt.contracts import EngineStats, Sample, SampleRequest, SamplingSpec, ShowProgress
from tlt.drafter import checkpoint, vocabulary
from tlt.drafter.eagle3.config import default_draft_vocabulary
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.trainer import DrafterTrainer, fresh_drafter
from tlt.errors import ConfigError
from tlt.harvest.published import head_and_embedding, read_embed_and_head
from tlt.node.shared import SharedFolder
from tlt.offline.actor import check_gpus, here, train_on_ranks
from tlt.offline.training import MEASURED_TEMPERATURES, DrafterPlan
from tlt.rollout.actor import ray_spawner
from tlt.rollout.client import Engine
from tlt.rollout.pool import RolloutPool
from tlt.states.buffer import BufferSettings
from tlt.tasks.tail import length_summary

BUFFER_BYTES = 4 * 2**30
MAX_SAMPLE_TOKENS = 4096


async def train_drafter(plan: DrafterPlan, show: ShowProgress) -> dict[str, Any]:
    """Train and measure a drafter, store its versions under `plan.out`, and return the report.

    Ray must be running.
    """
    if (plan.out / "versions").exists():
        raise ConfigError(f"{plan.out} already holds a training run; choose another --out")
    check_gpus(plan.num_engines * plan.engine.num_gpus)
    started_at = time.monotonic()
    trainer = first_trainer(plan)
    drafter = trainer.drafter
    save_initial(plan, trainer)
    on_gpu = plan.engine.num_gpus > 0
    args = plan.engine.engine_args | ({"enable_sleep_mode": True} if on_gpu else {})
    engine = plan.engine.model_copy(
        update={
            "drafter": str(plan.out / "initial"),
            "strategy": {"kind": "off"},
            "max_draft_tokens": plan.trainer.num_draft_tokens,
            "engine_args": args,
        }
    )
    shared = SharedFolder.make("samples")
    settings = BufferSettings(
        folder=str(shared.path),
        capacity_bytes=BUFFER_BYTES,
        max_sample_tokens=MAX_SAMPLE_TOKENS,
        held_out_share=max(1 / 16, 8 / len(plan.prompts)),
    )
    seconds: dict[str, float] = {}

    def took(stage: str) -> None:
        seconds[stage] = time.monotonic() - started_at - sum(seconds.values())

    try:
        show("starting engines", 0, 1)
        spawner = ray_spawner(engine, here if on_gpu else lambda name: {})
        async with RolloutPool(PoolConfig(num_engines=plan.num_engines), spawner) as pool:
            took("start")
            sampling = SamplingSpec(plan.max_tokens, plan.temperature, logprobs=False)
            what = "sampling from the policy"
            samples = await _generate(pool, "train", plan.prompts, sampling, what, show)
            took("sample")
            if trainer.check_vocabulary([torch.tensor(s.token_ids) for s in samples]):
                save_initial(plan, trainer)
            # Few drafts of an untrained drafter are accepted, and generating with it is slow: a
            # few prompts are enough.
            few = plan.held_out_prompts[:: 1 if plan.init else 4]
            before = await _measure(plan, pool, drafter, few, "before", show)
            took("measure before")
            # The last measurement takes about as long as the first would take on all prompts.
            reserved_s = seconds["measure before"] * (1 if plan.init else 2)
            texts = [(p, s.token_ids) for p, s in zip(plan.prompts, samples, strict=True)]
            gpus = [gpu for _, own in await pool.call_all(Engine.devices) for gpu in own]
            for name in pool.engines if on_gpu else ():
                await pool.sleep_engine(name)
            until_s = started_at + plan.budget_s - reserved_s
            history = await train_on_ranks(
                plan, gpus if on_gpu else (), texts, settings, until_s, show
            )
            for name in pool.engines if on_gpu else ():
                await pool.wake_engine(name)
            took("train")
            store = checkpoint.VersionStore(plan.out / "versions")
            drafter = checkpoint.load_drafter(store.path(store.versions()[-1]))
            after = await _measure(plan, pool, drafter, plan.held_out_prompts, "after", show)
            took("measure after")
    finally:
        shared.remove()
    return {
        "data": _describe(plan, drafter, samples),
        "num_draft_tokens": plan.trainer.num_draft_tokens,
        "num_held_out_prompts": len(plan.held_out_prompts),
        "acceptance": {"before": before, "after": after},
        "training": {
            "steps": history[-1]["step"],
            "ranks": plan.num_ranks,
            "settings": asdict(plan.trainer),
            "history": history,
        },
        "seconds": seconds,
        "budget_minutes": plan.budget_s / 60,
    }


def first_trainer(plan: DrafterPlan) -> DrafterTrainer:
    """Return a trainer that chooses the draft vocabulary, and trains nothing."""
    from transformers import AutoConfig

    policy = Path(plan.engine.model)
    head, embedding = head_and_embedding(read_embed_and_head(policy))
    drafter = _first_drafter(plan, AutoConfig.from_pretrained(policy), head)
    trainer = DrafterTrainer(drafter, head, embedding, plan.trainer)
    if plan.init is not None and (moments := checkpoint.read_moments(plan.init)) is not None:
        trainer.take_moments(moments)
    return trainer


def save_initial(plan: DrafterPlan, trainer: DrafterTrainer) -> None:
    """Write the drafter that engines and ranks start from."""
    checkpoint.write_moments(trainer.moments(), plan.out / "initial")
    checkpoint.save_drafter(trainer.drafter, plan.out / "initial", getattr(torch, plan.dtype))


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
