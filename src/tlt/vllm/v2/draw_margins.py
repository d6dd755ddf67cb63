"""The draws of a recheck against the tokens expected, on vLLM's V2 runner (`missed` is for V1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from tlt.contracts import LARGEST_SHORTFALL

_HALVINGS = 30
"""Steps of the search for a shortfall: `LARGEST_SHORTFALL` is halved so often, to 1e-7 nats."""


class DrawMarginsV2:
    """Notes by how much an expected token missed the draw, as long as the sampler runs for it.

    Only the first difference matters: the text differs after it, and so do the distributions.
    Reading a draw makes the host wait for the device; a recheck runs on an idle engine.
    """

    def __init__(
        self, runner: Any, request_id: str, num_prompt_tokens: int, expected: Sequence[int]
    ) -> None:
        self._sampler = runner.sampler
        self._slots = runner.req_states.req_id_to_index
        self._request_id = request_id
        self._first = num_prompt_tokens - 1
        """Position of the token before the first draw: vLLM keys each draw by that position."""
        self._expected = expected
        self._missed: dict[int, float] = {}
        self._sampler.sample = self._sample

    def _sample(self, *args: Any, **options: Any) -> Any:
        """Draw as vLLM does, and compare the draw of the recheck, which has no drafts."""
        drawn_R, processed_RV = type(self._sampler).sample(self._sampler, *args, **options)
        _, _, _, slots_np, pos, *_ = args
        slot = self._slots.get(self._request_id)
        for row in np.flatnonzero(slots_np == slot).tolist():
            with gpu_sync_allowed():
                self._compare(slot, int(pos[row]), int(drawn_R[row]), processed_RV[row])
        return drawn_R, processed_RV

    def _compare(self, slot: int, position: int, drawn: int, logits_V: torch.Tensor) -> None:
        place = position - self._first
        if not 0 <= place < len(self._expected):
            return  # a part of the prompt is still to come, or the recheck has ended
        self._missed.pop(place, None)
        expected = self._expected[place]
        if expected != drawn and not self._missed:
            self._missed[place] = self._shortfall(slot, position, logits_V, expected)

    def _shortfall(self, slot: int, position: int, logits_V: torch.Tensor, token: int) -> float:
        """Return how much the token's logit must rise until vLLM's kernel draws the token."""
        if not bool(logits_V[token].isfinite()):
            return LARGEST_SHORTFALL
        states = self._sampler.sampling_states
        device = logits_V.device
        low, high = 0.0, LARGEST_SHORTFALL
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            raised_1V = logits_V[None].float().clone()
            raised_1V[0, token] += middle
            drawn = gumbel_sample(
                raised_1V,
                torch.tensor([slot], device=device),
                states.temperature.gpu,
                states.seeds.gpu,
                torch.tensor([position], device=device),
                apply_temperature=False,
                is_drafting=False,
                use_fp64=self._sampler.use_fp64_gumbel,
            )
            low, high = (low, middle) if int(drawn) == token else (middle, high)
        return high

    def end(self) -> dict[int, float]:
        """Leave the sampler alone again; return the shortfall by place in the response."""
        del self._sampler.sample
        return self._missed
