"""What an engine loses while the core beside it trains the drafter, and how soon that one is free.

    python benchmarks/neighbour.py [--rounds 10] [--seconds 1]

One compiled engine on one core generates all the time, at batch 1 and at batch 4; a trainer on the
other core works in every second interval of about a second. The machine itself grows faster and
slower over minutes, so each interval beside a trainer is compared with the two around it: the
engine's median step time against the mean of theirs. After each, the trainer's lease is called back
in the middle of its work: how long it takes until it has stopped, as the coordinator would see it.
Writes benchmarks/results/neighbour.json.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
import statistics
import time
from typing import Any

from common import p99, parse_options, save

MODEL, DRAFTER = "models/smollm2-sft", "models/smollm2-eagle3"
NUM_SAMPLES = 24
MIN_STEPS = 8
"""An interval with fewer steps says nothing."""


def slow_down(intervals: list[tuple[bool, float]]) -> dict[str, Any]:
    """Return the slow-down from (beside a trainer?, seconds of an engine step) in order of time."""
    ratios = [
        beside / statistics.fmean((before, after))
        for (a, before), (b, beside), (c, after) in zip(
            intervals, intervals[1:], intervals[2:], strict=False
        )
        if b and not a and not c
    ]
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    return {
        "median": statistics.median(ratios),
        "mean": math.exp(mean),
        "interval_95": [math.exp(mean - 1.96 * error), math.exp(mean + 1.96 * error)],
        "count": len(ratios),
    }


def fill_buffer(folder: str) -> Any:
    """Fill a buffer with states of a few worked solutions, as a training pass leaves them."""
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.drafter.eagle3.config import Eagle3Config
    from tlt.states.buffer import BufferSettings, SampleBuffer
    from tlt.states.captured import capture
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    settings = BufferSettings(folder, 2**30, 4096, held_out_share=0.25)
    buffer = SampleBuffer(settings)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    layers = Eagle3Config.for_target(policy.config).aux_layer_ids
    chat = Chat(MODEL)
    for problem in problems("chain_sum", NUM_SAMPLES, 3, "neighbour"):
        tokens, num_prompt = chat.answered(problem.question, problem.solution)
        buffer.put(problem.problem_id, 1, capture(policy, tokens, num_prompt, layers))
    return settings


async def all_finished(engine: Any, count: int) -> None:
    from tlt.rollout.client import Engine

    while count > 0:
        count -= len(await engine.call(Engine.take_finished, 2.0))


async def measure(rounds: int, seconds: float) -> dict[str, Any]:
    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.drafter.trainer import TrainerSettings
    from tlt.harvest.actor import RayTrainer, TrainerPlace
    from tlt.harvest.trainer import HarvestTrainerSettings
    from tlt.rollout.actor import RayEngine
    from tlt.rollout.client import Engine
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    folder = f"/dev/shm/tlt-neighbour-{os.getpid()}"
    learning = TrainerSettings(num_draft_tokens=4, row_tokens=512, lr=3e-4, temperature=1.0, seed=0)
    settings = HarvestTrainerSettings(DRAFTER, MODEL, fill_buffer(folder), learning, 1024)
    engine = RayEngine(
        EngineConfig(
            model=MODEL,
            drafter=DRAFTER,
            strategy={"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 3},
            engine_args={"max_model_len": 2048, "max_num_seqs": 8, "dtype": "bfloat16"},
        ),
        "engine-0",
    )
    report = await engine.start()
    (busy,) = report["cores"]
    free = next(core for core in os.sched_getaffinity(0) if core != busy)
    trainer = RayTrainer(settings, TrainerPlace((free,), False, {}))
    await trainer.start()
    prompt = Chat(MODEL).prompt(problems("chain_sum", 1, 5, "engine")[0].question)
    stops: list[float] = []
    result: dict[str, Any] = {}
    lease = 0
    rng = random.Random(0)
    try:
        for batch in (1, 4):
            intervals: list[tuple[bool, float]] = []
            for round_ in range(rounds):
                spec = SamplingSpec(1500, temperature=1.0, ignore_eos=True, logprobs=False)
                ids = [f"{batch}/{round_}/{i}" for i in range(batch)]
                requests = [SampleRequest(i, tuple(prompt), spec) for i in ids]
                await engine.call(Engine.submit, requests)
                done = asyncio.create_task(all_finished(engine, batch))
                await asyncio.sleep(1.0)
                beside = False
                while not done.done():
                    work = None
                    if beside:
                        lease += 1
                        await trainer.begin(lease, 1000)
                        work = asyncio.create_task(trainer.train(lease, 1000))
                    await engine.call(Engine.take_trace)
                    await asyncio.sleep(seconds * rng.uniform(0.9, 1.1))
                    trace = await engine.call(Engine.take_trace)
                    if work is not None:
                        asked_s = time.monotonic()
                        await trainer.end(lease)
                        await work
                        stops.append(time.monotonic() - asked_s)
                    steps = [
                        r.elapsed_s
                        for r in trace
                        if r.num_decodes == batch and not r.num_prefill_tokens
                    ]
                    if len(steps) >= MIN_STEPS:
                        intervals.append((beside, statistics.median(steps)))
                    beside = not beside
                print(batch, slow_down(intervals), flush=True)
            result[f"batch_{batch}"] = {
                "slow_down": slow_down(intervals),
                "alone_s": statistics.median(s for beside, s in intervals if not beside),
            }
    finally:
        await trainer.kill()
        await engine.stop(graceful=True)
        shutil.rmtree(folder, ignore_errors=True)
    result["stop_s"] = {
        "count": len(stops),
        "median": statistics.median(stops),
        "p99": p99(stops),
        "max": max(stops),
    }
    return result


def main() -> None:
    from tlt.node.cluster import start_ray

    options = parse_options(__doc__, rounds=10, seconds=1.0)
    start_ray(2)
    result = asyncio.run(measure(options.rounds, options.seconds))
    save("neighbour", result)
    for name, found in result.items():
        print(name, found.get("slow_down", found))


if __name__ == "__main__":
    main()
