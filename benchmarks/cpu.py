"""How processes that compute should wait for their threads, and in which dtype they compute.

    tlt models smollm2 --out models/smollm2
    python benchmarks/cpu.py [--rounds 5]

Every process of TLT that computes, on both cores of this machine, in interleaved rounds:

    sft       `tlt sft` of the tiny model, rows of 512 tokens
    update    the learner's update of SmolLM2, 2 samples of 48 tokens
    drafter   training of a drafter of SmolLM2's size, rows of 512 tokens
    engine    an engine with two threads that decodes with SmolLM2, 4 requests

Ways to wait: `spin` (GNU OpenMP's default), `block` (`GOMP_SPINCOUNT=0`), `passive`
(`OMP_WAIT_POLICY=passive`) and `one` (one thread), each on a quiet machine and while another
process wants one of the two cores; all in float32. `bfloat16`: products in bfloat16, waiting with
`block`. Writes benchmarks/results/cpu.json: work per second, and within each round its ratio to
`spin`, of bfloat16 to `block`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "cpu.json"
WAITS: dict[str, dict[str, str]] = {
    "spin": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "300000"},  # libgomp's own number
    "block": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "0"},
    "passive": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
    "one": {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
}
WORK = ("sft", "update", "drafter", "engine")
NEIGHBOUR = "import os\nos.sched_setaffinity(0, {1})\nwhile True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="Of one measurement.")
    parser.add_argument("--work", choices=WORK, help="Do this work in this process; for itself.")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    if options.work:
        _serve(options)
        return
    from tlt.observe.provenance import provenance

    rates: dict[str, list[float]] = {}
    for work in WORK:
        for key, rate in _measure(options, work):
            rates.setdefault(key, []).append(rate)
            print(f"{key} {rate:.2f}/s", flush=True)
    report = {
        "provenance": provenance(),
        "rounds": options.rounds,
        "rates": rates,
        "ratios": {key: _ratio(rates, key) for key in rates},
    }
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    for key, ratio in report["ratios"].items():
        print(f"{key}: {ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})")


def _measure(options: argparse.Namespace, work: str) -> Iterator[tuple[str, float]]:
    """All ways to do one kind of work, which stay loaded and take turns."""
    ways = {name: Worker(options, work, environment) for name, environment in WAITS.items()}
    ways["bfloat16"] = Worker(options, work, WAITS["block"], "bfloat16")
    try:
        for worker in ways.values():
            worker.ready()
        for _ in range(options.rounds):
            for name, worker in ways.items():
                yield f"{work}/{name}/quiet", worker.rate(options.seconds)
            neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
            try:
                for name in WAITS:
                    yield f"{work}/{name}/disturbed", ways[name].rate(options.seconds)
            finally:
                neighbour.kill()
                neighbour.wait()
    finally:
        for worker in ways.values():
            worker.stop()


class Worker:
    """A process that does one kind of work when it is asked to."""

    def __init__(
        self,
        options: argparse.Namespace,
        work: str,
        environment: dict[str, str],
        dtype: str = "float32",
    ) -> None:
        command = [sys.executable, __file__, "--work", work, "--dtype", dtype]
        self._process = subprocess.Popen(
            [*command, "--model", options.model],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ready(self) -> None:
        self._answer("READY")

    def rate(self, seconds: float) -> float:
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return float(self._answer("RATE"))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"{self._process.args} ended")


def _serve(options: argparse.Namespace) -> None:
    """Measure whenever asked: steps per second over so many seconds."""
    step = _prepare(options)
    step()
    print("READY", flush=True)
    for line in sys.stdin:
        step()
        count, started_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < float(line):
            step()
            count += 1
        print("RATE", count / elapsed_s, flush=True)


def _ratio(rates: dict[str, list[float]], key: str) -> dict[str, float]:
    work, way, condition = key.split("/")
    base = f"{work}/{'block' if way == 'bfloat16' else 'spin'}/{condition}"
    each = [a / b for a, b in zip(rates[key], rates[base], strict=True)]
    return {"median": statistics.median(each), "low": min(each), "high": max(each)}


# --- the work -------------------------------------------------------------------------------------


def _prepare(options: Any) -> Callable[[], None]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    return {"sft": _sft, "update": _update, "drafter": _drafter, "engine": _engine}[options.work](
        options.model, options.dtype
    )


def _sft(model: str, dtype: str) -> Callable[[], None]:
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM

    from tlt.learner.packed_attention import use_packed_attention
    from tlt.learner.sft import row_loss
    from tlt.models import tiny

    policy = AutoModelForCausalLM.from_pretrained(
        tiny.make(Path(tempfile.mkdtemp()) / "tiny"), dtype=torch.float32
    ).train()
    use_packed_attention(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    samples = [(list(range(4, 68)), 8)] * 8

    def step() -> None:
        loss, _ = row_loss(policy, samples, dtype)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _update(model: str, dtype: str) -> Callable[[], None]:
    import tempfile

    import torch
    import torch.distributed as dist

    from tlt.config.train import AlgorithmConfig, LearnerConfig
    from tlt.learner.batch import TrainSample, Weighting
    from tlt.learner.rank import LearnerRank, RankSettings

    meeting = f"file://{tempfile.mkdtemp()}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    settings = RankSettings(
        model, dtype, 1.0, Weighting("tokens", 64), AlgorithmConfig(), LearnerConfig(lr=1e-6)
    )
    rank = LearnerRank(settings, torch.device("cpu"))
    samples = [
        TrainSample(str(i), i, tuple(range(100, 116)), (5,) * 32, (-0.1,) * 32, 1.0)
        for i in range(2)
    ]

    def step() -> None:
        rank.accumulate([samples])
        rank.step(64.0, math.inf)

    return step


def _drafter(model: str, dtype: str) -> Callable[[], None]:
    import torch
    from transformers import AutoConfig

    from tlt.drafter.passes import Row
    from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
    from tlt.states.captured import Captured

    config = AutoConfig.from_pretrained(model)
    head = torch.randn(config.vocab_size, config.hidden_size) * 0.05
    drafter = fresh_drafter(config, head, torch.arange(2048))
    settings = TrainerSettings(
        num_draft_tokens=4,
        row_tokens=512,
        lr=1e-5,
        temperature=1.0,
        seed=0,
        bfloat16=dtype == "bfloat16",
    )
    trainer = DrafterTrainer(drafter, head, head, settings)
    length = 512
    row = Row(
        [
            Captured(
                token_ids_T=torch.randint(0, 2048, (length,)),
                loss_mask_T=torch.ones(length, dtype=torch.bool),
                aux_TA=torch.randn(length, 3 * config.hidden_size, dtype=torch.bfloat16),
                final_TH=torch.randn(length, config.hidden_size, dtype=torch.bfloat16),
            )
        ]
    )
    return lambda: (trainer.micro_step(row), None)[1]


def _engine(model: str, dtype: str) -> Callable[[], None]:
    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.rollout.engine import RolloutEngine

    threads = int(os.environ["OMP_NUM_THREADS"])
    args = {"enforce_eager": True, "dtype": dtype, "max_model_len": 256, "max_num_seqs": 4}
    engine = RolloutEngine(
        EngineConfig(
            model=model, num_cores=threads, core_group=f"bench-{os.getpid()}", engine_args=args
        )
    )
    engine.start()
    sampling = SamplingSpec(max_tokens=8, temperature=0, ignore_eos=True, logprobs=False)
    numbers = iter(range(10**9))

    def step() -> None:
        requests = [
            SampleRequest(str(next(numbers)), tuple(range(100, 116)), sampling) for _ in range(4)
        ]
        engine.submit(requests)
        done = 0
        while done < len(requests):
            done += len(engine.take_finished(60.0))

    return step


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # an engine's threads need not end in order
