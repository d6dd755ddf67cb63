"""The keyed sampler on vLLM's V2 runner: same seed, same tokens, with any drafts.

V2 is the runner of GPUs. Without drafts it already draws as `tlt.vllm.keyed` says: a token is
`argmax(logits + g)`, and the Gumbel noise g is a function of (seed, position, token). Its rejection
sampler accepts drafts by the ratio of probabilities, so a sample depends on the drafts.

Here the rows of drafts pass through the very function that draws without drafts, with the seed and
the position of their request. A draft is accepted exactly if it is the token drawn. So the drafts,
their probabilities and their number decide how many tokens an engine step yields, and nothing else.

The noise is vLLM's, not the noise of CPU engines: V1 and V2 draw different samples. The key of a
draw is the position of the last token before it, in prompt and response, which is the same with and
without drafts, in chunks, and after a preemption.

Only then may drafts use the noise of the draws (`v2.speculator`).

`rejection_sample_method = "block"` keeps vLLM's own rejection sampler: the right distribution, but
samples that depend on drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.sample.ops import topk_topp_triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tlt.contracts import LARGEST_SHORTFALL
from tlt.errors import ConfigError
from tlt.vllm.compat import skips


def install(runner: Any) -> None:
    """Let a V2 runner whose model is loaded sample by keys. Safe to call twice."""
    sampler, verifier = runner.sampler, runner.rejection_sampler
    if sampler is None or not wants_keys(runner.speculative_config):
        return  # not the last pipeline stage, or vLLM's own rule
    if type(sampler) is Sampler:
        draw_alone(sampler)
    if verifier is None:
        return
    if type(sampler) is not Sampler or type(verifier) not in (RejectionSampler, KeyedVerifier):
        raise ConfigError(
            f"the keyed sampler does not know {type(sampler).__name__} with "
            f"{type(verifier).__name__}; remove engine_args.watermark_config, or turn speculation "
            "off with strategy.kind = 'off' and no drafter"
        )
    runner.rejection_sampler = KeyedVerifier(sampler, runner.speculative_config, runner.device)
    if hasattr(runner.speculator, "shares_noise"):
        runner.speculator.shares_noise = not skips("draft_noise")  # wrong under vLLM's rule


def draw_alone(sampler: Sampler) -> None:
    """Let no draw depend on the batch around it."""
    # Fused samplers draw from streams of random numbers.
    sampler.use_flashinfer = sampler.use_xpu_sampler = False
    _fix_top_p()
    if not skips("both_limits"):
        sampler.sampling_states.__class__ = BothLimits


class BothLimits(SamplingStates):
    """Sampling settings that name top-k and top-p for all rows if one row has any of the two.

    vLLM compiles one kernel for top-k, one for top-p and one for both. Which one a row met would
    depend on its neighbours, and two kernels may round a sum of probabilities in two ways. A row
    without a limit passes the kernel of both unchanged.
    """

    def get_top_k_top_p(self, expanded_idx_mapping: torch.Tensor, *args: Any) -> tuple[Any, ...]:
        """Return top-k and top-p of each row, None twice if no row has a limit, and what follows.

        Since 0.33 a flag follows: whether a row has top-p alone, which no neighbour changes here.
        """
        top_k, top_p, *rest = super().get_top_k_top_p(expanded_idx_mapping, *args)
        if top_k is None and top_p is not None:
            top_k = self.top_k.gpu[expanded_idx_mapping]
        if top_p is None and top_k is not None:
            top_p = self.top_p.gpu[expanded_idx_mapping]
        return top_k, top_p, *rest


def wants_keys(speculative: Any) -> bool:
    """Return whether an engine with these speculative settings samples by keys."""
    method = getattr(speculative, "rejection_sample_method", "standard")
    return not skips("keyed") and method == "standard"


def is_keyed(runner: Any) -> bool:
    """Return whether a V2 runner samples by keys, with drafts and without."""
    return (
        type(runner.sampler) is Sampler
        and wants_keys(runner.speculative_config)
        and isinstance(runner.rejection_sampler, KeyedVerifier | None)
    )


class KeyedVerifier(RejectionSampler):
    """Accepts a draft token exactly if it is the token that the policy draws there."""

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the processed logits [R, V], the tokens [B, K+1], and how many count [B]."""
        drawn_R, processed_RV = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        input_R = draft_sampled if verify_draft_sampled is None else verify_draft_sampled
        tokens_BK, num_tokens_B = accept(
            drawn_R, input_R, cu_num_logits, self.num_speculative_steps + 1
        )
        return processed_RV, tokens_BK, num_tokens_B


def accept(
    drawn_R: torch.Tensor, input_R: torch.Tensor, row_ends: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each request's tokens up to the first draft that differs from the draw.

    The device computes everything, and the host waits for nothing.

    Args:
        drawn_R: the token drawn after each row.
        input_R: the input token of each row: in a request's first row its last token, then its
            drafts; -1 for a draft that must not be accepted.
        row_ends: [B + 1], 0 and where each request's rows end.
        width: columns of the result; no request has more rows.

    Returns:
        Tokens [B, width], and how many of them count [B]; the rest has no meaning.
    """
    row_BK = row_ends[:-1, None] + torch.arange(width, device=row_ends.device)
    exists_BK = row_BK < row_ends[1:, None]
    row_BK = row_BK.clamp(max=len(drawn_R) - 1).long()
    drawn_BK = drawn_R[row_BK]
    accepted_BK = (drawn_BK[:, :-1] == input_R[row_BK[:, 1:]]) & exists_BK[:, 1:]
    num_accepted_B = accepted_BK.int().cumprod(1).sum(1)
    return drawn_BK, (num_accepted_B + 1).int()


def _fix_top_p() -> None:
    """Let one kernel apply top-p for any number of rows.

    Up to 64 rows, vLLM splits a row between programs, and their number depends on the number of
    rows. A sum of probabilities near top-p, or two equal logits, could then keep a token in a batch
    without drafts and drop it in a batch with drafts. Not measured: what the other kernel costs in
    small batches with top-p.
    """
    if not skips("top_p_rows"):
        topk_topp_triton._SPLIT_MAX_BATCH = 0


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
            return  # the prompt is not read to its end, or the recheck has ended
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
