"""New weights reach a running engine, through vLLM's weight-transfer API and shared memory."""

import time
from pathlib import Path

import pytest
from engine_process import EngineProcess
from workloads import (
    EngineFactory,
    changed_policy,
    greedy,
    load_from_process,
    random_prompts,
)

from speed import limit
from tlt.contracts import SamplingSpec
from tlt.errors import ConfigError, EngineError
from tlt.node.weights import SharedWeights

pytestmark = pytest.mark.vllm

GREEDY = SamplingSpec(max_tokens=48, temperature=0, ignore_eos=True)
EAGLE = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4}


@pytest.fixture(scope="module")
def engine(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> EngineProcess:
    return engines(model=str(tiny), drafter=str(tiny_drafter), strategy=EAGLE)


@pytest.mark.gate
def test_policy_update_equals_transformers(engine: EngineProcess, tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    original = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    prompts = random_prompts(12, seed=3)
    before = [s.token_ids for s in engine.generate(prompts, GREEDY)]
    assert before == greedy(policy, prompts, 48)

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    with SharedWeights(policy.state_dict().items()) as weights:
        engine.call("update_policy", weights.manifest(), 1)
    updated = engine.generate(prompts, GREEDY)
    # Every layer, the embedding and the head are new, and no cached prefix is stale.
    assert [s.token_ids for s in updated] == greedy(policy, prompts, 48)
    assert [s.token_ids for s in updated] != before
    assert {s.policy_version for s in updated} == {1}

    with SharedWeights(original.items()) as weights:
        engine.call("update_policy", weights.manifest(), 2)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == before


@pytest.mark.gate
def test_policy_of_a_trainer_in_the_same_process(
    engine: EngineProcess, tiny: Path, tiny_drafter: Path
) -> None:
    """It is loaded whole, survives a drafter swap, and is refused in part."""
    import torch
    from safetensors.torch import load_file

    from tlt.drafter.checkpoint import drafter_weights, load_drafter

    prompts = random_prompts(8, seed=5)
    before = [s.token_ids for s in engine.generate(prompts, GREEDY)]
    report = engine.call(load_from_process, tiny, 1)
    assert report["differed"] == []
    expected = greedy(changed_policy(tiny, 1), prompts, 48)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == expected

    drafter = load_drafter(tiny_drafter)
    tensors = drafter_weights(drafter.state_dict(), drafter.config, torch.float32)
    with SharedWeights(tensors.items()) as weights:
        engine.call("update_drafter", weights.manifest(), 1)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == expected
    assert engine.stats().policy_mismatches == 0

    report = engine.call(load_from_process, tiny, 2, "model.norm.weight")
    assert "model.norm.weight" in report["still"]
    assert not engine.call(load_from_process, tiny, 2)["differed"]
    with SharedWeights(load_file(tiny / "model.safetensors").items()) as weights:
        engine.call("update_policy", weights.manifest(), 3)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == before


def test_policy_update_of_a_model_with_a_tied_head(engines: EngineFactory, smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    prompts = random_prompts(4, seed=4, vocab=(100, 40_000))
    sampling = SamplingSpec(max_tokens=24, temperature=0, ignore_eos=True)
    outputs = {}
    for skip in ("tied_head", ""):
        tied = engines(
            {"TLT_COMPAT_SKIP": skip},
            model=str(smollm2),
            engine_args={"enforce_eager": True, "dtype": "float32", "max_model_len": 128},
        )
        with SharedWeights(policy.named_parameters()) as weights:
            tied.call("update_policy", weights.manifest(), 1)
        outputs[skip] = [s.token_ids for s in tied.generate(prompts, sampling)]
        tied.close()
    expected = greedy(policy, prompts, 24)
    assert outputs["tied_head"] != expected, "vLLM now packs tied heads again: drop the fix"
    assert outputs[""] == expected


@pytest.mark.gate
def test_no_policy_update_while_samples_run(engine: EngineProcess) -> None:
    ids = engine.submit(random_prompts(8), GREEDY)
    with pytest.raises(EngineError, match="mix two policies"):
        engine.call("update_policy", {"path": "/nowhere"}, 9)
    engine.collect(ids)


@pytest.mark.gate
def test_drafter_update_in_the_middle_of_generation(
    engine: EngineProcess, tiny_drafter: Path
) -> None:
    """No request is dropped, greedy output stays the same, and acceptance follows the drafter."""
    import torch

    from tlt.drafter.checkpoint import drafter_weights, load_drafter

    prompts = random_prompts(64, seed=6)
    sampling = SamplingSpec(max_tokens=128, temperature=0, ignore_eos=True)
    reference, good_rate = engine.accepted_during(lambda: engine.generate(prompts, sampling))

    drafter = load_drafter(tiny_drafter)
    good = drafter_weights(drafter.state_dict(), drafter.config, torch.float32)
    bad = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in good.items()}
    with SharedWeights(good.items()) as good_file, SharedWeights(bad.items()) as bad_file:

        def swap_while_running() -> list[tuple[int, ...]]:
            ids = engine.submit(prompts, sampling)
            for version, file in enumerate([bad_file, good_file, bad_file, good_file, bad_file]):
                time.sleep(0.3)
                assert engine.stats().running > 0
                seconds = engine.call("update_drafter", file.manifest(), version + 1)
                assert seconds < limit(5)
            return [s.token_ids for s in engine.collect(ids)]

        swapped, _ = engine.accepted_during(swap_while_running)
        assert swapped == [s.token_ids for s in reference]
        assert engine.stats().drafter_version == 5

        _, bad_rate = engine.accepted_during(lambda: engine.generate(prompts, sampling))
        engine.call("update_drafter", good_file.manifest(), 6)
        again, again_rate = engine.accepted_during(lambda: engine.generate(prompts, sampling))
    assert [s.token_ids for s in again] == [s.token_ids for s in reference]
    assert bad_rate < 0.05 < 0.2 < again_rate
    assert again_rate == pytest.approx(good_rate, abs=0.1)


@pytest.mark.gate
def test_a_drafter_that_cannot_be_loaded_takes_nothing_down(
    engine: EngineProcess, tiny_drafter: Path
) -> None:
    import torch

    from tlt.drafter.checkpoint import drafter_weights, load_drafter

    prompts = random_prompts(8, seed=7)
    reference, rate = engine.accepted_during(lambda: engine.generate(prompts, GREEDY))
    with pytest.raises(FileNotFoundError):
        engine.call("update_drafter", {"path": "/dev/shm/tlt-weights-nowhere"}, 50)
    drafter = load_drafter(tiny_drafter)
    good = drafter_weights(drafter.state_dict(), drafter.config, torch.float32)
    wrong = dict(good) | {"midlayer.mlp.up_proj.weight": torch.ones(3, 5)}
    with SharedWeights(wrong.items()) as weights, pytest.raises(ValueError, match="up_proj"):
        engine.call("update_drafter", weights.manifest(), 51)
    again = engine.generate(prompts, GREEDY)
    assert [s.token_ids for s in again] == [s.token_ids for s in reference]
    with SharedWeights(good.items()) as weights:
        engine.call("update_drafter", weights.manifest(), 52)
    again, new_rate = engine.accepted_during(lambda: engine.generate(prompts, GREEDY))
    assert [s.token_ids for s in again] == [s.token_ids for s in reference]
    assert new_rate == pytest.approx(rate, abs=0.1)


def test_drafter_update_needs_a_drafter(engines: EngineFactory, tiny: Path) -> None:
    plain = engines(model=str(tiny))
    with pytest.raises(ConfigError, match=r"without engine\.drafter"):
        plain.call("update_drafter", {"path": "/nowhere"}, 1)
    with pytest.raises(ConfigError, match=r"set engine\.max_draft_tokens = 4"):
        plain.call("set_strategy", EAGLE)
    plain.close()
