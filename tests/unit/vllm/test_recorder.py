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


def state(tokens: list[int], position: int) -> float:
    """Return a state that depends on all tokens up to its position, like a model's."""
    return float(sum((place + 1) * token for place, token in enumerate(tokens[: position + 1])))


class Streams:
    """Stands in for CUDA streams and events, and notes the order of the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []

        def noting(name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: self.calls.append(name)

        stream = SimpleNamespace(wait_stream=noting("wait for the engine"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        event = SimpleNamespace(
            record=noting("note the end"), synchronize=noting("wait"), query=lambda: False
        )
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.Tensor, "record_stream", noting("copy"))


@pytest.fixture(params=["v1", "v2"])
def engine(request: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(request.param, Streams(monkeypatch))


class Engine:
    """A fake engine: vLLM's batch, and the states that a forward pass would compute."""

    def __init__(self, runner: str, streams: Streams) -> None:
        self.recorder = StateRecorder(BLOCK)
        self.runner = runner
        self.streams = streams
        self.prompts: dict[str, list[int]] = {}

    def step(self, reads: dict[str, tuple[int, list[int]]]) -> None:
        """Run one step; each request reads its tokens from a position to the end."""
        if self.runner == "v1":
            self._step_v1(reads)
        else:
            self._step_v2(reads)

    def _step_v2(self, reads: dict[str, tuple[int, list[int]]]) -> None:
        for name, (first, _) in reads.items():
            self.recorder.begin(name, np.array(self.prompts[name], dtype=np.int32), first)
        starts = [0, *accumulate(len(tokens) - first for first, tokens in reads.values())]
        first_B = torch.tensor([first for first, _ in reads.values()])
        padded = self._states(reads)
        states = [padded, padded + 1, padded + 2, padded + 3]
        self.recorder.add(list(reads), starts, first_B, states)
        for tensor in states:
            tensor.fill_(77)  # vLLM reuses its tensors

    def _states(self, reads: dict[str, tuple[int, list[int]]]) -> torch.Tensor:
        rows = [state(ts, p) for first, ts in reads.values() for p in range(first, len(ts))]
        states = torch.tensor(rows)[:, None].expand(-1, H)
        return torch.cat([states, torch.full((3, H), -1.0)])  # rows that vLLM adds

    def _step_v1(self, reads: dict[str, tuple[int, list[int]]]) -> None:
        batch: Any = SimpleNamespace(
            req_ids=list(reads),
            num_computed_tokens_cpu=np.array([first for first, _ in reads.values()]),
            num_prompt_tokens=np.array([len(self.prompts[name]) for name in reads]),
            token_ids_cpu=np.zeros((len(reads), 64), dtype=np.int32),
        )
        for row, name in enumerate(reads):
            batch.token_ids_cpu[row, : len(self.prompts[name])] = self.prompts[name]
        num_read = {name: len(tokens) - first for name, (first, tokens) in reads.items()}
        padded = self._states(reads)
        self.recorder.record(batch, num_read, [padded, padded + 1, padded + 2], padded + 3)


def check(captured: Any, tokens: list[int], first: int = 0, num_prompt: int = 6) -> None:
    assert captured.first_position == first
    assert captured.token_ids_T.tolist() == tokens[first:]
    assert captured.loss_mask_T.tolist() == [p >= num_prompt for p in range(first, len(tokens))]
    expected = torch.tensor([state(tokens, p) for p in range(first, len(tokens) - 1)])
    for layer in range(3):
        assert torch.equal(captured.aux_TA[:-1, layer * H], expected + layer)
    assert torch.equal(captured.final_TH[:-1, 0], expected + 3)
    assert len(captured.aux_TA) == len(captured.final_TH) == len(tokens) - first


