"""The rollout stage of `tlt train` against the same requests sent to the same engines directly.

    python benchmarks/train_rollout.py [--config configs/smollm2_chain_sum_cpu.toml]

Two engines start once. Rounds take turns: `loop` is the training loop's own rollout (pool,
streaming, decoding to text, rewards in their processes, groups), `bare` hands half of the same
requests to each engine and collects what comes back. Greedy, so that both generate the same
responses. Writes benchmarks/results/train_rollout.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tlt.observe.provenance import provenance

RESULT = Path(__file__).parent / "results" / "train_rollout.json"


class Started:
    """An engine that is running already, lent to a pool for a while."""

    def __init__(self, engine: Any, report: dict[str, Any]) -> None:
        self.engine, self.report = engine, report

    async def start(self) -> dict[str, Any]:
        return self.report

    async def stop(self, graceful: bool) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


async def bare(engines: Sequence[Started], requests: Sequence[Any]) -> tuple[int, float]:
    """Tokens and seconds of every second request on each engine."""

    async def serve(engine: Started, own: Sequence[Any]) -> int:
        await engine.submit(own)
        tokens = done = 0
        while done < len(own):
            for sample in await engine.take_finished():
                tokens += len(sample.token_ids)
                done += 1
        return tokens

    started = time.perf_counter()
    shares = [requests[k :: len(engines)] for k in range(len(engines))]
    tokens = await asyncio.gather(*map(serve, engines, shares))
    return sum(tokens), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2_chain_sum_cpu.toml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()

    from tlt.config.load import load_config
    from tlt.config.train import TrainConfig
    from tlt.node.cluster import start_ray
    from tlt.train.preflight import prepare

    config = load_config(TrainConfig, options.config, options.overrides)
    prepared = prepare(config)
    start_ray(config.pool.num_engines)
    rounds = asyncio.run(_run(config, prepared, options.rounds))
    ratios = [r["loop_tokens_per_s"] / r["bare_tokens_per_s"] for r in rounds]
    report = {
        "provenance": provenance(),
        "config": str(options.config),
        "loop_against_bare": {
            "median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)
        },
        "rounds": rounds,
    }  # fmt: skip
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"loop against bare engines: {statistics.median(ratios):.3f}x "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


async def _run(config: Any, prepared: Any, num_rounds: int) -> list[dict[str, float]]:
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.harvest.contract import NoHarvest
    from tlt.harvest.forecast import TailForecast
    from tlt.observe.live import Live
    from tlt.observe.stopwatch import Stopwatch
    from tlt.rollout.actor import ray_spawner
    from tlt.rollout.pool import RolloutPool
    from tlt.tasks.rewards import RewardPool
    from tlt.train.rollouts import Rollouts

    spawn = ray_spawner(prepared.engine)
    handles = [spawn(f"engine-{index}") for index in range(config.pool.num_engines)]
    reports = await asyncio.gather(*(handle.start() for handle in handles))
    engines = [Started(h, r) for h, r in zip(handles, reports, strict=True)]
    rewards = RewardPool(prepared.reward, config.reward.num_workers, config.reward.timeout_s)
    size = config.sampling.group_size
    rounds = []
    for round_ in range(num_rounds + 1):
        problems = prepared.source.batch(round_ + 1, config.sampling.prompts_per_step)
        spec = SamplingSpec(max_tokens=config.sampling.max_tokens, temperature=0.0)
        requests = [
            SampleRequest(f"bare-{round_}/{i}/{k}", prepared.chat.prompt(p.question), spec)
            for i, p in enumerate(problems)
            for k in range(size)
        ]
        found: dict[str, float] = {}
        for way in ("loop", "bare") if round_ % 2 else ("bare", "loop"):
            for engine in engines:  # neither finds the other's prompts in the cache
                await engine.call("reset_prefix_cache")
            if way == "bare":
                tokens, seconds = await bare(engines, requests)
            else:
                lent = iter(engines)
                pool = RolloutPool(config.pool, lambda name, lent=lent: next(lent))
                await pool.start()
                harvest = NoHarvest()
                live = Live(Path("live.json"), 1, pool, harvest, TailForecast(), lambda *_: None)
                rollouts = Rollouts(
                    *(config, prepared.chat, pool, rewards, harvest, live),
                    max_prompt_tokens=prepared.max_prompt_tokens,
                )
                watch = Stopwatch()
                scored = await rollouts.generate(
                    f"loop-{round_}", problems, size, 0.0, 0, watch, "rollout"
                )
                tokens = sum(len(s.sample.token_ids) for s in scored)
                seconds = watch.seconds["rollout"]
                await pool.shutdown()
            found |= {f"{way}_tokens": tokens, f"{way}_s": seconds}
            found[f"{way}_tokens_per_s"] = tokens / seconds
        if round_:  # the first one warms up
            rounds.append(found)
        print({k: round(v, 1) for k, v in found.items()}, flush=True)
    rewards.close()
    for handle in handles:
        await handle.stop(graceful=True)
    return rounds


if __name__ == "__main__":
    main()
