"""The samplers of vLLM's V2 runner on logits made up here; no engine needed.

`Desk` plays the runner: it lets requests with made-up logits draw their tokens step by step, with
drafts or without, through vLLM's own request states and kernels. Everything here runs in a process
that has called `interpreter.prepare`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB = 96
MAX_DRAFTS = 3
PROMPT = (5, 6, 7)
LENGTH = 5
MAX_MODEL_LEN = 64

Drafts = Callable[[int, list[int]], list[int]]
"""Returns the drafts of a request (its slot) after a text."""


def made_up_logits(text: Sequence[int], scale: float = 2.0) -> Any:
    """Return logits [V] that depend on the whole text."""
    import torch

    number = 0
    for token in text:
        number = (number * 1_000_003 + int(token) + 1) % 2**61
    generator = torch.Generator().manual_seed(number)
    return torch.randn(VOCAB, generator=generator) * scale


def speculative(method: str = "standard") -> Any:
    return SimpleNamespace(
        num_speculative_tokens=MAX_DRAFTS,
        enable_adaptive_verification=False,
        rejection_sample_method=method,
    )


class Desk:
    """Requests with made-up logits in vLLM's request states, and a sampler for them."""

    def __init__(
        self,
        settings: Sequence[dict[str, Any]],
        method: str = "standard",
        logprobs_mode: str = "raw_logprobs",
        keyed: bool = True,
    ) -> None:
        import torch
        import vllm.v1.worker.cpu.shm  # noqa: F401  pinned memory without a device
        from vllm import SamplingParams
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
        from vllm.v1.worker.gpu.states import RequestState

        from tlt.vllm.v2 import sampler as sampler_v2

        device = torch.device("cpu")
        num = len(settings)
        self.states = RequestState(num, MAX_MODEL_LEN, 4096, MAX_DRAFTS, VOCAB, device)
        self.sampler = Sampler(
            SimpleNamespace(reasoning_config=None),
            num,
            VOCAB,
            device,
            self.states,
            logprobs_mode=logprobs_mode,
            num_speculative_tokens=MAX_DRAFTS + 1,
        )
        self.runner = SimpleNamespace(
            sampler=self.sampler,
            rejection_sampler=RejectionSampler(self.sampler, speculative(method), device),
            speculative_config=speculative(method),
            speculator=None,
            device=device,
            req_states=self.states,
        )
        if keyed:
            sampler_v2.install(self.runner)
        self.texts: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.num_accepted = self.num_steps = 0
        self.draft_logits: Any = None
        """What a drafter that samples hands over, [slots, drafts, V]."""
        for index, given in enumerate(settings):
            params = {"temperature": 1.0, "seed": index, "logprobs": 0} | given
            stop = params.pop("stop_token_ids", None)
            sampling = SamplingParams(max_tokens=LENGTH, stop_token_ids=stop, **params)
            self.states.add_request(f"r{index}", len(PROMPT), list(PROMPT), 0, LENGTH)
            slot = self.states.req_id_to_index[f"r{index}"]
            self.sampler.add_request(slot, sampling)
            self.texts[slot] = list(PROMPT)
            self.logprobs[slot] = []
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def slots(self) -> list[int]:
        """Return the requests' slots in the order of their settings."""
        return [self.states.req_id_to_index[f"r{i}"] for i in range(len(self.texts))]

    def step(self, slots: Sequence[int], drafts: Drafts | None) -> None:
        """Let the requests in these slots draw."""
        batch = self.batch(slots, [drafts(s, self.texts[s]) if drafts else [] for s in slots])
        if batch.num_draft_tokens:
            out = self.runner.rejection_sampler(batch.logits.clone(), batch, self.draft_logits)
        else:
            out = self.runner.sampler(batch.logits.clone(), batch)
        self.take(batch, slots, out)

    def batch(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> Any:
        """Return the input batch of an engine step, with the logits of its rows."""
        import torch
        from vllm.v1.worker.gpu.input_batch import expand_idx_mapping

        rows = [[self.texts[s][-1], *d] for s, d in zip(slots, drafts, strict=True)]
        counts = np.array([len(r) for r in rows])
        ends_np = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        ends = torch.from_numpy(ends_np)
        mapping = torch.tensor(slots, dtype=torch.int32)
        expanded, local = expand_idx_mapping(mapping, int(ends_np[-1]), ends, MAX_DRAFTS + 1)
        starts = [len(self.texts[s]) - 1 for s in slots]
        texts = [
            self.texts[s] + list(d[:i])
            for s, d in zip(slots, drafts, strict=True)
            for i in range(len(d) + 1)
        ]
        lengths = torch.tensor([s + int(c) for s, c in zip(starts, counts, strict=True)])
        return SimpleNamespace(
            num_reqs=len(slots),
            idx_mapping=mapping,
            idx_mapping_np=np.array(slots),
            expanded_idx_mapping=expanded,
            expanded_local_pos=local,
            cu_num_logits=ends,
            cu_num_logits_np=ends_np,
            query_start_loc=ends,
            input_ids=torch.tensor([t for r in rows for t in r], dtype=torch.int32),
            positions=torch.tensor(
                [s + i for s, c in zip(starts, counts, strict=True) for i in range(c)]
            ),
            logits_indices=torch.arange(int(ends_np[-1])),
            seq_lens=lengths.int(),
            seq_lens_cpu_upper_bound=lengths.int(),
            num_draft_tokens=sum(map(len, drafts)),
            logits=torch.stack([made_up_logits(t) for t in texts]),
        )

    def take(self, batch: Any, slots: Sequence[int], out: Any) -> None:
        """Let vLLM note the tokens drawn, and note them here."""
        from vllm.v1.worker.gpu.input_batch import post_update

        post_update(
            batch.idx_mapping,
            self.states.num_computed_tokens.gpu,
            self.states.last_sampled_tokens,
            self.sampler.penalties_state.output_bin_counts,
            out.sampled_token_ids,
            out.num_sampled,
            out.num_rejected,
            batch.query_start_loc,
            self.states.all_token_ids.gpu,
            self.states.total_len.gpu,
        )
        self.num_steps += 1
        for row, slot in enumerate(slots):
            num = int(out.num_sampled[row])
            first, end = (int(batch.cu_num_logits[row + i]) for i in (0, 1))
            assert num + int(out.num_rejected[row]) == end - first
            self.num_accepted += num - 1
            self.texts[slot] += out.sampled_token_ids[row, :num].tolist()
            if out.logprobs_tensors is not None:
                scores, ranks = out.logprobs_tensors.logprobs, out.logprobs_tensors
                for i in range(first, first + num):
                    chosen = int(ranks.logprob_token_ids[i, 0])
                    rank = int(ranks.selected_token_ranks[i])
                    self.logprobs[slot].append((chosen, float(scores[i, 0]), rank))

    def generate(self, drafts: Drafts | None, rng: random.Random | None = None) -> list[list[int]]:
        """Return every request's tokens; with `rng`, a random part of the requests per step."""
        end = len(PROMPT) + LENGTH
        while open_ := [s for s in self.slots() if len(self.texts[s]) < end]:
            chosen = open_ if rng is None else rng.sample(open_, rng.randint(1, len(open_)))
            self.step(chosen, drafts)
        return [self.texts[s][len(PROMPT) : end] for s in self.slots()]


def oracle(texts: Sequence[list[int]], slots: Sequence[int], seed: int, share: float) -> Drafts:
    """Return drafts that are right with a probability, and sometimes none."""
    rng = random.Random(seed)
    known = dict(zip(slots, texts, strict=True))

    def drafts(slot: int, text: list[int]) -> list[int]:
        place = len(text) - len(PROMPT)
        right = [*known[slot][place:], *[0] * MAX_DRAFTS]
        return [
            right[i] if rng.random() < share else rng.randrange(VOCAB)
            for i in range(rng.randint(0, MAX_DRAFTS))
        ]

    return drafts