def test_a_sample_read_step_by_step_with_rejected_drafts(engine: Engine) -> None:
    prompt = engine.prompts["a"] = [5, 6, 7, 8, 9, 10]
    engine.step({"a": (0, prompt)})
    engine.step({"a": (6, [*prompt, 1, 99, 98])})  # both drafts are rejected
    engine.step({"a": (7, [*prompt, 1, 2, 97])})  # one is
    engine.step({"a": (8, [*prompt, 1, 2, 3, 4, 96])})
    check(engine.recorder.take("a", [*prompt, 1, 2, 3, 4]), [*prompt, 1, 2, 3, 4])
    assert engine.recorder.take("a", prompt) is None


def test_later_requests_get_the_prompts_states_of_one_that_was_dropped(engine: Engine) -> None:
    prompt = engine.prompts["a"] = engine.prompts["b"] = [5, 6, 7, 8, 9, 10]
    engine.step({"a": (0, prompt)})
    engine.step({"a": (6, [*prompt, 1])})
    engine.recorder.drop("a")
    engine.recorder.drop("never there")
    assert engine.recorder.take("a", [*prompt, 1, 2]) is None
    engine.step({"b": (BLOCK, prompt)})
    check(engine.recorder.take("b", [*prompt, 3]), [*prompt, 3])


def test_what_the_prefix_cache_had_comes_from_who_read_it(engine: Engine) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    other = [5, 6, 7, 8, 11, 12]
    engine.prompts |= {"a": prompt, "b": prompt, "c": other}
    # In one step, in any order; `c` shares a block with another prompt.
    engine.step({"b": (4, prompt), "c": (4, other), "a": (0, prompt)})
    engine.step({"a": (6, [*prompt, 1]), "b": (6, [*prompt, 2]), "c": (6, [*other, 3])})
    check(engine.recorder.take("a", [*prompt, 1, 1]), [*prompt, 1, 1])
    check(engine.recorder.take("b", [*prompt, 2, 2]), [*prompt, 2, 2])
    check(engine.recorder.take("c", [*other, 3, 3]), [*other, 3, 3])


def test_a_prefix_nobody_is_known_to_have_read_is_left_out(engine: Engine) -> None:
    prompt = engine.prompts["a"] = [5, 6, 7, 8, 9, 10]
    engine.step({"a": (4, prompt)})
    engine.step({"a": (6, [*prompt, 1])})
    check(engine.recorder.take("a", [*prompt, 1, 2]), [*prompt, 1, 2], first=4)


def test_a_preempted_request_may_read_such_a_prefix_itself(engine: Engine) -> None:
    prompt = engine.prompts["a"] = [5, 6, 7, 8, 9, 10]
    engine.step({"a": (4, prompt)})
    engine.step({"a": (0, [*prompt, 1])})
    engine.step({"a": (7, [*prompt, 1, 2])})
    check(engine.recorder.take("a", [*prompt, 1, 2, 3]), [*prompt, 1, 2, 3], first=4)


def test_a_gap_gives_no_sample(engine: Engine) -> None:
    prompt = engine.prompts["a"] = [5, 6, 7, 8, 9, 10]
    engine.step({"a": (0, prompt)})
    engine.step({"a": (7, [*prompt, 1, 2])})
    assert engine.recorder.take("a", [*prompt, 1, 2, 3]) is None


def test_nothing_is_left_after_a_new_policy(engine: Engine) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    engine.prompts |= {"a": prompt, "b": prompt}
    engine.step({"a": (0, prompt)})
    engine.recorder.clear()
    engine.step({"b": (4, prompt)})
    assert engine.recorder.take("a", [*prompt, 1]) is None
    check(engine.recorder.take("b", [*prompt, 1]), [*prompt, 1], first=4)


@pytest.mark.parametrize("engine", ["v2"], indirect=True)
def test_copies_wait_for_the_engine_and_the_engine_for_no_copy(engine: Engine) -> None:
    prompt = engine.prompts["a"] = [5, 6, 7, 8, 9, 10]
    engine.step({"a": (0, prompt)})
    assert engine.streams.calls == ["wait for the engine", "copy", "copy", "note the end"]
    engine.step({"a": (6, [*prompt, 1])})
    assert "wait" not in engine.streams.calls
    check(engine.recorder.take("a", [*prompt, 1, 2]), [*prompt, 1, 2])
    assert "wait" in engine.streams.calls
