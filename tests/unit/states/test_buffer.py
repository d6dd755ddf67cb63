"""The node's sample buffer: its bounds, what it evicts, and crashes of writers and readers."""

import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from drafter_fixtures import captured

from tlt.errors import ConfigError
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import Captured

KILLS = 60


def buffer(
    folder: Path,
    capacity_bytes: int = 2**30,
    max_sample_tokens: int = 4096,
    held_out_share: float = 1 / 8,
) -> SampleBuffer:
    return SampleBuffer(
        BufferSettings(str(folder), capacity_bytes, max_sample_tokens, held_out_share)
    )


def read(store: SampleBuffer, name: str) -> Captured:
    sample = store.read(name)
    assert sample is not None
    return sample


def test_other_processes_read_what_one_writes_and_mappings_outlive_eviction(tmp_path: Path) -> None:
    store, other = buffer(tmp_path, held_out_share=0.0), buffer(tmp_path, held_out_share=0.0)
    sample = captured(12, num_prompt=5)
    assert store.put("a", 0, sample)
    (name,) = other.offers()
    mapped = read(other, name)
    store.clear()
    assert other.read(name) is None
    assert torch.equal(mapped.token_ids_T, sample.token_ids_T)
    assert torch.equal(mapped.loss_mask_T, sample.loss_mask_T)
    assert torch.equal(mapped.aux_TA, sample.aux_TA.bfloat16())
    assert torch.equal(mapped.final_TH, sample.final_TH.bfloat16())


def test_reading_copies_no_states(tmp_path: Path) -> None:
    """Two mappings of one file share memory; private copies would grow with every read."""
    store = buffer(tmp_path, held_out_share=0.0)
    store.put("a", 0, captured(20_000, num_prompt=5))
    (name,) = store.offers()
    store.read(name)
    before = anonymous_bytes()
    kept = [read(store, name) for _ in range(50)]
    assert anonymous_bytes() - before < sum(sample.num_bytes for sample in kept) / 4


def anonymous_bytes() -> int:
    (found,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found) * 1024


