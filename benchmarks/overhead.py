"""What the plug-in costs: TLT's engine against bare vLLM, side by side on one core.

    tlt models smollm2 --out models/smollm2
    python benchmarks/overhead.py [--model models/smollm2] [--drafter DRAFTER]

Six engines, each in its own process on the same core, one working at a time:

    bare+eagle3    stock vLLM, its own speculative_config
    tlt+eagle3     TLT's engine, the same draft length with a fixed strategy
    bare           stock vLLM, no drafter
    tlt            TLT's engine, no drafter
    tlt+idle       TLT's engine, drafter loaded, speculation off
    tlt+capture    the same, keeping the hidden states of all samples, as harvest does

Each round runs all of them on the same prompts, starting with another one each time; ratios are
taken within a round. Greedy, so that all do the same work. Without --drafter, a new one, whose
drafts are never accepted: that is the most verification for the least gain.

At the end, what it takes to compare an engine's policy with the learner's (its fingerprint), in a
drafter swap and in a policy update. Writes benchmarks/results/overhead.json.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from common import parse_options, ratios, save
from tlt.hardware import compute_dtype

CORE = max(os.sched_getaffinity(0))


def serve(kind: str, options: Namespace, pipe: Any) -> None:
    os.sched_setaffinity(0, {CORE})
    os.environ.update(
        OMP_NUM_THREADS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        TQDM_DISABLE="1",
    )
    run = bare(kind, options) if kind.startswith("bare") else ours(kind, options)
    pipe.send("ready")
    while (prompts := pipe.recv()) is not None:
        started = time.perf_counter()
        done = run(prompts)
        pipe.send((done, time.perf_counter() - started))


COMMON = {
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "dtype": compute_dtype(),
}


def bare(kind: str, options: Namespace) -> Any:
    from vllm import LLM, SamplingParams

    arguments = COMMON | {"kv_cache_memory_bytes": 2**30}
    if kind == "bare+eagle3":
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": options.drafter,
            "num_speculative_tokens": options.num_draft_tokens,
        }
    llm = LLM(options.model, **arguments)
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=0,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )

    def run(prompts: list[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def ours(kind: str, options: Namespace) -> Any:
    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.rollout.engine import RolloutEngine

    length = options.num_draft_tokens
    fixed = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": length}
    folder = f"{options.states}/{kind}"
    states = {"folder": folder, "capacity_bytes": 2**30, "max_sample_tokens": 4096}
    engine = RolloutEngine(
        EngineConfig(
            model=options.model,
            drafter=None if kind == "tlt" else options.drafter,
            strategy=fixed if kind == "tlt+eagle3" else {"kind": "off"},
            max_draft_tokens=None if kind == "tlt" else length,
            core_group=f"overhead-{kind}",
            capture=states if kind == "tlt+capture" else None,
            engine_args=COMMON,
        )
    )
    engine.start()
    sampling = SamplingSpec(max_tokens=options.max_tokens, temperature=0, ignore_eos=True)
    numbers = itertools.count()

    def run(prompts: list[list[int]] | str) -> Any:
        if isinstance(prompts, str):
            return fingerprint_s(engine, options, prompts)
        engine.submit(
            [SampleRequest(f"{next(numbers)}", tuple(p), sampling, rl_step=1) for p in prompts]
        )
        num_tokens = num_samples = 0
        while num_samples < len(prompts):
            for sample in engine.take_finished(timeout_s=60):
                num_tokens += len(sample.token_ids)
                num_samples += 1
        return num_tokens

    return run


def fingerprint_s(engine: Any, options: Namespace, method: str) -> list[float]:
    """Seconds of several comparisons of the policy, in updates with the weights that it has."""
    import torch
    from safetensors.torch import load_file

    from tlt.node.weights import SharedWeights

    folder = options.drafter if method == "update_drafter" else options.model
    dtype = getattr(torch, compute_dtype())
    tensors = load_file(Path(folder) / "model.safetensors")
    seconds = []
    with SharedWeights(
        (name, t.to(dtype) if t.is_floating_point() else t) for name, t in tensors.items()
    ) as weights:
        for version in range(options.rounds + 1):
            before_s = engine.stats().fingerprint_s
            getattr(engine, method)(weights.manifest(), version)
            seconds.append(engine.stats().fingerprint_s - before_s)
    assert engine.stats().policy_mismatches == 0
    return seconds[1:]


KINDS = ("bare+eagle3", "tlt+eagle3", "bare", "tlt", "tlt+idle", "tlt+capture")
COMPARED = (
    ("tlt+eagle3", "bare+eagle3"),
    ("tlt", "bare"),
    ("tlt+idle", "bare"),
    ("tlt+capture", "tlt+idle"),
)


def main() -> None:
    options = parse_options(
        __doc__,
        model="models/smollm2",
        drafter=None,
        num_draft_tokens=2,
        batch_sizes=[1, 8],
        max_tokens=96,
        rounds=9,
    )
    drafter = options.drafter or "a new one"
    if not options.drafter:
        from tlt.integrations.training import new_drafter

        options.drafter = new_drafter(options.model, f"{tempfile.mkdtemp()}/drafter")
    options.states = tempfile.mkdtemp(prefix="tlt-overhead-", dir="/dev/shm")

    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    chat = Chat(options.model)
    count = (options.rounds + 1) * max(options.batch_sizes)
    prompts = [
        chat.prompt(problem.question) for problem in problems("chain_sum", count, purpose="bench")
    ]
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for kind in KINDS:
        pipes[kind], theirs = context.Pipe()
        process = context.Process(target=serve, args=(kind, options, theirs), daemon=True)
        process.start()
        assert pipes[kind].recv() == "ready"
        print(f"{kind} is ready")

    def measure(kind: str, batch: list[list[int]]) -> float:
        pipes[kind].send(batch)
        num_tokens, seconds = pipes[kind].recv()
        return float(num_tokens / seconds)

    results = []
    for size in options.batch_sizes:
        speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for index in range(options.rounds + 1):
            batch = [list(p) for p in prompts[index * size : (index + 1) * size]]
            turn = index % len(KINDS)
            for kind in KINDS[turn:] + KINDS[:turn]:
                speed = measure(kind, batch)
                if index:  # the first round warms up
                    speeds[kind].append(speed)
        compared = {f"{a} / {b}": ratios(speeds[a], speeds[b]) for a, b in COMPARED}
        results.append({"batch_size": size, "tokens_per_s": speeds, "ratios": compared})
        for name, values in compared.items():
            print(f"batch {size}: {name:24} {statistics.median(values):.3f}")
    compared_s = {}
    for method in ("update_drafter", "update_policy"):
        pipes["tlt+idle"].send(method)
        compared_s[method], _ = pipes["tlt+idle"].recv()
        print(f"fingerprint in {method}: {1e3 * statistics.median(compared_s[method]):.0f} ms")
    for pipe in pipes.values():
        pipe.send(None)
    shutil.rmtree(options.states)
    del options.states
    options.drafter = drafter
    settings = vars(options) | {"dtype": compute_dtype()}
    save("overhead", {"options": settings, "results": results, "fingerprint_s": compared_s})


if __name__ == "__main__":
    main()
