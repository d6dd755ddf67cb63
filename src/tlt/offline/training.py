"""The work of one rank of `tlt drafter train`, on the CPU or on a GPU.

The ranks share the policy's pass over the samples, then the rows of every optimizer step. The first
rank's clock decides when to stop, and that rank stores the drafter's versions.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tlt.config.rollout import EngineConfig
from tlt.contracts import ShowProgress
from tlt.drafter import checkpoint
from tlt.drafter.evaluation import Acceptance, compare, evaluate_samples
from tlt.drafter.ranks import OneRank
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings
from tlt.errors import ConfigError
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import capture

HELD_OUT_TOKENS = 2048
"""Tokens that versions are evaluated on."""
EVALUATE_EVERY_S = 90.0
"""Longest session between two evaluations."""
MEASURED_TEMPERATURES = (0.0, 1.0)
"""Sampling temperatures of the measurements in the engines."""

Text = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a prompt and its response."""


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """One run of `tlt drafter train`."""

    engine: EngineConfig
    """The engine, without a drafter."""
    num_engines: int
    num_ranks: int
    """Ranks that train, each on a GPU of the engines or on its share of the cores."""
    prompts: tuple[tuple[int, ...], ...]
    held_out_prompts: tuple[tuple[int, ...], ...]
    out: Path
    max_tokens: int
    temperature: float
    budget_s: float
    num_steps: int | None
    """Optimizer steps to train for; None trains as long as the budget allows."""
    draft_vocab_size: int | None
    trainer: TrainerSettings
    dtype: str
    init: Path | None
    """Drafter to continue from, with its optimizer's state if it is there; None for a new one."""


def plan_ranks(
    ranks: int | None, rows: int | None, engines: int, gpus: int, cores: int
) -> tuple[int, int]:
    """Return the ranks that train, and the rows of an optimizer step; None takes the default.

    Ranks use the engines' GPUs, a rank on each; without GPUs they share this machine's cores.
    """
    num_ranks = ranks or max(1, engines * gpus)
    places, what = (engines * gpus, "GPUs of the engines") if gpus else (cores, "cores")
    if num_ranks > places:
        more = ", or raise --engines" if gpus else ""
        raise ConfigError(
            f"--ranks {num_ranks} is more than the {places} {what}: each rank needs its own; "
            f"set --ranks {places} or less{more}"
        )
    num_rows = rows or num_ranks
    if num_rows % num_ranks:
        fits = num_rows + -num_rows % num_ranks
        raise ConfigError(
            f"--rows {num_rows} cannot be shared evenly by {num_ranks} ranks; e.g. --rows {fits}"
        )
    return num_ranks, num_rows


def train(
    plan: DrafterPlan,
    texts: Sequence[Text],
    settings: BufferSettings,
    ranks: OneRank,
    device: torch.device,
    until_s: float,
    show: ShowProgress,
) -> list[dict[str, Any]]:
    """Capture the policy's states and train until `until_s`, as `time.monotonic` has it.

    Return the evaluation after every session; the newest version holds the best weights.
    """
    from transformers import AutoModelForCausalLM

    # States are computed from the engines' rounded weights, in the trainer's dtype.
    policy = AutoModelForCausalLM.from_pretrained(
        plan.engine.model, dtype=getattr(torch, plan.dtype)
    )
    if not plan.trainer.bfloat16:
        policy = policy.float()
    policy.to(device)
    trainer = DrafterTrainer(
        checkpoint.load_drafter(plan.out / "initial").to(device),
        policy.get_output_embeddings().weight.detach(),
        policy.get_input_embeddings().weight.detach(),
        plan.trainer,
        ranks,
    )
    if (moments := checkpoint.read_moments(plan.out / "initial")) is not None:
        trainer.take_moments(moments)
    buffer, layers = SampleBuffer(settings), trainer.drafter.config.aux_layer_ids
    for index in range(ranks.rank, len(texts), ranks.size):
        prompt, response = texts[index]
        states = capture(policy, prompt + response, len(prompt), layers)
        buffer.put(str(index), 0, states)
        show("capturing the policy's states", index + 1, len(texts))
    del policy
    gc.collect()  # the drafter needs its memory now
    ranks.agree(0.0)  # all samples are in the buffer
    return _train(plan, trainer, buffer, until_s, show)


def _train(
    plan: DrafterPlan,
    trainer: DrafterTrainer,
    buffer: SampleBuffer,
    until_s: float,
    show: ShowProgress,
) -> list[dict[str, Any]]:
    """Train in short sessions, and store a version after each session that made it better."""
    ranks, gate = trainer.ranks, plan.trainer.temperature
    folder, dtype = plan.out / "versions", getattr(torch, plan.dtype)
    store = checkpoint.VersionStore(folder, dtype) if ranks.rank == 0 else None
    held_out = buffer.held_out(HELD_OUT_TOKENS)
    acceptance = evaluate_samples(trainer.passes, held_out, [gate, *MEASURED_TEMPERATURES])
    best, history = trainer.weights(), [_evaluation(trainer.step, 0.0, None, acceptance)]
    if store is not None:
        store.save(trainer, {"held_out": history[0]})
    started_at, first_step = time.monotonic(), trainer.step
    budget_s = max(until_s - started_at, 1.0)
    longest = 0.25 if plan.num_steps else min(EVALUATE_EVERY_S / budget_s, 0.25)

    def progress() -> float:
        if plan.num_steps:
            return min(1.0, (trainer.step - first_step) / plan.num_steps)
        return min(1.0, (time.monotonic() - started_at) / budget_s)

    def lr_scale() -> float:
        return 0.05 + 0.475 * (1 + math.cos(math.pi * progress()))

    while ranks.agree(progress())[0] < 1:
        session_ends = min(1.0, progress() + longest)
        losses: list[float] = []

        def is_over(end: float = session_ends) -> bool:
            return progress() >= end

        def note(step: int, loss: float, losses: list[float] = losses) -> None:
            losses.append(loss)
            length = history[-1][f"length@{gate:g}"]
            show(f"training, loss {loss:.2f}, accepts {length:.2f}", progress(), 1)

        if not trainer.session(buffer, lambda: False, note, lr_scale, is_over):
            break  # no time is left, or there is nothing to learn from
        better, acceptance = compare(trainer.passes, best, held_out, gate, MEASURED_TEMPERATURES)
        elapsed_s = time.monotonic() - started_at
        loss = sum(losses) / len(losses)
        history.append(_evaluation(trainer.step, elapsed_s, loss, acceptance))
        if better:
            best = trainer.weights()
            if store is not None:
                store.save(trainer, {"held_out": history[-1]})
    if store is not None:
        store.wait()
    return history


def _evaluation(
    step: int, elapsed_s: float, loss: float | None, acceptance: Acceptance
) -> dict[str, Any]:
    lengths = {f"length@{t:g}": acceptance.length(t) for t in acceptance.rates}
    agreement = {f"agreement@{i}": value for i, value in enumerate(acceptance.agreement, 1)}
    return {"step": step, "elapsed_s": elapsed_s, "loss": loss, **lengths, **agreement}
