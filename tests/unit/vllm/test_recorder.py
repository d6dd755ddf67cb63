"""The recorder puts the hidden states of engine steps together to samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from tlt.vllm.recorder import StateRecorder

H = 2
BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10]


def state(tokens: list[int], position: int) -> float:
    """Return a state that depends on all tokens up to its position, like a model's."""
    return float(sum((place + 1) * token for place, token in enumerate(tokens[: position + 1])))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for CUDA streams and events, and return the calls in their order."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append(name)

    stream = SimpleNamespace(wait_stream=noting("wait for the engine"))
    event = SimpleNamespace(
        record=noting("note the end"), synchronize=noting("wait"), query=lambda: False
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.Tensor, "record_stream", noting("copy"))
    return calls


@pytest.fixture(params=["v1", "v2"])
def engine(request: Any, streams: list[str]) -> Engine:
    return Engine(request.param)


class Engine:
    """A fake engine: vLLM's batch, and the states that a forward pass would compute."""

    def __init__(self, runner: str) -> None:
        self.recorder = StateRecorder(BLOCK)
        self.runner = runner

    def step(
        self, reads: dict[str, tuple[int, list[int]]], prompts: dict[str, list[int]] | None = None
    ) -> None:
        """Run one step; each request reads its tokens from a position to the end."""
        prompt_B = [np.array((prompts or {}).get(name, PROMPT), dtype=np.int32) for name in reads]
        first_B = [first for first, _ in reads.values()]
        num_read = {name: len(tokens) - first for name, (first, tokens) in reads.items()}
        rows = [state(ts, p) for first, ts in reads.values() for p in range(first, len(ts))]
        padded = torch.tensor(rows + [-1.0] * 3)[:, None].repeat(1, H)  # vLLM adds rows
        states = [padded, padded + 1, padded + 2, padded + 3]
        if self.runner == "v1":
            batch = SimpleNamespace(
                req_ids=list(reads),
                num_computed_tokens_cpu=np.array(first_B),
                num_prompt_tokens=np.array([len(prompt) for prompt in prompt_B]),
                token_ids_cpu=np.stack([np.pad(prompt, (0, 9)) for prompt in prompt_B]),
            )
            self.recorder.record(batch, num_read, states[:3], states[3])
        else:
            for name, prompt, first in zip(reads, prompt_B, first_B, strict=True):
                self.recorder.begin(name, prompt, first)
            starts = [0, *accumulate(num_read.values())]
            self.recorder.add(list(reads), starts, torch.tensor(first_B), states)
        for tensor in states:
            tensor.fill_(77)  # vLLM reuses its tensors

    def check(self, name: str, tokens: list[int], first: int = 0) -> None:
        """Take a sample, and compare its states."""
        captured = self.recorder.take(name, tokens)
        assert captured is not None
        assert captured.first_position == first
        assert captured.token_ids_T.tolist() == tokens[first:]
        in_response = [position >= len(PROMPT) for position in range(first, len(tokens))]
        assert captured.loss_mask_T.tolist() == in_response
        expected = torch.tensor([state(tokens, p) for p in range(first, len(tokens) - 1)])
        for layer in range(3):
            assert torch.equal(captured.aux_TA[:-1, layer * H], expected + layer)
        assert torch.equal(captured.final_TH[:-1, 0], expected + 3)
        assert len(captured.aux_TA) == len(captured.final_TH) == len(tokens) - first


def test_a_sample_read_step_by_step_with_rejected_drafts(engine: Engine) -> None:
    engine.step({"a": (0, PROMPT)})
    engine.step({"a": (6, [*PROMPT, 1, 99, 98])})  # both drafts are rejected
    engine.step({"a": (7, [*PROMPT, 1, 2, 97])})  # one is
    engine.step({"a": (8, [*PROMPT, 1, 2, 3, 4, 96])})
    engine.check("a", [*PROMPT, 1, 2, 3, 4])
    assert engine.recorder.take("a", PROMPT) is None


def test_later_requests_get_the_prompts_states_of_one_that_was_dropped(engine: Engine) -> None:
    engine.step({"a": (0, PROMPT)})
    engine.step({"a": (6, [*PROMPT, 1])})
    engine.recorder.drop("a")
    engine.recorder.drop("never there")
    assert engine.recorder.take("a", [*PROMPT, 1, 2]) is None
    engine.step({"b": (BLOCK, PROMPT)})
    engine.check("b", [*PROMPT, 3])


def test_what_the_prefix_cache_had_comes_from_who_read_it(engine: Engine) -> None:
    other = [5, 6, 7, 8, 11, 12]
    # In one step, in any order; `c` shares a block with another prompt.
    engine.step({"b": (4, PROMPT), "c": (4, other), "a": (0, PROMPT)}, {"c": other})
    engine.step({"a": (6, [*PROMPT, 1]), "b": (6, [*PROMPT, 2]), "c": (6, [*other, 3])})
    engine.check("a", [*PROMPT, 1, 1])
    engine.check("b", [*PROMPT, 2, 2])
    engine.check("c", [*other, 3, 3])


def test_a_prefix_nobody_is_known_to_have_read_is_left_out(engine: Engine) -> None:
    """A preempted request may read such a prefix itself."""
    engine.step({"a": (4, PROMPT)})
    engine.step({"a": (0, [*PROMPT, 1])})
    engine.step({"a": (7, [*PROMPT, 1, 2])})
    engine.check("a", [*PROMPT, 1, 2, 3], first=4)


def test_a_gap_gives_no_sample(engine: Engine) -> None:
    engine.step({"a": (0, PROMPT)})
    engine.step({"a": (7, [*PROMPT, 1, 2])})
    assert engine.recorder.take("a", [*PROMPT, 1, 2, 3]) is None


def test_nothing_is_left_after_a_new_policy(engine: Engine) -> None:
    engine.step({"a": (0, PROMPT)})
    engine.recorder.clear()
    engine.step({"b": (4, PROMPT)})
    assert engine.recorder.take("a", [*PROMPT, 1]) is None
    engine.check("b", [*PROMPT, 1], first=4)


def test_copies_wait_for_the_engine_and_the_engine_for_no_copy(streams: list[str]) -> None:
    engine = Engine("v2")
    engine.step({"a": (0, PROMPT)})
    assert streams == ["wait for the engine", "copy", "copy", "note the end"]
    engine.step({"a": (6, [*PROMPT, 1])})
    assert "wait" not in streams
    engine.check("a", [*PROMPT, 1, 2])
    assert "wait" in streams
