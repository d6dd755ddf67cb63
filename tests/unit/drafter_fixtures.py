"""A very small drafter, and samples for it."""

import torch

from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings
from tlt.states.captured import Captured

CONFIG = Eagle3Config(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=20,
    aux_layer_ids=(1, 2, 3),
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
)
SETTINGS = TrainerSettings(
    num_draft_tokens=3, row_tokens=120, lr=3e-3, temperature=1.0, seed=0, bfloat16=False
)


def drafter() -> Eagle3Drafter:
    """Return an untrained drafter, always the same."""
    torch.manual_seed(0)
    model = Eagle3Drafter(CONFIG)
    model.set_draft_vocabulary(torch.arange(0, 40, 2))
    return model


def captured(length: int, num_prompt: int, seed: int = 0) -> Captured:
    """Return a sample with random states, which no drafter can predict."""
    generator = torch.Generator().manual_seed(seed)
    return Captured(
        token_ids_T=torch.randint(0, CONFIG.vocab_size, (length,), generator=generator),
        loss_mask_T=torch.arange(length) >= num_prompt,
        aux_TA=torch.randn(length, 96, generator=generator),
        final_TH=torch.randn(length, 32, generator=generator),
    )


def trainer_of(model: Eagle3Drafter, settings: TrainerSettings = SETTINGS) -> DrafterTrainer:
    """Return a trainer of a drafter, for a policy with a random head and embedding."""
    generator = torch.Generator().manual_seed(5)
    head = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    return DrafterTrainer(model, head, embedding, settings)
