"""The self-test of sampling leaves the random numbers of its process alone."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def fill_noise(generator: Any) -> Any:
    return torch.rand(4, generator=generator)


@pytest.mark.parametrize("index", [None, 1])
def test_a_device_gets_its_random_state_back(
    monkeypatch: pytest.MonkeyPatch, index: int | None
) -> None:
    """Engines whose self-tests left the same state behind would draw from the same noise."""
    from tlt.vllm.v1 import selftest

    own = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    module = SimpleNamespace(current_device=lambda: 1, default_generators=own)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    host = torch.random.get_rng_state()
    expected = fill_noise(torch.Generator().manual_seed(6))
    with selftest._seeded(torch.device("cuda", index)):
        assert torch.equal(fill_noise(own[1]), fill_noise(torch.Generator().manual_seed(0)))
    assert torch.equal(fill_noise(own[1]), expected)
    assert torch.equal(torch.random.get_rng_state(), host)


def test_the_processor_gets_its_random_state_back() -> None:
    from tlt.vllm.v1 import selftest

    torch.manual_seed(3)
    host = torch.random.get_rng_state()
    with selftest._seeded(torch.device("cpu")):
        torch.rand(4)
    assert torch.equal(torch.random.get_rng_state(), host)
