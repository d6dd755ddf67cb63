"""The recorder puts the hidden states of engine steps together to samples."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from speed import limit
from tlt.states import captured as captured_module
from tlt.states.captured import Captured
from tlt.vllm.args import BEGUN
from tlt.vllm.recorder import StateRecorder
from tlt.vllm.v1.runner import RunnerV1
from tlt.vllm.v2.runner import RunnerV2

H = 2
BLOCK = 4
PROMPT = [5, 6, 7, 8, 9, 10]
WAIT_S = limit(10.0)


def state(tokens: list[int], position: int) -> float:
    """Return a state that depends on all tokens up to its position, like a model's.

    It is a number that bfloat16 has, and so are the next three.
    """
    total = sum((place + 1) * token for place, token in enumerate(tokens[: position + 1]))
    return float(total % 251)


@pytest.fixture(params=["v1", "v2"])
def engine(request: Any) -> Engine:
    return Engine(request.param)


class Engine:
    """A fake engine: vLLM's batch, and the states that a forward pass would compute."""

    def __init__(self, runner: str = "v1", num_tokens: int = 100, max_waiting: int = 100) -> None:
        self.recorder = StateRecorder(BLOCK, num_tokens, 8, 64, max_waiting)
        kind: Any = RunnerV1 if runner == "v1" else RunnerV2
        self.runner = kind.__new__(kind)
        self.known: set[str] = set()

    def step(
        self,
        reads: dict[str, tuple[int, list[int]]],
        prompts: dict[str, list[int]] | None = None,
        num_begun: int = 0,
    ) -> None:
        """Run one step; each request reads its tokens from a position to the end."""
        first_B = [first for first, _ in reads.values()]
        num_read = {name: len(tokens) - first for name, (first, tokens) in reads.items()}
        rows = [state(ts, p) for first, ts in reads.values() for p in range(first, len(ts))]
        padded = torch.tensor(rows + [-1.0] * 3)[:, None].repeat(1, H)  # vLLM adds rows
        states = [padded, padded + 1, padded + 2, padded + 3]
        starts = [0, *accumulate(num_read.values())]
        positions = [p for first, ts in reads.values() for p in range(first, len(ts))]
        batch = SimpleNamespace(
            req_ids=list(reads),
            num_reqs=len(reads),
            num_computed_tokens_cpu=np.array([*first_B, -1]),
            query_start_loc_np=np.array([*starts, -1]),
            query_start_loc=torch.tensor([*starts, -1]),
            positions=torch.tensor([*positions, -1]),
        )
        self.runner.runner = SimpleNamespace(
            input_batch=batch,
            execute_model_state=SimpleNamespace(
                input_batch=batch, aux_hidden_states=states[:3], hidden_states=states[3]
            ),
        )
        new = [
            SimpleNamespace(
                req_id=name,
                prompt_token_ids=(prompts or {}).get(name, PROMPT),
                num_computed_tokens=first,
                sampling_params=SimpleNamespace(extra_args={BEGUN: num_begun}),
            )
            for name, first in zip(reads, first_B, strict=True)
            if name not in self.known
        ]
        self.known |= reads.keys()
        scheduled = SimpleNamespace(scheduled_new_reqs=new, num_scheduled_tokens=num_read)
        self.runner.record(self.recorder, scheduled)
        for tensor in states:
            tensor.fill_(77)  # vLLM reuses its tensors
        batch.num_computed_tokens_cpu[:] = 77
        batch.positions[:] = 77

    def take(
        self, name: str, tokens: list[int], window: Callable[[int, int], tuple[int, int]]
    ) -> Captured | None:
        """Take a sample, and wait for it."""
        self.known.discard(name)
        found: queue.Queue[Captured | None] = queue.Queue()
        self.recorder.take(name, tokens, window, found.put)
        return found.get(timeout=WAIT_S)

    def lost(self, name: str, tokens: list[int]) -> bool:
        return self.take(name, tokens, whole) is None

    def check(self, name: str, tokens: list[int], first: int = 0) -> None:
        """Take a sample, and compare its states."""
        captured = self.take(name, tokens, whole)
        assert captured is not None
        assert captured.first_position == first
        assert captured.token_ids_T.tolist() == tokens[first:]
        in_response = [position >= len(PROMPT) for position in range(first, len(tokens))]
        assert captured.loss_mask_T.tolist() == in_response
        expected = torch.tensor([state(tokens, p) for p in range(first, len(tokens) - 1)])
        for layer in range(3):
            assert torch.equal(captured.aux_TA[:-1, layer * H].float(), expected + layer)
        assert torch.equal(captured.final_TH[:-1, 0].float(), expected + 3)
        assert len(captured.aux_TA) == len(captured.final_TH) == len(tokens) - first
        assert captured.aux_TA.dtype == captured.final_TH.dtype == torch.bfloat16


