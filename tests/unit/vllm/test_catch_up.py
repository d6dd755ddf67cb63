"""Skipped inputs are kept per request, within a budget, and handed out once."""

import random

import numpy as np
import pytest
import torch

from tlt.vllm.catch_up import Missed, MissedInputs, sequences

WIDTH = 4
ROW_BYTES = 8 + 4 + WIDTH * 4


def add(missed: MissedInputs, rows: dict[str, list[int]]) -> bool:
    """Add one engine step, given each request's positions. A row encodes owner and position."""
    positions = torch.tensor([p for row in rows.values() for p in row])
    names = torch.tensor([ord(name) for name, row in rows.items() for _ in row])
    states = (names * 1000 + positions).float()[:, None].repeat(1, WIDTH)
    return missed.add(
        list(rows), [len(row) for row in rows.values()], positions, names.int(), states
    )


def taken(missed: MissedInputs, names: list[str], max_rows: int = 1000) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for batch in missed.take(names, max_rows):
        assert len(batch) <= max_rows
        assert (np.diff(batch.owner_T) >= 0).all(), "sorted by request"
        for owner, position, token, state in zip(
            batch.owner_T, batch.position_T, batch.token_T, batch.state_TA, strict=True
        ):
            name = names[owner]
            assert int(token) == ord(name)
            assert state.tolist() == [ord(name) * 1000 + int(position)] * WIDTH
            rows.setdefault(name, []).append(int(position))
    return rows


def test_budget() -> None:
    missed = MissedInputs(4 * ROW_BYTES)
    assert add(missed, {"a": [1], "b": [1, 2]})
    assert not add(missed, {"a": [2], "b": [3]})
    assert add(missed, {"a": [2]})
    assert taken(missed, ["a"]) == {"a": [1, 2]}
    assert add(missed, {"a": [3, 4]}), "what was taken no longer counts"
    assert not add(missed, {"a": [5]})
    missed.forget(["a", "b"])
    assert add(missed, {"c": [1, 2, 3, 4]}), "nobody is left: all is free"
    missed.clear()
    assert taken(missed, ["c"]) == {}


@pytest.mark.parametrize("seed", range(10))
def test_batches_lose_and_repeat_nothing(seed: int) -> None:
    rng = random.Random(seed)
    missed = MissedInputs(10**6)
    expected: dict[str, list[int]] = {}
    for _ in range(60):
        names = rng.sample("abcdef", rng.randint(1, 6))
        action = rng.random()
        if action < 0.75:
            rows = {name: [rng.randrange(900) for _ in range(rng.randint(1, 3))] for name in names}
            assert add(missed, rows)
            for name, positions in rows.items():
                expected.setdefault(name, []).extend(positions)
        elif action < 0.85:
            missed.forget(names)
            for name in names:
                expected.pop(name, None)
        else:
            wanted = {name: expected.pop(name) for name in names if name in expected}
            assert taken(missed, names, max_rows=18) == wanted
    assert taken(missed, list("abcdef"), max_rows=18) == expected


def test_rows_pose_as_short_sequences() -> None:
    owner_T = np.array([0, 0, 0, 0, 0, 2, 3, 3])
    row_T = torch.arange(8)
    missed = Missed(owner_T, row_T, row_T + 100, row_T[:, None].float())
    parts = list(sequences(missed, max_rows=2, max_sequences=3))
    assert [part.position_T.tolist() for part, _, _ in parts] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert [owner_S.tolist() for _, owner_S, _ in parts] == [[0, 0, 0], [2, 3]]
    assert [start_S.tolist() for _, _, start_S in parts] == [[0, 2, 4, 5], [0, 1, 3]]
    assert [part.token_T.tolist() for part, _, _ in parts] == [
        [100, 101, 102, 103, 104],
        [105, 106, 107],
    ]
    (whole,) = sequences(missed, max_rows=32, max_sequences=4)
    assert whole[2].tolist() == [0, 5, 6, 8]
