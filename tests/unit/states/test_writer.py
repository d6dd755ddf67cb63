"""The threads that store captured samples: what waits, and what is dropped."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from model_folders import SHAPES
from speed import limit
from tlt.learner.batch import WAITING_ROWS
from tlt.states import buffer as buffer_module
from tlt.states import writer
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import Captured

H = 8
WAIT_S = limit(10.0)


def sample(num_tokens: int) -> Captured:
    states = torch.zeros(num_tokens, 4 * H)
    return Captured.of([1, 2], list(range(num_tokens - 2)), states[:, : 3 * H], states[:, 3 * H :])


def new_writer(folder: Path, max_sample_tokens: int = 512) -> writer.StateWriter:
    return writer.StateWriter(SampleBuffer(BufferSettings(str(folder), 2**20, max_sample_tokens)))


def test_only_the_window_of_a_long_sample_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "WAITING_BYTES", sample(40).num_bytes)
    stores = new_writer(tmp_path, max_sample_tokens=32)
    stores.write("long", 0, sample(400))
    stores.drain()
    assert (stores.num_written, stores.num_dropped) == (1, 0)
    (entry,) = stores.buffer.entries()
    assert entry.num_tokens == 32
    monkeypatch.setattr(writer, "WAITING_BYTES", 0)
    stores.write("late", 0, sample(10))
    assert stores.num_dropped == 1
    assert "late" in caplog.text


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("waiting", [0, 1])
def test_a_copy_without_memory_costs_states_and_no_update(
    waiting: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Busy(512)
    stores = writer.StateWriter(held, WAITING_ROWS)  # type: ignore[arg-type]
    for _ in range(waiting * WAITING_ROWS):
        stores.write_row(0, *row([20, 30], shares=shares))

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "HostCopy", full)
        stores.write_row(0, *row([20, 30], shares=shares))
    assert stores.num_dropped == 2
    held.go.set()
    stores.drain()
    stores.write_row(0, *row([20, 30], shares=shares))
    stores.drain()
    assert (stores.num_written, stores.num_dropped) == (2 + 2 * waiting * WAITING_ROWS, 2)


class Busy:
    """A buffer whose threads store nothing until they may."""

    def __init__(self, max_sample_tokens: int) -> None:
        self.settings = BufferSettings("", 2**30, max_sample_tokens)
        self.go = threading.Event()
        self.stored: dict[str, Captured] = {}

    window = SampleBuffer.window
    capped = SampleBuffer.capped

    def put(self, sample_id: str, rl_step: int, sample: Captured) -> bool:
        self.go.wait(WAIT_S)
        self.stored[sample_id] = sample
        return True


def row(lengths: list[int], hidden: int = H, shares: bool = False) -> tuple[Any, ...]:
    """Return a row's texts, its index, and states that say which token they belong to."""
    prompts = [[1, 2]] * len(lengths)
    texts = [
        (str(place), prompt, list(range(length - 2)))
        for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    index: list[int] = []
    num_rows = 2 if shares else 0
    for length in lengths:
        first = 0 if shares else num_rows
        num_rows += 0 if shares else 2
        index += [first, first + 1, *range(num_rows, num_rows + length - 2)]
        num_rows += length - 2
    state_T = torch.arange(num_rows, dtype=torch.float32)[:, None]
    states = state_T.repeat(1, 3 * hidden), state_T.repeat(1, hidden)
    return texts, torch.tensor(index) if shares else None, *states


RECIPES = {
    "qwen2_5_7b": (18432, 8192),
    "qwen3_8b": (18432, 8192),
    "qwen2_5_32b": (18432, 8192),
    "qwen3_32b": (32768, 8192),
}


@pytest.mark.parametrize("num_tokens", [512, 2048, 4096, 16384])
@pytest.mark.parametrize("model", RECIPES)
def test_a_recipe_loses_no_row_while_the_one_before_is_being_stored(
    model: str, num_tokens: int
) -> None:
    row_tokens, cap = RECIPES[model]
    hidden = SHAPES[model]["hidden_size"]
    buffer: Any = Busy(cap)
    stores = writer.StateWriter(buffer, WAITING_ROWS)
    texts = [(str(n), [1] * 128, [2] * (num_tokens - 128)) for n in range(row_tokens // num_tokens)]
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    for rl_step in range(2):
        tokens = len(texts) * num_tokens
        aux, final = torch.empty(tokens, 3 * hidden, **meta), torch.empty(tokens, hidden, **meta)
        stores.write_row(rl_step, texts, None, aux, final)
    assert stores.num_dropped == 0
    buffer.go.set()
    stores.drain()
    assert stores.num_written == 2 * len(texts)


@pytest.mark.parametrize("shares", [False, True])
def test_samples_of_a_row_get_their_own_states(shares: bool) -> None:
    buffer: Any = Busy(64)
    buffer.go.set()
    stores = writer.StateWriter(buffer, WAITING_ROWS)
    texts, index, aux, final = row([5, 3, 9], shares=shares)
    stores.write_row(0, texts, index, aux, final)
    stores.drain()
    begin = 0
    for name, prompt, response in texts:
        found, length = buffer.stored[name], len(prompt) + len(response)
        places = torch.arange(len(aux)) if index is None else index
        assert found.token_ids_T.tolist() == [*prompt, *response]
        assert found.loss_mask_T.tolist() == [False, False] + [True] * len(response)
        assert torch.equal(found.aux_TA, aux[places[begin : begin + length]])
        assert torch.equal(found.final_TH, final[places[begin : begin + length]])
        begin += length


@pytest.mark.parametrize("shares", [False, True])
def test_what_does_not_fit_waits_as_windows_and_the_longest_samples_come_first(
    shares: bool,
) -> None:
    cap = 6
    buffer: Any = Busy(cap)
    stores = writer.StateWriter(buffer, 1)
    texts, index, aux, final = row([12, 5, 20, 4], shares=shares)
    ([(_, *text)], *rest) = row([len(aux) - 13])  # leaves room for 13 tokens
    stores.write_row(0, [("first", *text)], *rest)
    stores.write_row(1, texts, index, aux, final)
    assert stores.num_dropped == 2
    buffer.go.set()
    stores.drain()
    places = torch.arange(len(aux)) if index is None else index
    for name, begin in (("2", 17), ("0", 0)):
        found = buffer.stored[name]
        at = begin + found.first_position
        assert len(found) == cap
        assert torch.equal(found.aux_TA, aux[places[at : at + cap]])


def test_several_samples_are_written_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every writer waits within its write until all of them are there."""
    meeting = threading.Barrier(writer.NUM_THREADS)
    write = buffer_module._write

    def waiting(*args: Any) -> None:
        meeting.wait(WAIT_S)
        write(*args)

    monkeypatch.setattr(buffer_module, "_write", waiting)
    stores = new_writer(tmp_path)
    for index in range(2 * writer.NUM_THREADS):
        stores.write(str(index), 0, sample(20 + index))
    stores.drain()
    assert stores.stored() == writer.Stored(
        2 * writer.NUM_THREADS, 0, sum(path.stat().st_size for path in tmp_path.iterdir())
    )
    assert {e.num_tokens for e in stores.buffer.entries()} == {*range(20, 28)}
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == [".lock"]


def test_a_failed_write_leaves_nothing_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(buffer_module, "_write", fail)
    stores = new_writer(tmp_path)
    stores.write("a", 0, sample(20))
    stores.drain()
    stores.missing("b")
    assert stores.stored() == writer.Stored(0, 2, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_writers_at_work_keep_their_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written counts, and another writer neither removes nor exceeds it."""
    one = sample(100)
    capacity = int(2.5 * (one.num_bytes / 2 + buffer_module.HEADER_BYTES))  # in bfloat16
    store = SampleBuffer(BufferSettings(str(tmp_path), capacity, 512))
    write = buffer_module._write
    others = {"second": False, "third": True}
    waiting = list(others)

    def writing(*args: Any) -> None:
        if waiting:  # a write within a write
            name = waiting.pop(0)
            others[name] = store.put(name, 0, one)
        assert store.num_bytes() <= capacity
        write(*args)

    monkeypatch.setattr(buffer_module, "_write", writing)
    assert store.put("first", 0, one)
    assert others == {"second": True, "third": False}, "there is no room for three"
    assert len(store.entries()) == 2
