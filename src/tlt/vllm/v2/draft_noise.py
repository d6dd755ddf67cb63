"""Drafts drawn with the noise of the request, on vLLM's V2 runner.

`tlt.vllm.v1.draft_noise` explains the idea, and is the code of CPU engines. Here candidates, counts
and choice stay on the device: CUDA graphs record `draw`, and the host waits for nothing.

vLLM keys the noise of a draft by the position of the token before it, as it keys the draw of the
policy at that place, and adds a constant so that both have different noise. Its ratio test needs
that; acceptance by equality (`v2.sampler`) does not. So only an engine with the keyed sampler may
draft like this.

Top-p and top-k are not applied to the drafter's logits, unlike on CPU: fewer of these drafts are
accepted there, and no sample changes.

Shapes: L levels, S slots of requests and one more, B requests of the batch, K places in the draft,
V tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from tlt.vllm.v1.draft_noise import LEVELS, NoiseLevels


class NoisyDrafts:
    """Draws the drafts of an engine, place by place, and learns from their verification."""

    def __init__(self, num_slots: int, num_places: int, device: torch.device) -> None:
        # vLLM pads batches with slot -1: the last row.
        shape = (num_slots + 1, num_places)
        self.right_LK = torch.zeros(len(LEVELS), num_places, device=device)
        """How often each level was right lately at each place."""
        self._candidate_LSK = torch.zeros(len(LEVELS), *shape, dtype=torch.int64, device=device)
        self._drafted_SK = torch.zeros(shape, dtype=torch.int64, device=device)
        self._key_SK = torch.full(shape, -1, dtype=torch.int64, device=device)
        """Position that keys the noise of each draft."""
        self._place_K = torch.arange(num_places, device=device)

    def draw(
        self,
        logits_BV: torch.Tensor,
        key_B: torch.Tensor,
        slot_B: torch.Tensor,
        temperature_S: torch.Tensor,
        seed_S: torch.Tensor,
        place: torch.Tensor,
        use_fp64: bool,
    ) -> torch.Tensor:
        """Return the draft token of each request for a place [B]."""
        candidate_LB = torch.stack(
            [
                gumbel_sample(
                    logits_BV,
                    slot_B,
                    temperature_S * level,  # at 0 the likeliest token
                    seed_S,
                    key_B,
                    apply_temperature=True,
                    is_drafting=False,
                    use_fp64=use_fp64,
                )
                for level in LEVELS
            ]
        )
        best_1 = self.right_LK.index_select(1, place.view(1)).argmax(0)
        drafted_B = candidate_LB.index_select(0, best_1)[0]
        # An index of one number would make the host wait for it.
        at = slot_B.long(), place.expand(len(slot_B)).long()
        self._candidate_LSK[:, at[0], at[1]] = candidate_LB
        self._drafted_SK[at] = drafted_B
        self._key_SK[at] = key_B.to(self._key_SK.dtype)
        return drafted_B

    def forget(self, slot_B: torch.Tensor) -> None:
        """Drop candidates of drafts that nobody verifies, because another drafter's are."""
        self._key_SK[slot_B.long()] = -1

    def observe(
        self,
        slot_B: torch.Tensor,
        key_B: torch.Tensor,
        num_drawn_B: torch.Tensor,
        last_B: torch.Tensor,
    ) -> None:
        """Learn from verified drafts.

        `key_B` keys the first draw of an engine step, `num_drawn_B` counts its draws, and `last_B`
        is the last one. All draws before the last one equal the drafts.
        """
        slot_B = slot_B.long()
        num_B1 = num_drawn_B[:, None]
        is_last_BK = self._place_K == num_B1 - 1
        drawn_BK = torch.where(is_last_BK, last_B[:, None], self._drafted_SK[slot_B])
        # Drafts count if they were made for just these places.
        is_own_BK = self._key_SK[slot_B] == key_B[:, None] + self._place_K
        counts_BK = (self._place_K < num_B1) & is_own_BK
        right_LBK = (self._candidate_LSK[:, slot_B] == drawn_BK) & counts_BK
        self.right_LK *= torch.exp(-counts_BK[:, 0].sum() / NoiseLevels.WINDOW)
        self.right_LK += right_LBK.sum(1)


class KeyedDrafting:
    """Mixed in before vLLM's EAGLE speculator: drafts with the request's noise.

    `v2.sampler.install` turns it on, once it has installed acceptance by equality.
    """

    noisy: NoisyDrafts | None = None
    """None as long as drafts must not share the noise of the draws."""

    def share_noise(self) -> None:
        """Draft with the noise of the policy's draws from now on, before graphs are recorded."""
        self.noisy = NoisyDrafts(
            self.max_num_reqs,  # type: ignore[attr-defined]
            self.num_speculative_steps,  # type: ignore[attr-defined]
            self.device,  # type: ignore[attr-defined]
        )

    def learn_noise(
        self, batch: Any, num_sampled: torch.Tensor, last_sampled: torch.Tensor
    ) -> None:
        """Compare the drafts of the last engine step with the tokens drawn in this one."""
        if self.noisy is None:
            return
        first_B = batch.query_start_loc[: batch.num_reqs].long()
        self.noisy.observe(
            batch.idx_mapping,
            batch.positions[first_B],
            num_sampled,
            last_sampled[batch.idx_mapping.long(), 0],
        )

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        if self.noisy is None:
            drafted: torch.Tensor = super().sample_draft(  # type: ignore[misc]
                hidden_states,
                sample_src_positions,
                idx_mapping,
                temperature,
                seeds,
                draft_step,
                draft_logits,
                spec_step_idx,
            )
            return drafted
        return self.noisy.draw(
            self.compute_draft_logits(hidden_states, spec_step_idx),  # type: ignore[attr-defined]
            sample_src_positions,
            idx_mapping,
            temperature,
            seeds,
            draft_step,
            self.use_fp64_gumbel,  # type: ignore[attr-defined]
        )
