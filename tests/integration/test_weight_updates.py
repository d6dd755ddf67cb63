"""New weights reach a running engine, through vLLM's weight-transfer API and shared memory.

`test_ownership.py` compares a policy update with transformers; `test_lossless_sampled.py` swaps
drafters in the middle of samples.
"""

from pathlib import Path

import pytest
from engine_process import EngineProcess
from workloads import (
    EngineFactory,
    changed_policy,
    drafter_tensors,
    greedy,
    load_from_process,
    load_policy,
    random_prompts,
)

from tlt.contracts import SamplingSpec
from tlt.errors import EngineError
from tlt.node.weights import SharedWeights

pytestmark = [pytest.mark.vllm, pytest.mark.gate]

GREEDY = SamplingSpec(max_tokens=48, temperature=0, ignore_eos=True)
EAGLE = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4}


@pytest.fixture(scope="module")
def engine(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> EngineProcess:
    return engines(model=str(tiny), drafter=str(tiny_drafter), strategy=EAGLE)


def test_policy_of_a_trainer_in_the_same_process(
    engine: EngineProcess, tiny: Path, tiny_drafter: Path
) -> None:
    """It is loaded whole, survives a drafter swap, and is refused in part."""
    from safetensors.torch import load_file

    prompts = random_prompts(8, seed=5)
    before = [s.token_ids for s in engine.generate(prompts, GREEDY)]
    report = engine.call(load_from_process, tiny, 1)
    assert report["differed"] == []
    expected = greedy(changed_policy(tiny, 1), prompts, 48)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == expected

    with SharedWeights(drafter_tensors(tiny_drafter).items()) as weights:
        engine.call("update_drafter", weights.manifest(), 1)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == expected
    assert engine.stats().policy_mismatches == 0

    report = engine.call(load_from_process, tiny, 2, "model.norm.weight")
    assert "model.norm.weight" in report["still"]
    assert not engine.call(load_from_process, tiny, 2)["differed"]
    with SharedWeights(load_file(tiny / "model.safetensors").items()) as weights:
        engine.call("update_policy", weights.manifest(), 3)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == before


def test_adapters_reach_the_engine_merged(
    engine: EngineProcess, tiny: Path, tmp_path: Path
) -> None:
    """The engine's tokens are those of transformers with peft's own adapter beside the policy."""
    import peft
    import torch
    from safetensors.torch import load_file

    from tlt.config.train import LoraConfig
    from tlt.learner.lora import add_adapters, is_adapter, merged_policy, write_adapter

    lora, policy = LoraConfig(rank=4, alpha=64.0), load_policy(tiny)
    add_adapters(policy, lora, seed=0)
    torch.manual_seed(0)
    adapter = {n: torch.randn_like(p) / 8 for n, p in policy.named_parameters() if is_adapter(n)}
    write_adapter(adapter, lora, tiny, tmp_path)
    prompts = random_prompts(8, seed=6)
    before = [s.token_ids for s in engine.generate(prompts, GREEDY)]
    with SharedWeights(merged_policy(tiny, adapter, lora, "float32").items()) as weights:
        engine.call("update_policy", weights.manifest(), 4)
    expected = greedy(peft.PeftModel.from_pretrained(load_policy(tiny), tmp_path), prompts, 48)
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == expected != before
    with SharedWeights(load_file(tiny / "model.safetensors").items()) as weights:
        engine.call("update_policy", weights.manifest(), 5)


def test_no_policy_update_while_samples_run(engine: EngineProcess) -> None:
    ids = engine.submit(random_prompts(8), GREEDY)
    with pytest.raises(EngineError):
        engine.call("update_policy", {"path": "/nowhere"}, 9)
    engine.collect(ids)


def test_a_drafter_that_cannot_be_loaded_takes_nothing_down(
    engine: EngineProcess, tiny_drafter: Path
) -> None:
    import torch

    prompts = random_prompts(8, seed=7)
    reference, rate = engine.accepted_during(lambda: engine.generate(prompts, GREEDY))
    with pytest.raises(FileNotFoundError):
        engine.call("update_drafter", {"path": "/dev/shm/tlt-weights-nowhere"}, 50)
    good = drafter_tensors(tiny_drafter)
    wrong = good | {"midlayer.mlp.up_proj.weight": torch.ones(3, 5)}
    with SharedWeights(wrong.items()) as weights, pytest.raises(ValueError, match="up_proj"):
        engine.call("update_drafter", weights.manifest(), 51)
    again, new_rate = engine.accepted_during(lambda: engine.generate(prompts, GREEDY))
    assert [s.token_ids for s in again] == [s.token_ids for s in reference]
    assert new_rate == pytest.approx(rate, abs=0.1)
