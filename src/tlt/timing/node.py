"""The times of an emulated node, from the profile of its hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlt.config.train import EmulateConfig
from tlt.contracts import Arm
from tlt.timing import profiles
from tlt.timing.model import EngineModel
from tlt.timing.pace import Pace


@dataclass(frozen=True, slots=True)
class Node:
    """Seconds on the emulated hardware, before dilation; `pace` makes work take as long.

    Costs that do not grow with tokens are divided by the emulated tokens per real token.
    """

    engine: EngineModel
    sleep_s: float
    """Seconds in which an engine drops its policy and gives its memory away."""
    offload_s: float
    """Seconds in which the policy goes to the host, or comes back."""
    sync_s: float
    swap_s: float
    """Seconds of a drafter swap."""
    park_s: float
    """Seconds in which a trainer's drafter and optimizer reach the GPU, or leave it."""
    trainer_tokens_per_s: float
    tokens: int
    """Emulated tokens per real token."""
    pace: Pace
    """Clock of engine steps, or of a trainer's optimizer steps."""
    commands: Pace
    """Clock of weight syncs, swaps, sleep and wake."""

    @classmethod
    def of(cls, settings: dict[str, Any] | None) -> Node | None:
        """Return the node of these settings, `EmulateConfig` with a number of GPUs."""
        if settings is None:
            return None
        emulate = EmulateConfig(**settings)
        tokens = emulate.tokens
        parameters, kv_bytes = profiles.MODELS[emulate.model]
        return cls(
            engine=profiles.h100(parameters, kv_bytes, 1),
            sleep_s=profiles.MAPPING_S / tokens,
            offload_s=2 * parameters / profiles.HOST_LINK / tokens,
            sync_s=profiles.sync_s(parameters, "ipc", 1, profiles.GPUS_PER_NODE) / tokens,
            swap_s=profiles.swap_s(parameters) / tokens,
            park_s=profiles.park_s(parameters) / tokens,
            trainer_tokens_per_s=profiles.TRAINER_TOKENS_PER_S,
            tokens=tokens,
            pace=Pace(emulate.dilation),
            commands=Pace(emulate.dilation),
        )

    def step_s(
        self, verified: Arm, proposed: Arm, running: int, context: int, prefill_tokens: int
    ) -> float:
        """Return the seconds of an engine step; `context` is the tokens of all its requests."""
        engine = self.engine
        mean = self.tokens * context / max(1, running)
        decode_s = float(engine.step_s(verified, running, mean, proposed))
        return decode_s + prefill_tokens / engine.prefill_tokens_per_s


def update_s(emulate: EmulateConfig, num_gpus: int, tokens: float) -> float:
    """Return the seconds of a policy update of these tokens on all GPUs."""
    fixed_s = profiles.update_fixed_s(emulate.model, num_gpus) / emulate.tokens
    return fixed_s + tokens / profiles.training_speed(emulate.model, num_gpus)