def whole(num_tokens: int, first_learned: int) -> tuple[int, int]:
    return 0, num_tokens


def test_a_sample_read_step_by_step_with_rejected_drafts(engine: Engine) -> None:
    engine.step({"a": (0, PROMPT)})
    engine.step({"a": (6, [*PROMPT, 1, 99, 98])})  # both drafts are rejected
    engine.step({"a": (7, [*PROMPT, 1, 2, 97])})  # one is
    engine.step({"a": (8, [*PROMPT, 1, 2, 3, 4, 96])})
    engine.check("a", [*PROMPT, 1, 2, 3, 4])
    assert engine.lost("a", PROMPT)


def test_only_the_window_that_is_stored_is_put_together(engine: Engine) -> None:
    tokens = [*PROMPT, 1, 2, 3, 4]
    engine.step({"a": (0, tokens)})
    asked = []

    def window(*given: int) -> tuple[int, int]:
        asked.append(given)
        return 5, 9

    captured = engine.take("a", tokens, window)
    assert captured is not None
    assert asked == [(10, 6)]
    assert captured.first_position == 5
    assert captured.token_ids_T.tolist() == tokens[5:9]
    assert captured.loss_mask_T.tolist() == [False, True, True, True]
    assert captured.final_TH[:, 0].tolist() == [state(tokens, p) + 3 for p in range(5, 9)]


def test_later_requests_get_the_prompts_states_of_one_that_was_dropped(engine: Engine) -> None:
    engine.step({"a": (0, PROMPT)})
    engine.step({"a": (6, [*PROMPT, 1])})
    engine.recorder.drop(["a", "never there"])
    assert engine.lost("a", [*PROMPT, 1, 2])
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
    assert engine.lost("a", [*PROMPT, 1, 2, 3])


def test_nothing_is_left_after_a_new_policy(engine: Engine) -> None:
    engine.step({"a": (0, PROMPT)})
    engine.recorder.clear()
    engine.step({"b": (4, PROMPT)})
    assert engine.lost("a", [*PROMPT, 1])
    engine.check("b", [*PROMPT, 1], first=4)


# --- the budget ---------------------------------------------------------------------------------


def test_ended_and_rejected_tokens_take_no_room_but_for_prompts() -> None:
    """A pool for 12 tokens sees 10 samples of 9 and their rejected drafts."""
    engine = Engine(num_tokens=12)
    for _ in range(10):
        for length in (6, 7, 8):
            first = 0 if length == 6 else length - 1
            engine.step({"a": (first, [*PROMPT, 1, 2, 99, 98][: length + 2])})
        engine.check("a", [*PROMPT, 1, 2, 3])


def test_beyond_the_budget_old_prompts_go_then_the_shortest_sample() -> None:
    engine = Engine(num_tokens=16)
    engine.step({"old": (0, PROMPT)})
    engine.recorder.drop(["old"])
    engine.step({"long": (0, [*PROMPT, 1, 2, 3])})
    engine.step({"cached": (4, PROMPT)})  # the pool has one slot left
    engine.step({"short": (0, PROMPT[:3])}, {"short": PROMPT[:3]})
    engine.step({"long": (9, [*PROMPT, 1, 2, 3, 4, 5])})
    assert not engine.lost("short", PROMPT[:4])
    engine.step({"young": (0, [1, 1, 1, 1])}, {"young": [1, 1, 1, 1]})
    engine.step({"long": (11, [*PROMPT, 1, 2, 3, 4, 5, 6, 7])})
    assert engine.lost("young", [1, 1, 1, 1, 2])
    engine.check("cached", [*PROMPT, 4], first=4)
    engine.check("long", [*PROMPT, *range(1, 9)])
    engine.step({"b": (0, PROMPT)})
    engine.check("b", [*PROMPT, 3])


