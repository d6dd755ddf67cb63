"""vLLM's V2 runner, the one of GPUs, does what V1 does. Triton's interpreter runs its kernels.

Scheduling is asynchronous, and the KV cache so small that requests are preempted. The engine starts
with a fresh drafter, whose head equals the policy's: vLLM would let both share one module.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from draft_spies import check_catch_up, spy_v2
from interpreter import InterpretedEngine, interpreted
from v2_calls import draft_from_own_text, watch_waits
from workloads import (
    TINY_ARGS,
    changed_policy,
    check_states,
    greedy,
    load_policy,
    random_prompts,
    watch_preemptions,
)

from tlt.config.rollout import EngineConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.node.weights import SharedWeights

pytestmark = pytest.mark.vllm

GREEDY = SamplingSpec(max_tokens=24, temperature=0, ignore_eos=True)
OFF, NGRAM, EAGLE3 = ["off", 0], ["ngram", 3], ["eagle3", 4]
ARMS = [OFF, NGRAM, ["eagle3", 1], ["eagle3", 2], EAGLE3]
COMMON = [token for prompt in random_prompts(4, seed=9) for token in prompt][:40]
PROMPTS = [COMMON + prompt[:8] for prompt in random_prompts(4, seed=2)]
"""Prompts with a block in common."""
ENGINE_ARGS: dict[str, Any] = TINY_ARGS | {
    "async_scheduling": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 9,
}


@dataclass
class Scene:
    engine: InterpretedEngine
    policy: Any
    trained: dict[str, Any]
    """Weights of a trained drafter."""
    settings: Any
    """The buffer of captured states."""
    prompts: list[list[int]]

    @cached_property
    def expected(self) -> list[tuple[int, ...]]:
        return greedy(self.policy, self.prompts, GREEDY.max_tokens)

    def tokens(self) -> list[tuple[int, ...]]:
        return [sample.token_ids for sample in self.engine.generate(self.prompts, GREEDY)]

    def swap(self) -> None:
        with SharedWeights(self.trained.items()) as weights:
            self.engine.call("update_drafter", weights.manifest(), 1)

    @cached_property
    def preemptions(self) -> int:
        """Generate all samples under random switching with a trained drafter, and record states."""
        self.swap()
        self.engine.call("set_strategy", {"kind": "random", "arms": ARMS, "seed": 1})
        if self.engine.stats().steps == 0:
            self.tokens()  # fills the history of samples
        self.engine.call(watch_preemptions)
        self.engine.call(watch_waits)
        requests = [
            SampleRequest(f"switched/{index}", tuple(prompt), GREEDY, rl_step=5)
            for index, prompt in enumerate(self.prompts)
        ]
        assert self.engine.tokens_of(requests) == self.expected
        count: int = self.engine.call("num_preemptions")
        return count


@pytest.fixture(scope="module")
def scene(
    tiny: Path, fresh_drafter: Path, tiny_drafter: Path, tmp_path_factory: Any
) -> Iterator[Scene]:
    from safetensors.torch import load_file

    from tlt.states.buffer import BufferSettings

    folder = tmp_path_factory.mktemp("buffer")
    settings = BufferSettings(str(folder), 2**26, max_sample_tokens=512)
    config = EngineConfig(
        model=str(tiny),
        drafter=str(fresh_drafter),
        max_draft_tokens=4,
        kv_cache_gib=0.1,
        core_group="v2",
        capture=asdict(settings),
        engine_args=ENGINE_ARGS,
    )
    engine = InterpretedEngine(config)
    report = engine.start()
    assert report["proposer"] == "SwitchingSpeculator"
    assert report["drafter_faults"] == []
    yield Scene(
        engine,
        load_policy(tiny),
        load_file(tiny_drafter / "model.safetensors"),
        settings,
        PROMPTS,
    )
    engine.close()


def test_a_drafter_swap_leaves_the_policy_alone(scene: Scene) -> None:
    scene.engine.call("set_strategy", {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4})
    tokens, untrained = scene.engine.accepted_during(scene.tokens)
    assert tokens == scene.expected
    scene.swap()
    tokens, trained = scene.engine.accepted_during(scene.tokens)
    assert tokens == scene.expected
    assert trained > untrained + 0.1
    assert scene.engine.stats().policy_mismatches == 0
    assert scene.engine.call("report")["drafter_faults"] == []


def test_random_switching_gives_the_tokens_of_no_drafts(scene: Scene) -> None:
    assert scene.preemptions > 0
    trace = scene.engine.call("take_trace")
    accepted = {report.verified.drafter for report in trace if report.num_accepted_tokens}
    assert accepted == {"ngram", "eagle3"}
    lengths = {report.verified.num_draft_tokens for report in trace}
    assert lengths == {0, 1, 2, 3, 4}


def test_only_a_lookup_in_the_history_waits_for_the_device(scene: Scene) -> None:
    """By the calls of our modules, because the interpreter has no device to wait for."""
    assert scene.preemptions > 0
    assert scene.engine.call("waits") == {("v2.py", "_num_tokens", "cpu")}


def test_recorded_states_are_those_of_the_policy(scene: Scene, tiny_drafter: Path) -> None:
    assert scene.preemptions > 0
    texts = list(zip(scene.prompts, scene.expected, strict=True))
    check_states(scene.settings, scene.policy, tiny_drafter, texts)


def test_skipping_the_draft_model_and_catching_up_gives_the_same_drafts(scene: Scene) -> None:
    scene.swap()
    scene.engine.call(spy_v2)
    script = [OFF] * 3 + [NGRAM] * 2 + [EAGLE3] * 2
    check_catch_up(scene.engine, script, 2**29, scene.tokens)
    assert scene.tokens() == scene.expected


def test_a_policy_update_arrives(scene: Scene, tiny: Path) -> None:
    scene.engine.call("set_strategy", {"kind": "random", "arms": ARMS, "seed": 2})
    changed = changed_policy(tiny, seed=0)
    updated = greedy(changed, scene.prompts, GREEDY.max_tokens)
    assert updated != scene.expected
    for version, (policy, expected) in enumerate(
        [(changed, updated), (scene.policy, scene.expected)]
    ):
        with SharedWeights(policy.state_dict().items()) as weights:
            scene.engine.call("update_policy", weights.manifest(), version + 1)
        assert scene.tokens() == expected
    assert scene.engine.call("report")["drafter_faults"] == []


def test_an_engine_without_a_draft_model_drafts_from_history(tiny: Path) -> None:
    config = EngineConfig(
        model=str(tiny),
        kv_cache_gib=0.1,
        core_group="v2-history",
        strategy={"kind": "random", "arms": [OFF, ["ngram", 2], ["ngram", 4]]},
        engine_args=ENGINE_ARGS,
    )
    engine = InterpretedEngine(config)
    assert engine.start()["proposer"] == "LookupSpeculator"
    expected = greedy(load_policy(tiny), PROMPTS, GREEDY.max_tokens)
    for least in (0.0, 0.5):  # the second time, the history holds the samples
        samples, accepted = engine.accepted_during(lambda: engine.generate(PROMPTS, GREEDY))
        assert [sample.token_ids for sample in samples] == expected
        assert accepted >= least
    engine.close()


def test_ngrams_of_the_own_text_are_found_on_the_device() -> None:
    assert interpreted(draft_from_own_text) == [[3, 4, 1], [6, 6, 6]]
