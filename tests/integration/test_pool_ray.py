"""The pool on a real local Ray cluster with real engines."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workloads import (
    TINY_ARGS,
    EngineFactory,
    changed_policy,
    greedy,
    random_prompts,
    seeded,
)

from tlt.config.rollout import EngineConfig, PoolConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.node.weights import SharedWeights
from tlt.rollout.client import place_of
from tlt.rollout.pool import RolloutPool

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores),
    pytest.mark.usefixtures("local_ray"),
]


def config(tiny: Path, fresh_drafter: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny),
        drafter=str(fresh_drafter),
        strategy={"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 2},
        kv_cache_gib=0.25,
        core_group="test-pool",
        engine_args=TINY_ARGS | {"max_model_len": 2560, "max_num_seqs": 16},
    )


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.0},
]


def requests(count: int, run: str) -> list[SampleRequest]:
    """Return sampled and greedy requests; the run does not change their seeds."""
    return [
        replace(request, sample_id=f"{run}/{index}")
        for index, request in enumerate(seeded(random_prompts(count), SETTINGS, 100))
    ]


LONG = SampleRequest("tail", (5, 6, 7), SamplingSpec(2400, temperature=1, ignore_eos=True, seed=7))


def same_prompt(count: int) -> list[SampleRequest]:
    """Return the requests of one group, which the pool spreads over its engines."""
    sampling = SamplingSpec(max_tokens=32, temperature=1, ignore_eos=True)
    return [SampleRequest(f"group/{index}", (5, 6, 7, 8), sampling) for index in range(count)]


@pytest.mark.gate
async def test_kill_one_of_two_engines_in_the_middle_of_a_rollout(
    engines: EngineFactory, tiny: Path, fresh_drafter: Path
) -> None:
    """Two engines with drafts, one of them killed, deliver the samples of one engine without."""
    from tlt.rollout.actor import RayEngine

    policy = changed_policy(tiny, seed=1)
    alone = engines(model=str(tiny), engine_args=TINY_ARGS | {"max_model_len": 2560})
    with SharedWeights(policy.state_dict().items()) as weights:
        alone.call("update_policy", weights.manifest(), 1)
    tokens_alone = alone.tokens_of(requests(96, "alone"))
    reference = {str(index): tokens for index, tokens in enumerate(tokens_alone)}
    (alone_long,) = alone.tokens_of([LONG])
    alone.close()

    settings = config(tiny, fresh_drafter)
    started: dict[str, RayEngine] = {}

    def spawn(name: str) -> RayEngine:
        return started.setdefault(name, RayEngine(settings, name))

    async with RolloutPool(PoolConfig(num_engines=2), spawn) as pool:
        drawn = [s async for s in pool.generate(same_prompt(32))]
        assert {s.engine for s in drawn} == {"engine-0", "engine-1"}
        assert len({s.token_ids for s in drawn}) == 32, "two engines drew the same sample"
        await pool.update_policy(policy.state_dict().items(), version=1)
        tokens: dict[str, tuple[int, ...]] = {}
        async for sample in pool.generate(requests(96, "killed")):
            assert sample.sample_id not in tokens, "delivered twice"
            tokens[sample.sample_id] = sample.token_ids
            if len(tokens) == 24:
                os.kill(started["engine-0"].pid, signal.SIGKILL)
        assert len(tokens) == 96
        # Samples that were lost with their engine come out the same elsewhere.
        assert {k.split("/")[1]: v for k, v in tokens.items()} == reference

        await pool.wait_ready(2)
        assert pool.num_restarts == 1
        used = set()
        async for sample in pool.generate(requests(32, "after")):
            used.add(sample.engine)
            assert sample.token_ids == reference[sample.sample_id.split("/")[1]]
            assert sample.policy_version == 1
        assert used == {"engine-0.1", "engine-1"}
        await kill_in_the_tail(pool, started, alone_long)


async def kill_in_the_tail(
    pool: RolloutPool, started: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """Kill the engine of the last sample; another engine continues the text."""
    rollout = aiter(pool.generate([LONG]))
    last = asyncio.ensure_future(anext(rollout))
    before = pool.num_kept_tokens
    work = pool._dispatcher._unfinished
    async with asyncio.timeout(60):
        while LONG.sample_id not in work or len(work[LONG.sample_id].token_ids) <= 20:
            await asyncio.sleep(0.05)
    (owner,) = [name for name, held in pool.loads().items() if held]
    process = next(
        p for name, p in started.items() if place_of(name) == owner and name in pool.engines
    )
    os.kill(process.pid, signal.SIGKILL)
    assert (await last).token_ids == expected
    assert pool.num_kept_tokens - before > 20


async def test_weights_reach_engines_of_other_nodes(tiny: Path, fresh_drafter: Path) -> None:
    """An engine that poses as one of another node gets its weights through the object store."""
    from tlt.rollout.actor import RayEngine

    class Elsewhere(RayEngine):
        async def start(self) -> dict[str, Any]:
            report = await super().start()
            assert not self.is_remote
            self.is_remote = True
            return report

    settings = config(tiny, fresh_drafter)
    policy, prompts = changed_policy(tiny, seed=2), random_prompts(8)
    wanted = seeded(prompts, [{"temperature": 0.0}], 24)
    async with RolloutPool(
        PoolConfig(num_engines=1), lambda name: Elsewhere(settings, name)
    ) as pool:
        await pool.update_policy(policy.state_dict().items(), version=4)
        samples = {s.sample_id: s async for s in pool.generate(wanted)}
    assert {s.policy_version for s in samples.values()} == {4}
    assert [samples[r.sample_id].token_ids for r in wanted] == greedy(policy, prompts, 24)