def test_never_more_than_its_capacity(tmp_path: Path) -> None:
    store = buffer(tmp_path, capacity_bytes=200_000)
    rng = random.Random(0)
    for index in range(200):
        store.put(str(index), index // 50, captured(rng.randint(5, 200), 2, seed=index))
        assert store.num_bytes() <= 200_000
    assert store.num_bytes() > 100_000
    entries = store.entries()
    assert {entry.name for entry in entries if not entry.held_out} >= store.offers().keys()
    assert 0 < sum(entry.held_out for entry in entries) < len(entries) / 2
    assert not store.put("huge", 0, captured(5_000, 2))
    assert store.entries() == entries


def test_long_samples_of_the_step_before_stay_beside_short_ones_of_this_step(
    tmp_path: Path,
) -> None:
    store = buffer(tmp_path, capacity_bytes=400_000)
    for index in range(20):
        store.put(f"{index}", 0, captured(200 if index % 5 == 0 else 20, 2, seed=index))
    for index in range(60):
        store.put(f"{index}", 1, captured(20, 2, seed=index))
    kept = store.entries()
    assert sum(e.rl_step == 0 and e.num_tokens == 200 for e in kept) == 4
    assert all(e.rl_step == 1 for e in kept if e.num_tokens == 20)


def test_very_long_samples_keep_a_window_at_its_true_positions(tmp_path: Path) -> None:
    store = buffer(tmp_path, max_sample_tokens=64, held_out_share=0.0)
    long = captured(500, num_prompt=10)
    for index in range(30):
        store.put(str(index), 0, long)
    begins = set()
    for name in store.offers():
        window = read(store, name)
        assert len(window) == 64
        begin = window.first_position
        assert torch.equal(window.token_ids_T, long.token_ids_T[begin : begin + 64])
        begins.add(begin)
    assert len(begins) > 10, "windows from all over the sample"


def test_held_out_samples_are_recent_and_keep_to_the_token_budget(tmp_path: Path) -> None:
    store = buffer(tmp_path, held_out_share=1.0)
    for index in range(20):
        store.put(str(index), index // 10, captured(100, 2, seed=index))
    held_out = store.held_out(max_tokens=250)
    assert [len(sample) for sample in held_out] == [100, 100, 56]
    recent = [captured(100, 2, seed=index).token_ids_T for index in range(10, 20)]
    assert all(any(torch.equal(s.token_ids_T, r[: len(s)]) for r in recent) for s in held_out)


def test_recent_and_long_samples_are_drawn_more_often(tmp_path: Path) -> None:
    store = buffer(tmp_path, held_out_share=0.0)
    for step, length in ((6, 22), (6, 42), (4, 42), (2, 42), (1, 42)):
        store.put(f"{length}", step, captured(length, 2))
    weights = {
        (int(name[:8]), offer.num_tokens): offer.weight for name, offer in store.offers().items()
    }
    assert weights == {(6, 22): 20, (6, 42): 40, (4, 42): 20, (2, 42): 10}


def test_states_of_a_policy_long_gone_evaluate_nobody(tmp_path: Path) -> None:
    """Only the head of the current policy is at hand, which gives them wrong targets."""
    store = buffer(tmp_path, held_out_share=1.0)
    for step in (1, 2, 6):
        store.put("a", step, captured(12 + step, 2))
    assert [len(sample) for sample in store.held_out(max_tokens=1000)] == [18, 14]


def test_a_long_prompt_leaves_room_for_the_response(tmp_path: Path) -> None:
    store = buffer(tmp_path, max_sample_tokens=64, held_out_share=0.0)
    for index in range(30):
        assert store.put(str(index), 0, captured(700, num_prompt=600))
    assert all(read(store, name).num_chains >= 30 for name in store.offers())


def test_too_small_a_capacity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes = 10"):
        buffer(tmp_path, capacity_bytes=10)


# --- kill -9 --------------------------------------------------------------------------------------


def marked(index: int, length: int) -> Captured:
    """Return a sample in which every value is its index, so that a reader can tell it is whole."""
    value = float(index % 128)
    return Captured(
        token_ids_T=torch.full((length,), index % 128),
        loss_mask_T=torch.ones(length, dtype=torch.bool),
        aux_TA=torch.full((length, 96), value),
        final_TH=torch.full((length, 32), value),
    )


def hidden_files(folder: Path) -> int:
    return sum(path.name[0] == "." and path.name != ".lock" for path in folder.iterdir())


def check_whole(store: SampleBuffer) -> int:
    entries = store.entries()
    for entry in entries:
        sample = store.read(entry.name)
        if sample is None:
            continue
        assert len(sample) == entry.num_tokens
        value = float(sample.token_ids_T[0])
        assert (sample.token_ids_T == value).all()
        assert (sample.aux_TA == value).all()
        assert (sample.final_TH == value).all()
    return len(entries)


def killed_after(work: Callable[[], object], seconds: float) -> None:
    """Fork a process that works, and kill it with SIGKILL so long after it began."""
    began, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # the parent's threads are not here
            os.write(begins, b"1")
            while True:
                work()
        finally:
            os._exit(1)
    os.close(begins)
    os.read(began, 1)
    os.close(began)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the process ended by itself instead of being killed"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killing_writers_and_readers_corrupts_nothing(tmp_path: Path) -> None:
    store = buffer(tmp_path, capacity_bytes=3_000_000)
    rng = random.Random(0)
    samples = [marked(index, rng.randint(50, 1000)) for index in range(64)]
    written = leftovers = 0
    for round_ in range(KILLS):
        counter = itertools.count()

        def write(counter: Iterator[int] = counter, round_: int = round_) -> None:
            index = next(counter)
            store.put(f"{round_}/{index}", round_ // 10, samples[index % 64])

        killed_after(write, rng.uniform(0.001, 0.02))
        leftovers += hidden_files(tmp_path)
        if round_ % 4 == 0:
            killed_after(lambda: check_whole(store), rng.uniform(0.001, 0.02))
        assert store.num_bytes() <= 3_000_000
        check_whole(store)
        written += any(entry.rl_step == round_ // 10 for entry in store.entries())
    assert written > KILLS / 4
    assert leftovers > 0, "no writer was killed in the middle of a sample"
    assert store.put("after", KILLS, samples[0]), "the buffer works on"
    assert hidden_files(tmp_path) == 0
    assert check_whole(store) > 5


# --- whose buffer it is ---------------------------------------------------------------------------


def test_links_inside_the_buffer_are_not_followed(tmp_path: Path) -> None:
    """And only its user can read what is in it."""
    precious = tmp_path / "precious"
    precious.write_text("keep")
    store = buffer(tmp_path / "samples", held_out_share=0.0)
    store.put("a", 0, captured(12, num_prompt=5))
    (name,) = store.offers()
    for path in (tmp_path / "samples", *(tmp_path / "samples").iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    store.copy_to(tmp_path / "saved", last_step=0)
    for planted in (f".{name}", f".{name}.0", name.replace("00000000-", "00000001-")):
        (tmp_path / "samples" / planted).symlink_to(precious)
    assert list(store.offers()) == [name]
    store.put("b", 0, captured(12, num_prompt=5))
    store.restore_from(tmp_path / "saved")
    assert list(store.offers()) == [name]
    store.clear()
    assert precious.read_text() == "keep"
