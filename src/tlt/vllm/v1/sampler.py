"""The keyed sampler of CPU engines: same seed, same tokens, with any drafts.

`tlt.vllm.keyed` says how a token is drawn.

vLLM's samplers draw from streams of random numbers, and accept a draft with a probability: how many
numbers a token takes depends on the drafts, so the samples do. Here the token of every position is
drawn with the noise of that position, and a draft is accepted if it equals the token drawn. With
one-hot drafts that happens with probability p(draft), as in vLLM's rule.

Noise shared between drafts and policy would be wrong under vLLM's rule. So both classes belong
together: `install` puts both into a runner.

vLLM applies its own settings (top-k, top-p, penalties, ...) to the logits before the draw. Without
such settings, one pass over each row that is reached does everything.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.sample.sampler import Sampler

from tlt.vllm import keyed
from tlt.vllm.args import num_begun

_LOGPROBS_OF = {"raw_logprobs": keyed.RAW, "processed_logprobs": keyed.AT_TEMPERATURE}
_GREEDY_BELOW = 1e-5
"""vLLM takes the likeliest token below this temperature."""


Watch = Callable[[Any, Any, Any, Any, Any], None]
"""Sees a draw: logits [R, V], tokens [B, K+1], keys, positions and inverse temperatures [B]."""


class Keys(Protocol):
    """Knows the seed of each request in the batch, and how long its response is."""

    watch: Watch | None
    """Sees every draw, if set."""

    def of_batch(self, num_requests: int) -> tuple[Any, Any]:
        """Return the requests' seeds and the positions of their next tokens."""
        ...


class RunnerKeys:
    """The seeds and positions of the requests that vLLM's runner holds."""

    def __init__(self, runner: Any, engine_seed: int) -> None:
        self._runner = runner
        self._engine_seed = engine_seed
        self.watch: Watch | None = None

    def of_batch(self, num_requests: int) -> tuple[Any, Any]:
        """Return the requests' seeds and the positions of their next tokens."""
        batch = self._runner.input_batch
        keys: Any = np.zeros(num_requests, np.uint64)
        positions = batch.num_tokens_no_spec[:num_requests] - batch.num_prompt_tokens[:num_requests]
        positions = positions.astype(np.int64)
        for index, name in enumerate(batch.req_ids[:num_requests]):
            sampling = self._runner.requests[name].sampling_params
            seed = sampling.seed
            keys[index] = _seed_of(self._engine_seed, name) if seed is None else seed % 2**64
            positions[index] += num_begun(sampling)
        return keys, positions


@functools.lru_cache(maxsize=65536)
def _seed_of(engine_seed: int, request: str) -> int:
    """Return the seed of a request that came without one. vLLM's names of requests are random."""
    text = f"{engine_seed}/{request}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def install(runner: Any, speculative: Any, engine_seed: int) -> None:
    """Let a runner of vLLM sample by keys."""
    runner.sampler = KeyedSampler(RunnerKeys(runner, engine_seed), runner.sampler)
    if speculative is not None:
        runner.rejection_sampler = KeyedVerifier(runner.sampler, speculative, runner.device)


