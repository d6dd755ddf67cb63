"""One engine of two tensor-parallel workers, on two cores, inside a Ray actor."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from workloads import SWITCHING_ARMS, TINY_ARGS, EngineFactory, greedy, random_prompts

from speed import limit
from tlt.config.rollout import EngineConfig, PoolConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.errors import ConfigError
from tlt.rollout.pool import RolloutPool
from tlt.states.buffer import BufferSettings, SampleBuffer

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]

MAX_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def requests(run: str, temperature: float, rl_step: int | None = None) -> list[SampleRequest]:
    return [
        SampleRequest(
            f"{run}/{index}",
            tuple(prompt),
            SamplingSpec(MAX_TOKENS, temperature=temperature, seed=index, ignore_eos=True),
            rl_step=rl_step,
        )
        for index, prompt in enumerate(random_prompts(6, seed=1))
    ]


async def tokens_of(pool: RolloutPool, run: str, temperature: float, **more: Any) -> list[Any]:
    wanted = requests(run, temperature, **more)
    samples = {s.sample_id: s async for s in pool.generate(wanted)}
    return [samples[request.sample_id].token_ids for request in wanted]


async def stored(buffer: dict[str, Any], count: int) -> None:
    """Wait until the engine's thread has stored the states of this many samples."""
    states = SampleBuffer(BufferSettings(**buffer))
    async with asyncio.timeout(limit(20)):
        while len(states.entries()) < count:
            await asyncio.sleep(0.05)


async def test_switching_swap_and_sync_with_two_workers(
    tiny: Path, fresh_drafter: Path, tmp_path: Path
) -> None:
    """Drafts change no sample, a swap changes none, and a weight sync changes the policy."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tlt.rollout.actor import ray_spawner

    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    prompts = [list(request.prompt_token_ids) for request in requests("", 0)]
    buffer = {"folder": str(tmp_path / "states"), "capacity_bytes": 2**28, "max_sample_tokens": 512}
    config = EngineConfig(
        model=str(tiny),
        drafter=str(fresh_drafter),
        strategy={"kind": "off"},
        max_draft_tokens=8,
        kv_cache_gib=0.25,
        num_cores=2,
        core_group="test-tp",
        capture=buffer,
        engine_args=TINY_ARGS | {"max_num_seqs": 8, "tensor_parallel_size": 2},
    )
    async with RolloutPool(PoolConfig(num_engines=1), ray_spawner(config)) as pool:
        plain = await tokens_of(pool, "plain", 1.0)
        expected = await tokens_of(pool, "greedy", 0.0, rl_step=1)
        assert expected == greedy(policy, prompts, MAX_TOKENS)
        await stored(buffer, len(expected))

        for drafter, num_tokens in SWITCHING_ARMS[1::3]:
            arm = {"kind": "fixed", "drafter": drafter, "num_draft_tokens": num_tokens}
            await pool.set_strategy(arm)
            name = f"{drafter}{num_tokens}"
            assert await tokens_of(pool, name, 0.0) == expected
            assert await tokens_of(pool, f"{name}-sampled", 1.0) == plain
        (stats,) = await pool.stats()
        assert stats.draft_tokens > 0

        drafted = load_file(fresh_drafter / "model.safetensors")
        noise = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in drafted.items()}
        await pool.update_drafter(noise.items(), 1)
        assert await tokens_of(pool, "swapped", 1.0) == plain

        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        await pool.update_policy(policy.state_dict().items(), 1)
        synced = await tokens_of(pool, "synced", 0.0)
        assert synced == greedy(policy, prompts, MAX_TOKENS)
        assert synced != expected
        await pool.update_drafter(drafted.items(), 2)
        assert await tokens_of(pool, "swapped again", 0.0) == synced
        (stats,) = await pool.stats()
        assert (stats.policy_version, stats.drafter_version) == (1, 2)
        assert stats.policy_mismatches == 0
        assert pool.num_restarts == 0


def capture_as_rank(engine: Any, rank: int, buffer: dict[str, Any]) -> list[tuple[int, int]]:
    """Let a worker store states as if it had this rank; return what it says it has stored."""
    llm = engine.core.llm
    with patch("tlt.vllm.worker.get_tensor_model_parallel_rank", lambda: rank):
        llm.collective_rpc("tlt_capture", args=(buffer,))
    stored: list[tuple[int, int]] = llm.collective_rpc(
        "tlt_keep_states", args=("none", None, 0, [])
    )
    return stored


def test_only_the_first_worker_stores_states(
    engines: EngineFactory, tiny: Path, tmp_path: Path
) -> None:
    engine = engines(model=str(tiny))
    for rank, stores in ((1, False), (0, True)):
        folder = tmp_path / f"states-{rank}"
        buffer = {"folder": str(folder), "capacity_bytes": 2**20, "max_sample_tokens": 512}
        assert engine.call(capture_as_rank, rank, buffer) == [(0, 0)]
        assert folder.exists() == stores


def test_workers_need_cores_of_their_own(tiny: Path) -> None:
    from tlt.vllm.args import engine_args

    args = TINY_ARGS | {"tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"set engine\.num_cores = 2"):
        engine_args(EngineConfig(model=str(tiny), engine_args=args))
