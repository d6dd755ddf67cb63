"""Samples of the tiny model with its hidden states, and a drafter trained on them, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tlt.drafter.checkpoint import load_drafter, save_drafter
from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.export import ExportPlan, export
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
from tlt.states.captured import Captured, Offer, capture

PROMPT_TOKENS = 8
TINY_SETTINGS = TrainerSettings(
    num_draft_tokens=4, row_tokens=2048, lr=6e-3, temperature=1.0, seed=0, bfloat16=False
)


class InMemory:
    """A sample source for a trainer."""

    def __init__(self, samples: Sequence[Captured]) -> None:
        self.samples = {str(index): sample for index, sample in enumerate(samples)}

    def offers(self) -> dict[str, Offer]:
        return {name: Offer(len(sample), 1.0) for name, sample in self.samples.items()}

    def read(self, name: str) -> Captured | None:
        return self.samples[name]


def tiny_samples(tiny: Path, count: int, seed: int = 0) -> list[Captured]:
    """Sample responses of 120 tokens, half at temperature 1, half at 0.7, with their states."""
    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    aux_layers = Eagle3Config.for_target(policy.config).aux_layer_ids
    torch.manual_seed(seed)
    samples: list[Captured] = []
    for temperature in (1.0, 0.7):
        prompts = torch.randint(4, 260, (count // 2, PROMPT_TOKENS))
        output = policy.generate(
            prompts,
            max_new_tokens=120,
            do_sample=True,
            temperature=temperature,
            pad_token_id=0,
            eos_token_id=None,
        )
        samples += [
            capture(policy, row, PROMPT_TOKENS, aux_layers, torch.float32)
            for row in output.tolist()
        ]
    return samples


def train_tiny(tiny: Path, samples: Sequence[Captured], num_steps: int) -> DrafterTrainer:
    """Train a drafter of the tiny model."""
    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return train(policy, samples, num_steps, TINY_SETTINGS)


def train(
    policy: Any,
    samples: Sequence[Captured],
    num_steps: int,
    settings: TrainerSettings,
    token_ids: torch.Tensor | None = None,
) -> DrafterTrainer:
    """Train a new drafter for `num_steps` optimizer steps, with a falling learning rate."""
    head = policy.get_output_embeddings().weight.detach()
    embedding = policy.get_input_embeddings().weight.detach()
    drafter = fresh_drafter(policy.config, head, token_ids)
    trainer = DrafterTrainer(drafter, head, embedding, settings)
    source = InMemory(samples)
    for step in range(num_steps):
        row = trainer.draw(source)
        assert row is not None
        trainer.micro_step(row, lr_scale=1.0 - 0.9 * step / num_steps)
    return trainer


def export_form(source: Path, model: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """Write a drafter in another form, as published ones are; return its folder.

    The weights are those of `source`, which the form changes: drafts are worse, and varied.
    """
    plain = load_drafter(source)
    drafter = Eagle3Drafter(replace(plain.config, **changes))
    drafter.load_state_dict(plain.state_dict(), strict=False)
    torch.manual_seed(0)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:  # ones would hide which norm is applied where
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)
    save_drafter(drafter, folder / "own", torch.float32)
    out = folder / "published"
    export(ExportPlan(source=folder / "own", target=model, out=out, format="speculators"))
    return out
