"""The self-test of sampling leaves the random numbers of its process alone."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1"])
def test_a_device_gets_its_random_state_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Engines whose self-tests left the same state behind would draw from the same noise."""
    from tlt.vllm.v1 import selftest

    own = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    module = SimpleNamespace(current_device=lambda: 1, default_generators=own)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    generator = torch.default_generator if name == "cpu" else own[1]
    before, host = generator.get_state(), torch.random.get_rng_state()
    with selftest._seeded(torch.device(name)):
        assert generator.initial_seed() == 0
        torch.rand(4, generator=generator)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.random.get_rng_state(), host)
