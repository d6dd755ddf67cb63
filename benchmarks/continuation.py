"""What a killed engine costs a rollout, with samples that continue and samples that start again.

    python benchmarks/continuation.py [--tokens 600] [--repeats 3]

SmolLM2 on two engines of one core each, no drafts. Each has short samples and one long one, the
tail of the rollout. When the long one of the first engine is at 70% of its length, the engine is
killed, and the other one takes the sample over. The rollouts alternate: undisturbed, killed with
texts that continue, killed with samples that start again (the driver is told nothing of running
texts). All have the same samples, or the benchmark fails.

Writes results/continuation.json.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import chain
from typing import Any

from common import ROOT, parse_options, ratios, save, spread
from tlt.config.rollout import EngineConfig, PoolConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.models import smollm2
from tlt.node.cluster import start_ray
from tlt.rollout.actor import RayEngine
from tlt.rollout.dispatch import Dispatcher
from tlt.rollout.pool import RolloutPool

MODEL = ROOT / "models" / "smollm2"
ARMS = ("undisturbed", "continue", "start again")
hear = Dispatcher.gained


def hear_nothing(*_: Any) -> None:
    """Leave out what engines say of running texts."""


AT = 0.7
"""Share of its tokens at which the long sample loses its engine."""


def requests(run: str, tokens: int) -> list[SampleRequest]:
    """Return the requests of a rollout; the run does not change their seeds."""
    lengths = [tokens, tokens // 2, *[tokens // 10] * 6]
    return [
        SampleRequest(
            f"{run}/{number}",
            tuple(range(1000 + 40 * number, 1030 + 40 * number)),
            SamplingSpec(length, temperature=1.0, ignore_eos=True, seed=number),
        )
        for number, length in enumerate(lengths)
    ]


async def rollout(arm: str, run: str, tokens: int, kill_s: float) -> dict[str, Any]:
    """Make a rollout; return its seconds, its samples and what the pool kept of the lost engine."""
    config = EngineConfig(
        model=str(MODEL),
        kv_cache_gib=1.0,
        engine_args={"dtype": "float32", "enforce_eager": True, "max_model_len": 1024},
    )
    started: dict[str, RayEngine] = {}

    def spawn(name: str) -> RayEngine:
        return started.setdefault(name, RayEngine(config, name))

    async with RolloutPool(PoolConfig(num_engines=2), spawn) as pool:
        work = requests(run, tokens)
        began_s = time.monotonic()

        async def kill() -> None:
            await asyncio.sleep(kill_s)
            loads = pool.loads()
            os.kill(started[max(loads, key=lambda place: loads[place] or 0)].pid, signal.SIGKILL)

        killing = None if arm == "undisturbed" else asyncio.create_task(kill())
        samples = {s.sample_id: s async for s in pool.generate(work)}
        seconds = time.monotonic() - began_s
        if killing is not None:
            await killing
        return {
            "seconds": seconds,
            "kept_tokens": pool.num_kept_tokens,
            "samples": [samples[request.sample_id].token_ids for request in work],
            "logprobs": [samples[request.sample_id].logprobs for request in work],
        }


def main() -> None:
    options = parse_options(__doc__, tokens=600, repeats=3)
    if not MODEL.exists():
        smollm2.make(MODEL)
    start_ray(2)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for repeat in range(options.repeats):
        for arm in ARMS:
            is_deaf = arm == "start again"
            Dispatcher.gained = hear_nothing if is_deaf else hear  # type: ignore[method-assign]
            undisturbed_s = found["undisturbed"][-1]["seconds"] if arm != "undisturbed" else 0.0
            run = asyncio.run(rollout(arm, f"{arm}-{repeat}", options.tokens, AT * undisturbed_s))
            print(arm, f"{run['seconds']:.1f} s, {run['kept_tokens']} tokens kept", flush=True)
            found[arm].append(run)
    wanted = found["undisturbed"][0]
    tokens, logprobs = wanted["samples"], wanted["logprobs"]
    for run in (run for runs in found.values() for run in runs):
        if run.pop("samples") != tokens:
            raise SystemExit("the samples are not the same")
        pairs = zip(chain(*run.pop("logprobs")), chain(*logprobs), strict=True)
        run["logprobs_differ_by"] = max(abs(one - other) for one, other in pairs)
    seconds = {arm: [run["seconds"] for run in found[arm]] for arm in ARMS}
    plain = seconds["undisturbed"]
    lost = {
        arm: spread([mine - own for mine, own in zip(seconds[arm], plain, strict=True)])
        for arm in ARMS[1:]
    }
    result = {
        "tokens": options.tokens,
        "killed_at": AT,
        "runs": found,
        "lost_s": lost,
        "slower": {arm: spread(ratios(seconds[arm], plain)) for arm in ARMS[1:]},
    }
    print(lost)
    save("continuation", result)


if __name__ == "__main__":
    main()
