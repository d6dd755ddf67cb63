"""The calculated hardware: weight sync and update of H100s."""

import pytest

from tlt.timing.profiles import (
    NETWORK,
    sync_s,
    training_speed,
    update_fixed_s,
    update_s,
)

SEVEN_B = 7.6e9


def test_transports_have_their_own_bottleneck() -> None:
    """From GPU to GPU a node gets the policy once; through the host one card sends it to all."""
    one = {way: sync_s(SEVEN_B, way, 1, 8) for way in ("ipc", "nccl", "shared_memory")}
    assert one["ipc"] < 0.1 < one["nccl"] < one["shared_memory"] < 5
    card_s = 2 * SEVEN_B / NETWORK
    for way in ("ipc", "nccl"):
        assert sync_s(SEVEN_B, way, 128, 8) - one[way] < card_s
    hosts = [sync_s(SEVEN_B, "shared_memory", nodes, 8) for nodes in (1, 128)]
    assert 127 * card_s < hosts[1] - hosts[0] < 128 * card_s
    assert sync_s(2 * SEVEN_B, "ipc", 4, 8) == pytest.approx(2 * sync_s(SEVEN_B, "ipc", 4, 8))


def test_an_update_has_a_part_that_its_tokens_do_not_change() -> None:
    fixed_s = update_fixed_s("qwen2.5-7b", 8)
    assert 0.1 < fixed_s < 1
    tokens = 1_000_000
    in_tokens_s = tokens / training_speed("qwen2.5-7b", 8)
    assert update_s("qwen2.5-7b", 8, tokens) == pytest.approx(fixed_s + in_tokens_s)
    assert update_s("qwen2.5-7b", 8, 0) == fixed_s
    assert update_fixed_s("qwen2.5-7b", 1) < 0.2, "one GPU has nothing to gather"
    assert update_fixed_s("qwen2.5-7b", 16) > fixed_s, "the network is slower than NVLink"