def test_a_begun_response_is_learned_and_is_nobodys_prompt(engine: Engine) -> None:
    text = [*PROMPT, 1, 2, 3]
    engine.step({"a": (0, text)}, {"a": text}, num_begun=3)
    captured = engine.take("a", [*text, 4], whole)
    assert captured is not None
    assert int(captured.loss_mask_T.sum()) == 4
    engine.step({"b": (8, text)}, {"b": text})
    captured = engine.take("b", [*text, 4], whole)
    assert captured is not None
    assert captured.first_position == 8, "the second block is no prompt's"


def test_a_lost_request_that_goes_on_in_its_response_stays_lost(engine: Engine) -> None:
    """It must not get the states of another response to the same prompt."""
    prompt = PROMPT[:4]
    engine.step({"a": (0, [*prompt, 1, 2, 3])}, {"a": prompt})
    engine.step({"b": (6, [*prompt, 7, 8, 9])}, {"b": prompt})
    assert engine.lost("b", [*prompt, 7, 8, 9, 10])
    assert not engine.lost("a", [*prompt, 1, 2, 3, 4])


def test_a_sample_larger_than_the_budget_is_lost_and_the_next_one_is_not() -> None:
    engine = Engine(num_tokens=5)
    engine.step({"a": (0, PROMPT)})
    assert engine.lost("a", [*PROMPT, 1])
    engine.step({"b": (0, PROMPT[:4])}, {"b": PROMPT[:4]})
    assert not engine.lost("b", PROMPT[:5])


def test_engine_steps_wait_for_nothing_and_what_finds_no_room_is_lost() -> None:
    """A step that is lost may have been the one that corrected a rejected draft."""
    engine = Engine(max_waiting=9)
    go = threading.Event()

    def wait(captured: Captured | None) -> None:
        go.wait(WAIT_S)

    engine.recorder.take("busy", [1], whole, wait)
    engine.step({"a": (0, [*PROMPT, 99])})
    engine.step({"a": (6, [*PROMPT, 1, 2, 3])})
    engine.step({"b": (0, [1])}, {"b": [1]})
    go.set()
    assert engine.lost("a", [*PROMPT, 1, 2, 3, 4])
    assert not engine.lost("b", [1, 1])
    engine.step({"c": (0, PROMPT)})
    engine.check("c", [*PROMPT, 1])


def test_a_fault_ends_the_recording_and_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.step({"a": (0, PROMPT)})
    engine.recorder.begin("b", ["no token"], 0)  # type: ignore[list-item]
    assert engine.lost("a", [*PROMPT, 1])
    assert not engine.recorder.works
    assert "no longer records" in caplog.text
    engine.step({"c": (0, PROMPT)})
    assert engine.lost("c", [*PROMPT, 1])


# --- the copy from a device ---------------------------------------------------------------------


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for CUDA streams and events, and return the calls in their order."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append(f"{name}, {threading.current_thread().name}")

    stream = SimpleNamespace(wait_stream=noting("wait for the engine"))
    event = SimpleNamespace(record=noting("note the end"), synchronize=noting("wait"))
    monkeypatch.setattr(captured_module, "_copy_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    monkeypatch.setattr(torch.Tensor, "record_stream", noting("copy"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    return calls


def test_copies_wait_for_the_engine_and_the_engine_for_no_copy(streams: list[str]) -> None:
    engine = Engine("v2")
    engine.step({"a": (0, PROMPT)})
    engine.step({"a": (6, [*PROMPT, 1])})
    engine.check("a", [*PROMPT, 1, 2])
    own = [call.split(",")[0] for call in streams if "MainThread" in call]
    assert own == ["wait for the engine", "copy", "copy", "note the end"] * 2
    assert [call for call in streams if "MainThread" not in call] == ["wait, tlt-recorder"] * 2
