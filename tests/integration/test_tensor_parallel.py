"""One engine of two tensor-parallel workers, on two cores, inside a Ray actor."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from workloads import (
    SWITCHING_ARMS,
    TINY_ARGS,
    change,
    check_states,
    drafter_tensors,
    greedy,
    load_policy,
    noisy_weights,
    random_prompts,
    seeded,
)

from tlt.config.rollout import EngineConfig, PoolConfig
from tlt.errors import ConfigError
from tlt.rollout.pool import RolloutPool
from tlt.states.buffer import BufferSettings

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores),
    pytest.mark.usefixtures("local_ray"),
]

MAX_TOKENS = 24


PROMPTS = random_prompts(6, seed=1)


async def tokens_of(
    pool: RolloutPool, run: str, temperature: float, rl_step: int | None = None
) -> list[Any]:
    wanted = [
        replace(request, sample_id=f"{run}/{index}", rl_step=rl_step)
        for index, request in enumerate(seeded(PROMPTS, [{"temperature": temperature}], MAX_TOKENS))
    ]
    samples = {s.sample_id: s async for s in pool.generate(wanted)}
    return [samples[request.sample_id].token_ids for request in wanted]


async def test_switching_swap_and_sync_with_two_workers(
    tiny: Path, fresh_drafter: Path, tmp_path: Path
) -> None:
    """Drafts change no sample, a swap changes none, and a weight sync changes the policy."""
    from tlt.rollout.actor import ray_spawner

    policy = load_policy(tiny)
    states = BufferSettings(str(tmp_path / "states"), 2**28, max_sample_tokens=512)
    config = EngineConfig(
        model=str(tiny),
        drafter=str(fresh_drafter),
        strategy={"kind": "off"},
        max_draft_tokens=8,
        kv_cache_gib=0.25,
        num_cores=2,
        core_group="test-tp",
        capture=asdict(states),
        engine_args=TINY_ARGS | {"max_num_seqs": 8, "tensor_parallel_size": 2},
    )
    async with RolloutPool(PoolConfig(num_engines=1), ray_spawner(config)) as pool:
        plain = await tokens_of(pool, "plain", 1.0)
        expected = await tokens_of(pool, "greedy", 0.0, rl_step=1)
        assert expected == greedy(policy, PROMPTS, MAX_TOKENS)
        # Only the first worker stores states.
        await asyncio.to_thread(
            check_states, states, policy, fresh_drafter, list(zip(PROMPTS, expected, strict=True))
        )

        for drafter, num_tokens in SWITCHING_ARMS[1::3]:
            arm = {"kind": "fixed", "drafter": drafter, "num_draft_tokens": num_tokens}
            await pool.set_strategy(arm)
            name = f"{drafter}{num_tokens}"
            assert await tokens_of(pool, name, 0.0) == expected
            assert await tokens_of(pool, f"{name}-sampled", 1.0) == plain
        (stats,) = await pool.stats()
        assert stats.draft_tokens > 0

        drafted = drafter_tensors(fresh_drafter)
        await pool.update_drafter(noisy_weights(drafted).items(), 1)
        assert await tokens_of(pool, "swapped", 1.0) == plain

        change(policy, seed=0)
        await pool.update_policy(policy.state_dict().items(), 1)
        synced = await tokens_of(pool, "synced", 0.0)
        assert synced == greedy(policy, PROMPTS, MAX_TOKENS)
        assert synced != expected
        await pool.update_drafter(drafted.items(), 2)
        assert await tokens_of(pool, "swapped again", 0.0) == synced
        (stats,) = await pool.stats()
        assert (stats.policy_version, stats.drafter_version) == (1, 2)
        assert stats.policy_mismatches == 0
        assert pool.num_restarts == 0


def test_workers_need_cores_of_their_own(tiny: Path) -> None:
    from tlt.vllm.args import engine_args

    args = TINY_ARGS | {"tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"engine\.num_cores = 2"):
        engine_args(EngineConfig(model=str(tiny), engine_args=args))