class KeyedSampler(Sampler):
    """Draws the next token of each request with the noise of its position."""

    def __init__(self, keys: Keys, like: Sampler) -> None:
        super().__init__(like.logprobs_mode, like.use_fp64_gumbel)
        self.keys = keys

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        if predict_bonus_token or not is_plain(sampling_metadata, self.logprobs_mode):
            return super().forward(
                logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )
        none = [0] * len(logits)
        return draw(logits.float(), none, (), self.keys, sampling_metadata, self.logprobs_mode)

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw from logits that vLLM has processed; return what its log-probabilities are of."""
        mode = logprobs_mode_override or self.logprobs_mode
        scaled = constrain(logits, sampling_metadata, None)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            if not sampling_metadata.all_greedy:
                scaled = processor.apply(scaled)
        scaled = keep_top(scaled, sampling_metadata, None)
        out = draw_processed(logits, scaled, [0] * len(logits), (), self.keys, sampling_metadata)
        processed = None
        if mode == "processed_logits":
            processed = scaled
        elif mode == "processed_logprobs":
            processed = self.compute_logprobs(scaled)
        return out.sampled_token_ids[:, 0], processed


class KeyedVerifier(RejectionSampler):
    """Accepts a draft token exactly if it is the token that the policy draws there."""

    def forward(
        self, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling: Any
    ) -> SamplerOutput:
        raw_RV = logits.float()
        drafts, num_drafts = metadata.draft_token_ids, metadata.num_draft_tokens
        keys, mode = self.sampler.keys, self.sampler.logprobs_mode
        if is_plain(sampling, mode):
            return draw(raw_RV, num_drafts, drafts, keys, sampling, mode)
        processed_RV, scaled_RV = self._processed(metadata, raw_RV, sampling)
        out = draw_processed(processed_RV, scaled_RV, num_drafts, drafts, keys, sampling)
        if sampling.max_num_logprobs is None:
            return out
        seen_RV = scaled_RV if self.is_processed_logprobs_mode else raw_RV
        logprobs = self._get_logprobs_tensors(
            sampling.max_num_logprobs,
            metadata,
            seen_RV,
            seen_RV[metadata.target_logits_indices],
            seen_RV[metadata.bonus_logits_indices],
            out.sampled_token_ids,
        )
        return SamplerOutput(out.sampled_token_ids, logprobs)

    def _processed(
        self, metadata: Any, raw_RV: torch.Tensor, sampling: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits with the settings that vLLM applies to drafts, and at temperature.

        vLLM treats the row behind the drafts apart, and forgets there that the drafts count for
        `min_tokens`. So each request passes as one with a draft more, and all its rows as drafts.
        """
        num_rows = [num + 1 for num in metadata.num_draft_tokens]
        drafts = metadata.draft_token_ids.split(metadata.num_draft_tokens)
        processed_RV = self.apply_logits_processors(
            raw_RV.clone(),
            replace(sampling, spec_token_ids=[[*of.tolist(), 0] for of in drafts]),
            replace(metadata, num_draft_tokens=num_rows),
        )
        request_R = torch.arange(len(num_rows)).repeat_interleave(torch.tensor(num_rows))
        scaled_RV = constrain(processed_RV, sampling, request_R)
        return processed_RV, keep_top(scaled_RV, sampling, request_R)


def constrain(logits_RV: torch.Tensor, sampling: Any, request_R: Any) -> torch.Tensor:
    """Divide the logits by the temperature of their request, unless it is greedy."""
    if sampling.all_greedy:
        return logits_RV
    temperature = sampling.temperature if request_R is None else sampling.temperature[request_R]
    return logits_RV / temperature.where(temperature >= _GREEDY_BELOW, 1.0)[:, None]


def keep_top(logits_RV: torch.Tensor, sampling: Any, request_R: Any) -> torch.Tensor:
    """Keep the likeliest tokens of each row only, as top-k and top-p say."""
    if sampling.all_greedy:
        return logits_RV
    top_k, top_p = sampling.top_k, sampling.top_p
    if request_R is not None:
        top_k = None if top_k is None else top_k[request_R]
        top_p = None if top_p is None else top_p[request_R]
    if top_k is not None:
        # A draft vocabulary may be smaller than k, and than vLLM's k of requests without top-k.
        top_k = top_k.clamp(max=logits_RV.shape[1])
    return apply_top_k_top_p(logits_RV, top_k, top_p)


def draw_processed(
    logits_RV: torch.Tensor,
    scaled_RV: torch.Tensor,
    num_drafts: list[int],
    drafts: Any,
    keys: Keys,
    sampling: Any,
) -> SamplerOutput:
    """Draw tokens only, from logits that vLLM has processed, without and with their temperature.

    Settings that exclude tokens do so at the temperature. The draw is from the logits without it,
    as in a batch without such settings, so both decide a tie in the same way.
    """
    sampling = replace(sampling, max_num_logprobs=None)
    if not all(map(_only_excludes, sampling.logitsprocs.argmax_invariant)):
        return draw(scaled_RV, num_drafts, drafts, keys, sampling, None)
    kept_RV = logits_RV.masked_fill(scaled_RV == -torch.inf, -torch.inf)
    return draw(kept_RV, num_drafts, drafts, keys, sampling, "raw_logprobs")


