"""No drafter can touch the policy; a policy update is complete, and the drafter follows it.

Every kind of drafter that vLLM would let share a module with the policy goes through the calls of a
run: the engine's start, a drafter swap, a weight sync.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess
from workloads import EngineFactory, greedy, load_policy, random_prompts, save_fresh_drafter

from tlt.contracts import SamplingSpec
from tlt.errors import EngineError, WeightMismatch
from tlt.node.weights import SharedWeights

pytestmark = pytest.mark.vllm

GREEDY = SamplingSpec(max_tokens=24, temperature=0, ignore_eos=True)
EAGLE = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 3}


@dataclass(frozen=True)
class Case:
    tied: bool = False
    draft_vocab: int | None = None
    brings: tuple[str, ...] = ("lm_head.weight",)
    """Head or embedding that the drafter's checkpoint holds."""


CASES = {
    "fresh": Case(),  # what a run without engine.drafter starts with
    "fresh, tied": Case(tied=True),
    "reduced vocabulary": Case(draft_vocab=128),
    "brings an equal embedding": Case(brings=("lm_head.weight", "embed_tokens.weight")),
    "brings no head": Case(brings=()),
}
IN_THE_GATE = {"fresh", "fresh, tied"}


@dataclass
class Scene:
    policy: Any
    folder: Path
    drafter: Path
    weights: dict[str, Any]
    """Weights of the drafter."""
    prompts: list[list[int]]

    def expected(self) -> list[tuple[int, ...]]:
        return greedy(self.policy, self.prompts, GREEDY.max_tokens)

    def drawn(self, engine: EngineProcess) -> list[tuple[int, ...]]:
        return [s.token_ids for s in engine.generate(self.prompts, GREEDY)]


@pytest.fixture(scope="module")
def scene(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Scene]:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    def make(case: Case) -> Scene:
        folder, policy = tiny, load_policy(tiny)
        if case.tied:
            policy.config.tie_word_embeddings = True
            policy.tie_weights()
            with torch.no_grad():  # or the policy would repeat the last token
                policy.get_input_embeddings().weight.mul_(0.05)
                policy.model.norm.weight.mul_(20)
            folder = tmp_path_factory.mktemp("tied")
            policy.save_pretrained(folder)
            AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
            policy = load_policy(folder)
        out = save_fresh_drafter(policy, tmp_path_factory.mktemp("drafter"), case.draft_vocab)
        weights = load_file(out / "model.safetensors")
        own = {"embed_tokens.weight": policy.get_input_embeddings().weight.detach().clone()}
        weights = {
            name: tensor
            for name, tensor in (own | weights).items()
            if name in case.brings or name not in ("lm_head.weight", "embed_tokens.weight")
        }
        save_file(weights, out / "model.safetensors")
        return Scene(policy, folder, out, weights, random_prompts(12, seed=8))

    return make


def changed(weights: dict[str, Any]) -> dict[str, Any]:
    """Return other weights of the same shapes, as after training."""
    import torch

    torch.manual_seed(0)
    return {
        name: tensor + 0.5 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def swap(engine: EngineProcess, weights: dict[str, Any], version: int) -> None:
    with SharedWeights(weights.items()) as shared:
        engine.call("update_drafter", shared.manifest(), version)


def start(
    engines: EngineFactory, scene: Scene, environment: dict[str, str] | None = None
) -> EngineProcess:
    args = {"enforce_eager": True, "dtype": "float32", "max_model_len": 128, "max_num_seqs": 16}
    return engines(
        environment,
        model=str(scene.folder),
        drafter=str(scene.drafter),
        strategy=EAGLE,
        kv_cache_gib=0.2,
        engine_args=args,
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.gate] if n in IN_THE_GATE else []) for n in CASES],
)
def test_the_policy_stays_its_own(
    engines: EngineFactory, scene: Callable[[Case], Scene], name: str
) -> None:
    import torch

    made = scene(CASES[name])
    before = made.expected()
    engine = start(engines, made)
    assert made.drawn(engine) == before
    report = engine.call("report")
    assert report["policy_faults"] == report["drafter_faults"] == []
    assert report["compared_tensors"] >= 4 * made.policy.config.num_hidden_layers
    swap(engine, changed(made.weights), 1)
    assert made.drawn(engine) == before, "the drafter swap changed the policy"

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.policy.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    with SharedWeights(made.policy.named_parameters()) as weights:
        engine.call("update_policy", weights.manifest(), 1)
        after = made.expected()
        assert after != before
        assert made.drawn(engine) == after
        # The report compares the drafter's copy of the embedding with the new one.
        assert engine.call("report")["drafter_faults"] == []
        swap(engine, made.weights, 2)
        assert made.drawn(engine) == after
    assert engine.stats().policy_mismatches == 0
    assert engine.stats().policy_version == 1
    engine.close()


@pytest.mark.gate
def test_it_is_needed_and_a_policy_that_was_changed_is_found(
    engines: EngineFactory, scene: Callable[[Case], Scene]
) -> None:
    """Without the fix a drafter swap changes the policy; the fingerprint finds and mends that.

    A policy that cannot be mended ends its engine.
    """
    made = scene(CASES["fresh"])
    before = made.expected()
    unguarded = start(engines, made, {"TLT_COMPAT_SKIP": "sharing,fingerprint"})
    swap(unguarded, changed(made.weights), 1)
    drawn = made.drawn(unguarded)
    assert sum(a == b for a, b in zip(drawn, before, strict=True)) == 0
    unguarded.close()

    guarded = start(engines, made, {"TLT_COMPAT_SKIP": "sharing"})
    swap(guarded, changed(made.weights), 1)
    assert made.drawn(guarded) == before
    assert guarded.stats().policy_mismatches == 1

    # The source of the policy is gone: the engine must not generate one sample more.
    with SharedWeights(made.policy.named_parameters()) as weights:
        guarded.call("update_policy", weights.manifest(), 1)
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight"):
        swap(guarded, changed(made.weights), 2)
    with pytest.raises(EngineError):
        guarded.submit(made.prompts, GREEDY)
    guarded.close()
