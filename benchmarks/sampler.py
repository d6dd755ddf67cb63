"""What the keyed sampler costs: against vLLM's own sampler, on the same logits.

    tlt models smollm2 --out models/smollm2
    python benchmarks/sampler.py [--model models/smollm2]

One engine alone on one core. In every engine step, the keyed sampler and vLLM's sample from the
same logits, in turns first and second; the engine goes on with the keyed sampler's tokens. Writes
benchmarks/results/sampler.json.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from common import parse_options, save

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


def measured(core: Any, both: Both, tokens: Any, batch: int, options: Any) -> dict[str, Any]:
    """Return the milliseconds of both samplers, and of an engine step, at a batch size."""
    from tlt.contracts import SampleRequest, SamplingSpec

    steps: list[tuple[float, float, float]] = []
    for turn in range(options.rounds):
        for index in range(batch):
            prompt = tuple(tokens(PROMPTS[index % len(PROMPTS)]).input_ids)
            spec = SamplingSpec(options.tokens, seed=turn * 100 + index, ignore_eos=True)
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
    return {
        "steps": len(steps),
        "keyed_ms": 1e3 * statistics.median(s[0] for s in steps),
        "rival_ms": 1e3 * statistics.median(s[1] for s in steps),
        "step_ms": 1e3 * statistics.median(s[2] for s in steps),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "share_of_step": sum(s[0] for s in steps) / sum(s[2] for s in steps),
    }


def main() -> None:
    options = parse_options(
        __doc__, model="models/smollm2", batches=[1, 4, 16], rounds=2, tokens=60
    )
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    from transformers import AutoTokenizer
    from vllm.v1.sample.sampler import Sampler

    from tlt.config.rollout import EngineConfig
    from tlt.vllm.core import VllmCore

    arguments = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512}
    config = EngineConfig(
        model=options.model,
        kv_cache_gib=0.5,
        strategy={"kind": "off"},
        engine_args=arguments | {"max_num_seqs": 16},
    )
    core = VllmCore(config, "sampler")
    core.start()
    (worker,) = core.llm.collective_rpc(lambda worker: [worker])[0]
    both = worker.model_runner.sampler = Both(worker.model_runner.sampler, Sampler())
    tokens = AutoTokenizer.from_pretrained(options.model)
    rows = {str(n): measured(core, both, tokens, n, options) for n in options.batches}
    core.stop()
    for batch, row in rows.items():
        print(f"batch {batch}:", row)
    save("sampler", {"dtype": "float32", "rows": {"plain": rows}})


if __name__ == "__main__":
    main()
