"""Self-test on vLLM's V2 runner: does this process sample rightly under speculation?

The test hands the kind of rejection sampler that runs in this process rows with a small known
distribution. An engine with drafts draws a token that no accepted draft has decided in a later
step, without drafts: so does the test. Every token must then follow the distribution. The keyed
sampler must also draw the tokens of the plain path with any drafts, and accept each draft that
equals them.

V2's noise is a function of seed, position and token, so the test leaves no random state changed.

Shapes: N requests, K drafts each, V tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from tlt.vllm import compat
from tlt.vllm.v1.selftest import LOGITS, MAX_SIGMA, SETTINGS, TEMPERATURE, worst_deviation
from tlt.vllm.v2.sampler import KeyedVerifier, draw_alone, install

_NUM_SLOTS = 8
_MAX_DRAFTS = 3
_NUM_REQUESTS = 4096
_NUM_INTERPRETED = 4
"""Requests on a CPU, where V2 runs in tests only: Triton's interpreter takes 20 ms a row."""


def sampling_faults(runner: Any) -> list[str]:
    """Return the faults of sampling under speculation in this process."""
    faults = []
    for label, top_p in SETTINGS:
        rows = _Rows(runner, top_p)
        plain_NK = rows.drawn()
        drafts_NK = rows.drafts()
        tokens_NK, _ = rows.verified(drafts_NK, plain_NK)
        sigma = worst_deviation(tokens_NK.flatten(), top_p)
        if not sigma < MAX_SIGMA:
            faults.append(f"sampling with {label} is off by {sigma:.0f} standard errors")
        if not isinstance(runner.rejection_sampler, KeyedVerifier):
            continue
        if not torch.equal(tokens_NK, plain_NK):
            faults.append(f"tokens sampled with {label} depend on the drafts")
        if not rows.verified(plain_NK[:, :-1], plain_NK)[1].eq(rows.num_rows).all():
            faults.append(f"drafts that equal the draw with {label} are rejected")
    return faults


def stand_in(device: torch.device, method: str = "standard", sampled_drafts: bool = False) -> Any:
    """Return what the test needs of a runner, for a test without an engine."""
    speculative = SimpleNamespace(
        num_speculative_tokens=_MAX_DRAFTS,
        enable_adaptive_verification=False,
        rejection_sample_method=method,
        fly_entropy_threshold=None,
        fly_entropy_top_k=0,
    )
    sampler = _make_sampler(device)
    runner = SimpleNamespace(
        device=device,
        speculative_config=speculative,
        speculator=SimpleNamespace(draft_logits=torch.empty(0) if sampled_drafts else None),
        sampler=sampler,
        rejection_sampler=RejectionSampler(sampler, speculative, device),
    )
    install(runner)
    return runner


def _make_sampler(device: torch.device, use_fp64_gumbel: bool = False) -> Any:
    states = RequestState(_NUM_SLOTS, 16, 16, _MAX_DRAFTS, len(LOGITS), device)
    return Sampler(
        SimpleNamespace(reasoning_config=None),
        _NUM_SLOTS,
        len(LOGITS),
        device,
        states,
        use_fp64_gumbel=use_fp64_gumbel,
    )


class _Rows:
    """Requests with known logits, in slots of a separate sampler."""

    def __init__(self, runner: Any, top_p: float) -> None:
        device = runner.device
        verifier = runner.rejection_sampler
        num_drafts = min(_MAX_DRAFTS, verifier.num_speculative_steps)
        self._vocab = len(LOGITS)
        self._device = device
        self._sampler = _make_sampler(device, runner.sampler.use_fp64_gumbel)
        if isinstance(verifier, KeyedVerifier):
            draw_alone(self._sampler)
        for slot in range(_NUM_SLOTS):
            params = SamplingParams(temperature=TEMPERATURE, top_p=top_p, seed=slot)
            self._sampler.add_request(slot, params)
        self._sampler.apply_staged_writes()
        self._verifier = type(verifier)(self._sampler, runner.speculative_config, device)
        self._is_sampled = getattr(runner.speculator, "draft_logits", None) is not None
        self.num_rows = num_drafts + 1
        self._num = _NUM_INTERPRETED if device.type == "cpu" else _NUM_REQUESTS
        row_R = torch.arange(self._num * self.num_rows, device=device)
        request_R = row_R // self.num_rows
        self._slot_N = torch.arange(self._num, device=device) % _NUM_SLOTS
        self._slot_R = self._slot_N[request_R]
        self._place_R = (row_R % self.num_rows).int()
        # Requests of one slot share the seed, so their positions differ.
        self._position_R = request_R // _NUM_SLOTS * self.num_rows + self._place_R
        ends = torch.arange(self._num + 1, device=device) * self.num_rows
        self._row_ends = ends.int()
        self._logits_RV = torch.tensor(LOGITS, device=device).repeat(len(row_R), 1)

    def drawn(self) -> torch.Tensor:
        """Return the tokens of the plain path [N, K+1]."""
        drawn_R, _ = self._sampler.sample(
            self._logits_RV,
            self._slot_R,
            self._slot_N,
            np.arange(_NUM_SLOTS),
            self._position_R,
            torch.zeros_like(self._slot_R),
            self._place_R,
            np.full(_NUM_SLOTS, 16),
        )
        return drawn_R.view(self._num, -1)

    def drafts(self) -> torch.Tensor:
        """Return drafts [N, K] from a distribution other than the policy's."""
        generator = torch.Generator().manual_seed(0)
        wanted = self._num * (self.num_rows - 1)
        probabilities = torch.tensor(self._draft_logits()).div(TEMPERATURE).softmax(0)
        drafts = torch.multinomial(probabilities, wanted, replacement=True, generator=generator)
        return drafts.view(self._num, -1).to(self._device)

    def verified(
        self, drafts_NK: torch.Tensor, plain_NK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of an engine with drafts [N, K+1], and how many one step yields [N]."""
        last_N1 = drafts_NK.new_zeros(self._num, 1)
        input_R = torch.cat([last_N1, drafts_NK], 1).flatten()
        draft_logits = None
        if self._is_sampled:
            logits = torch.tensor(self._draft_logits(), device=self._device)
            draft_logits = logits.repeat(_NUM_SLOTS, self._verifier.num_speculative_steps, 1)
        _, tokens_NW, num_N = self._verifier._verify(
            self._logits_RV,
            draft_logits,
            input_R,
            self._position_R,
            self._row_ends,
            self._slot_N,
            np.arange(_NUM_SLOTS),
            self._slot_R,
            self._place_R,
            np.full(_NUM_SLOTS, 16),
            *compat.verified_inputs(input_R),
        )
        place_K = torch.arange(self.num_rows, device=self._device)
        counts_NK = place_K < num_N[:, None]
        return torch.where(counts_NK, tokens_NW[:, : self.num_rows], plain_NK), num_N

    def _draft_logits(self) -> list[float]:
        return LOGITS[::-1] if self._is_sampled else [0.0, 0.0, 0.0, *[-9.0] * (self._vocab - 3)]
