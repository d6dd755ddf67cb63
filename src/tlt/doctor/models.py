"""The models of the checks: a tiny random policy, and a drafter that was trained on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tlt.doctor.place import Place
from tlt.models import tiny

if TYPE_CHECKING:
    from tlt.states.captured import Captured, Offer

NUM_SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 128, 8, 96
NUM_STEPS = 60
"""Optimizer steps of the drafter: enough for the policy to accept a good part of its drafts."""


class _InMemory:
    """Samples for a trainer."""

    def __init__(self, samples: Mapping[str, Captured]) -> None:
        self._samples = samples

    def offers(self) -> dict[str, Offer]:
        from tlt.states.captured import Offer

        return {name: Offer(len(sample), 1.0) for name, sample in self._samples.items()}

    def read(self, name: str) -> Captured | None:
        return self._samples[name]


def make(place: Place) -> dict[str, Any]:
    """Make the policy and the drafter on the CPU, unless the folder holds them."""
    if not place.policy.exists():
        tiny.make(place.policy)
    if not place.drafter.exists():
        _train_drafter(place)
    return {"policy": str(place.policy), "drafter": str(place.drafter)}


def _train_drafter(place: Place) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.drafter.checkpoint import save_drafter
    from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
    from tlt.states.captured import capture

    policy = AutoModelForCausalLM.from_pretrained(place.policy, dtype=torch.float32)
    head = policy.get_output_embeddings().weight.detach()
    drafter = fresh_drafter(policy.config, head, None)
    torch.manual_seed(0)
    texts = policy.generate(
        torch.randint(4, 260, (NUM_SAMPLES, PROMPT_TOKENS)),
        max_new_tokens=RESPONSE_TOKENS,
        do_sample=True,
        temperature=0.85,
        pad_token_id=0,
        eos_token_id=None,
    ).tolist()
    layers = drafter.config.aux_layer_ids
    samples = {
        str(number): capture(policy, text, PROMPT_TOKENS, layers, torch.float32)
        for number, text in enumerate(texts)
    }
    settings = TrainerSettings(
        num_draft_tokens=4, row_tokens=2048, lr=6e-3, temperature=1.0, seed=0, bfloat16=False
    )
    embedding = policy.get_input_embeddings().weight.detach()
    trainer = DrafterTrainer(drafter, head, embedding, settings)
    source = _InMemory(samples)
    for step in range(NUM_STEPS):
        row = trainer.draw(source)
        assert row is not None, "the samples are all there"
        trainer.micro_step(row, lr_scale=1.0 - 0.9 * step / NUM_STEPS)
    save_drafter(trainer.drafter, place.drafter, torch.float32)
