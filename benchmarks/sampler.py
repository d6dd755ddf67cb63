"""What the keyed sampler costs: against the samplers that it replaced, on the same logits.

    tlt models smollm2 --out models/smollm2
    python benchmarks/sampler.py [--model models/smollm2]

One engine per row of the table, alone on one core. In every engine step, the keyed sampler and its
rival sample from the same logits with the same drafts, in turns first and second; the engine goes
on with the keyed sampler's tokens. Without drafts the rival is vLLM's own sampler. With drafts
(n-grams, 4 tokens) it is the lean rejection sampler that TLT had before, taken from this
repository's history. Writes benchmarks/results/sampler.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import time
import types
from pathlib import Path
from typing import Any

from tlt.observe.provenance import provenance

CORE = max(os.sched_getaffinity(0))
HERE = Path(__file__).parent
RESULT = HERE / "results" / "sampler.json"
LEAN = "6ff70ed:src/tlt/vllm/v1/sampler.py"
PROMPTS = [
    "Write a short story about a boy and his dog. The boy and his dog went to the park. The boy",
    "Explain step by step how to add 17 and 25. First, add 7 and 5. Then add 10 and 20. Then",
    "List the numbers from one to twenty: one, two, three, four, five, six, seven,",
    "Repeat the sentence: the cat sat on the mat. The cat sat on the mat. The cat",
]


class Both:
    """Stands in for a sampler: times it and its rival on the same input."""

    def __init__(self, ours: Any, rival: Any) -> None:
        self.ours, self.rival = ours, rival
        self.seconds: list[tuple[float, float]] = []
        self.keys = getattr(ours, "keys", None)
        self.compute_logprobs = getattr(ours, "compute_logprobs", None)

    def __call__(self, *args: Any, **named: Any) -> Any:
        turns = [("ours", self.ours), ("rival", self.rival)]
        spent, out = {}, None
        for name, sampler in turns if len(self.seconds) % 2 else turns[::-1]:
            # vLLM's samplers may write into the logits.
            own = [x.clone() if hasattr(x, "clone") else x for x in args]
            own_named = {k: x.clone() if hasattr(x, "clone") else x for k, x in named.items()}
            started = time.perf_counter()
            result = sampler(*own, **own_named)
            spent[name] = time.perf_counter() - started
            out = result if name == "ours" else out
        self.seconds.append((spent["ours"], spent["rival"]))
        return out


def lean_module() -> Any:
    text = subprocess.run(
        ["git", "show", LEAN], cwd=HERE, capture_output=True, text=True, check=True
    ).stdout
    module = types.ModuleType("lean")
    exec(compile(text, LEAN, "exec"), module.__dict__)
    return module


def measure(options: argparse.Namespace, drafted: bool, pipe: Any) -> None:
    os.sched_setaffinity(0, {CORE})
    os.environ["OMP_NUM_THREADS"] = "1"
    from transformers import AutoTokenizer
    from vllm.v1.sample.sampler import Sampler

    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.vllm.core import VllmCore

    tokens = AutoTokenizer.from_pretrained(options.model)
    fixed = {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4}
    config = EngineConfig(
        model=options.model,
        kv_cache_gib=0.5,
        strategy=fixed if drafted else {"kind": "off"},
        engine_args={
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
        },
    )
    core = VllmCore(config, "sampler")
    core.start()
    (worker,) = core.llm.collective_rpc(lambda worker: [worker])[0]
    runner = worker.model_runner
    if drafted:
        speculative = worker.vllm_config.speculative_config
        rival = lean_module().LeanRejectionSampler(Sampler(), speculative, runner.device)
        both = runner.rejection_sampler = Both(runner.rejection_sampler, rival)
    else:
        both = runner.sampler = Both(runner.sampler, Sampler())
    found = {}
    for batch in options.batches:
        steps: list[tuple[float, float, float]] = []
        for turn in range(options.rounds):
            for index in range(batch):
                prompt = tuple(tokens(PROMPTS[index % len(PROMPTS)]).input_ids)
                spec = SamplingSpec(
                    max_tokens=options.tokens, temperature=1.0, seed=turn * 100 + index,
                    ignore_eos=True,
                )  # fmt: skip
                core.admit(SampleRequest(f"{batch}/{turn}/{index}", prompt, spec))
            left = batch
            while left:
                seen, started = len(both.seconds), time.perf_counter()
                left -= len(core.step())
                elapsed = time.perf_counter() - started
                if len(both.seconds) > seen:
                    ours, other = both.seconds[-1]
                    steps.append((ours, other, elapsed - other))
        steps = steps[5:]  # the first ones compile
        ratios = [ours / other for ours, other, _ in steps]
        found[str(batch)] = {
            "steps": len(steps),
            "keyed_ms": 1e3 * statistics.median(s[0] for s in steps),
            "rival_ms": 1e3 * statistics.median(s[1] for s in steps),
            "step_ms": 1e3 * statistics.median(s[2] for s in steps),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
            "share_of_step": sum(s[0] for s in steps) / sum(s[2] for s in steps),
        }
    pipe.send(found)
    core.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found = {}
    for name, drafted in (("plain", False), ("drafted", True)):
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(options, drafted, theirs))
        process.start()
        while not ours.poll(1.0):
            if not process.is_alive():
                raise SystemExit("the engine failed")
        found[name] = ours.recv()
        process.join()
        for batch, row in found[name].items():
            print(
                f"{name:8} batch {batch:>2}: keyed {row['keyed_ms']:.2f} ms, rival "
                f"{row['rival_ms']:.2f} ms, ratio {row['ratio']:.2f}, "
                f"{row['share_of_step']:.1%} of a step of {row['step_ms']:.1f} ms"
            )
    done = {"provenance": provenance("benchmarks/sampler.py"), "dtype": "float32"}
    options.out.write_text(json.dumps(done | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