def draw(
    logits_RV: torch.Tensor,
    num_drafts: list[int],
    drafts: Any,
    keys: Keys,
    sampling: Any,
    logprobs_mode: str | None,
) -> SamplerOutput:
    """Draw every request's tokens up to the first draft that differs from the draw.

    `logprobs_mode` is None where the logits have their temperature already.
    """
    batch, width = len(num_drafts), max(num_drafts, default=0) + 1
    logprobs_of = keyed.NOTHING
    if sampling.max_num_logprobs is not None and logprobs_mode is not None:
        logprobs_of = _LOGPROBS_OF[logprobs_mode]
    tokens: Any = np.full((batch, width), PLACEHOLDER_TOKEN_ID, np.int32)
    logprobs: Any = np.zeros((batch, width), np.float32)
    ranks: Any = np.zeros((batch, width), np.int64)
    key_B, position_B = keys.of_batch(batch)
    inverse_B = inverse_temperature(sampling, batch, is_scaled=logprobs_mode is None)
    logits = logits_RV.contiguous().numpy()
    keyed.draw_rows(
        logits,
        np.array(num_drafts, np.int64),
        np.asarray(drafts, np.int64),
        key_B,
        position_B,
        inverse_B,
        logprobs_of,
        tokens,
        logprobs,
        ranks,
    )
    if keys.watch is not None:
        keys.watch(logits, tokens, key_B, position_B, inverse_B)
    tensors = None
    if logprobs_of:
        tensors = LogprobsTensors(
            torch.from_numpy(tokens).clamp(min=0).reshape(-1, 1),
            torch.from_numpy(logprobs).reshape(-1, 1),
            torch.from_numpy(ranks).reshape(-1),
        )
    return SamplerOutput(torch.from_numpy(tokens), tensors)


def inverse_temperature(sampling: Any, batch: int, is_scaled: bool) -> Any:
    """Return 1 / temperature of each request as `draw_rows` wants it; 0 for greedy ones."""
    if sampling.all_greedy:
        return np.zeros(batch, np.float32)
    temperature = sampling.temperature.float().numpy()[:batch]
    greedy = temperature < _GREEDY_BELOW
    inverse = np.float32(1) / np.where(greedy | is_scaled, np.float32(1), temperature)
    return np.where(greedy, np.float32(0), inverse)


def is_plain(sampling: Any, logprobs_mode: str) -> bool:
    """Return whether a batch has no setting but temperature."""
    holder = sampling.thinking_budget_state_holder
    return (
        sampling.top_k is None
        and sampling.top_p is None
        and sampling.no_penalties
        and not sampling.bad_words_token_ids
        and not sampling.logprob_token_ids
        and sampling.allowed_token_ids_mask is None
        and sampling.max_num_logprobs in (None, 0)
        and logprobs_mode in _LOGPROBS_OF
        and (holder is None or not holder.has_tracked_requests())
        and all(_is_idle(processor) for processor in sampling.logitsprocs.all)
    )


def _is_idle(processor: Any) -> bool:
    if isinstance(processor, MinPLogitsProcessor):
        return processor.min_p_count == 0
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    return isinstance(processor, MinTokensLogitsProcessor) and not processor.min_toks


def _only_excludes(processor: Any) -> bool:
    return isinstance(processor, MinPLogitsProcessor)


class DrawMargins:
    """Notes by how much an expected token missed the draw, as long as the sampler runs for it.

    Only the first difference matters: the text differs after it, and so do the distributions.
    """

    def __init__(self, keys: Keys, expected: Sequence[int]) -> None:
        self._keys = keys
        self._expected = expected
        self._missed: dict[int, float] = {}
        keys.watch = self._drawn

    def _drawn(self, logits: Any, tokens: Any, keys: Any, positions: Any, inverse: Any) -> None:
        """Compare the draw of the only request in the batch; a recheck has no drafts."""
        position = int(positions[0])
        expected = self._expected[position]
        # A token drawn before the end of the prompt is drawn again.
        self._missed.pop(position, None)
        if expected != tokens[0, 0] and not self._missed:
            short = keyed.shortfall(logits[0], keys[0], position, inverse[0], expected)
            self._missed[position] = short

    def end(self) -> dict[int, float]:
        """Leave the sampler alone again; return the shortfall by position."""
        self._keys.watch = None
        return self._missed
