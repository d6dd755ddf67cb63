"""What a drafter brings: one engine bound to one core, speculation on against off.

    bash benchmarks/words.sh    # makes the policy and the drafter
    python benchmarks/drafter_speed.py

Two engines on the same core, one working at a time: one without any drafter (`off`), one with the
drafter, at several draft lengths. Each round runs all of them on the same prompts, starting with
another one each time; ratios are taken within a round. Responses end by themselves; all problems
of a batch have the same size, so the batch stays full nearly to the end. A last round times the
parts of a step, and the matrix products of each part alone: the same layers with the same kernels
on as many tokens, one after the other. Writes benchmarks/results/drafter_speed.json and .png.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlt.observe.provenance import provenance

CORE = max(os.sched_getaffinity(0))
RESULTS = Path(__file__).parent / "results"
PARTS = ("target pass", "target head", "sampling", "proposer")


def serve(options: argparse.Namespace, drafter: str | None, pipe: Any) -> None:
    os.sched_setaffinity(0, {CORE})
    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.rollout.engine import RolloutEngine

    engine = RolloutEngine(
        EngineConfig(
            model=options.model,
            drafter=drafter,
            max_draft_tokens=max(options.draft_tokens) if drafter else None,
            core_group=f"speed-{'drafter' if drafter else 'off'}",
            engine_args={
                "dtype": options.dtype,
                "enforce_eager": options.eager,
                "max_model_len": 1536,
                "max_num_seqs": max(8, *options.batch_sizes),
            },
        )
    )
    engine.start()
    timers = Timers(engine)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        draft_tokens, prompts, name, timed = job
        strategy = {"kind": "off"}
        if draft_tokens:
            strategy = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": draft_tokens}
        engine.set_strategy(strategy)
        sampling = SamplingSpec(options.max_tokens, options.temperature, logprobs=options.logprobs)
        before = engine.stats()
        timers.start(timed)
        started = time.perf_counter()
        requests = [SampleRequest(f"{name}/{i}", p, sampling) for i, p in enumerate(prompts)]
        engine.submit(requests)
        num_tokens = num_samples = 0
        while num_samples < len(prompts):
            for sample in engine.take_finished(timeout_s=60):
                num_tokens += len(sample.token_ids)
                num_samples += 1
        seconds = time.perf_counter() - started
        after = engine.stats()
        drafts = after.drafts - before.drafts
        accepted = after.accepted_tokens - before.accepted_tokens
        pipe.send(
            {
                "tokens_per_s": num_tokens / seconds,
                "num_tokens": num_tokens,
                "acceptance_length": 1 + accepted / drafts if drafts else 1.0,
                "steps": after.steps - before.steps,
                "ms_per_step": 1e3 * (after.busy_s - before.busy_s) / (after.steps - before.steps),
                "ms_per_part": timers.per_step_ms(after.steps - before.steps),
                "ms_of_products": timers.products_ms(len(prompts), draft_tokens) if timed else {},
            }
        )
    engine.shutdown()


class Timers:
    """Seconds inside the parts of a step, measured by wrapping them."""

    def __init__(self, engine: Any) -> None:
        core = engine.core.llm.engine_core.engine_core
        self._worker = core.model_executor.driver_worker.worker
        self._seconds: dict[str, float] = {}
        self._on = False
        runner = self._worker.model_runner
        self._wrap(runner, "_model_forward", "target pass")
        self._wrap(runner.model, "compute_logits", "target head")
        self._wrap(runner, "_sample", "sampling")
        if getattr(runner, "drafter", None) is not None:
            self._wrap(runner.drafter, "propose", "proposer")
            self._wrap(runner.drafter, "_sample_draft_tokens", "proposer: draft heads")
            self._wrap(
                runner.drafter,
                "build_per_group_and_layer_attn_metadata",
                "proposer: attention metadata",
            )

    def _wrap(self, owner: Any, method: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return original(*args, **kwargs)
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self._seconds[name] = self._seconds.get(name, 0.0) + spent

        setattr(owner, method, timed)

    def start(self, on: bool) -> None:
        self._on = on
        self._seconds = {}

    def products_ms(self, size: int, draft_tokens: int) -> dict[str, float]:
        """Return the milliseconds of the bare matrix products of each part of an engine step."""
        runner = self._worker.model_runner
        tokens = size * (1 + draft_tokens)  # vLLM pads drafts to the batch's length
        found = {
            "target pass": bare_ms(linears(runner.model), tokens),
            "target head": bare_ms([runner.model.lm_head], tokens),
        }
        if draft_tokens:
            model = runner.drafter.model
            layers, head = linears(model), [model.lm_head]
            found["proposer"] = bare_ms(layers + head, tokens)
            found["proposer"] += (draft_tokens - 1) * bare_ms(layers + head, size)
        return found

    def per_step_ms(self, steps: int) -> dict[str, float]:
        return {name: 1e3 * seconds / steps for name, seconds in self._seconds.items()}


def linears(model: Any) -> list[Any]:
    from vllm.model_executor.layers.linear import LinearBase

    return [module for module in model.modules() if isinstance(module, LinearBase)]


def bare_ms(layers: list[Any], tokens: int) -> float:
    """Return the median milliseconds of these layers' products, one after the other."""
    import torch

    inputs = {}
    for layer in layers:
        width = getattr(layer, "input_size_per_partition", None) or getattr(
            layer, "input_size", None
        )
        inputs[layer] = torch.randn(tokens, width or layer.embedding_dim)
    seconds = []
    with torch.inference_mode():
        for _ in range(9):
            started = time.perf_counter()
            for layer in layers:
                layer.quant_method.apply(layer, inputs[layer])
            seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-words")
    parser.add_argument("--drafter", default="models/smollm2-words-eagle3")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--task", default="word_problems")
    parser.add_argument("--size", type=int, default=8, help="steps of every problem")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--logprobs", action="store_true", help="return them, as RL may want")
    parser.add_argument("--eager", action="store_true", help="no torch.compile; quick to start")
    parser.add_argument("--out", default="drafter_speed")
    options = parser.parse_args()

    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems
    from tlt.tasks.tail import HeavyTail

    chat = Chat(options.model)
    sizes = HeavyTail(options.size, options.size, options.size)
    count = (options.rounds + 2) * max(options.batch_sizes)
    made = problems(options.task, count, purpose="speed", sizes=sizes)
    prompts = [chat.prompt(problem.question) for problem in made]
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name, drafter in (("off", None), ("eagle3", options.drafter)):
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(options, drafter, theirs), daemon=True).start()
        assert pipes[name].recv() == "ready"
        print(f"the {name} engine is ready", flush=True)

    modes = [0, *options.draft_tokens]

    def measure(mode: int, batch: list[Any], name: str, timed: bool = False) -> dict[str, Any]:
        pipe = pipes["eagle3" if mode else "off"]
        pipe.send((mode, batch, f"{name}/{mode}", timed))
        return dict(pipe.recv())

    results = []
    for size in options.batch_sizes:
        runs: dict[int, list[dict[str, Any]]] = {mode: [] for mode in modes}
        parts = {}
        for index in range(options.rounds + 2):
            batch = prompts[index * size : (index + 1) * size]
            turn = index % len(modes)
            for mode in modes[turn:] + modes[:turn]:
                timed = index > options.rounds
                run = measure(mode, batch, f"{size}/{index}", timed)
                if timed:
                    parts[mode] = run
                elif index:  # the first round warms up
                    runs[mode].append(run)
        rows = []
        for mode in modes:
            pairs = zip(runs[mode], runs[0], strict=True)
            ratios = [run["tokens_per_s"] / base["tokens_per_s"] for run, base in pairs]
            speeds = [run["tokens_per_s"] for run in runs[mode]]
            lengths = [run["acceptance_length"] for run in runs[mode]]
            rows.append(
                {
                    "draft_tokens": mode,
                    "tokens_per_s": statistics.median(speeds),
                    "speed_vs_off": statistics.median(ratios),
                    "speed_low": min(ratios),
                    "speed_high": max(ratios),
                    "acceptance_length": statistics.mean(lengths),
                    "ms_per_step": statistics.median([run["ms_per_step"] for run in runs[mode]]),
                    "parts_of_one_run": parts[mode],
                }
            )
        results.append({"batch_size": size, "modes": rows, "runs": runs})
        show(size, rows)
    for pipe in pipes.values():
        pipe.send(None)
    RESULTS.mkdir(exist_ok=True)
    out = RESULTS / options.out
    out.with_suffix(".json").write_text(
        json.dumps(
            {"provenance": provenance(), "options": vars(options), "results": results}, indent=1
        )
        + "\n"
    )
    plot(results, options, out.with_suffix(".png"))


def show(size: int, rows: list[dict[str, Any]]) -> None:
    print(f"\nbatch {size}\n{'K':>3} {'tokens/s':>9} {'vs off':>22} {'accepts':>8} {'ms/step':>8}")
    for row in rows:
        ratio = f"{row['speed_vs_off']:.2f}x ({row['speed_low']:.2f}-{row['speed_high']:.2f})"
        print(
            f"{row['draft_tokens'] or 'off':>3} {row['tokens_per_s']:9.1f} {ratio:>22} "
            f"{row['acceptance_length']:8.2f} {row['ms_per_step']:8.1f}"
        )
    for row in rows:
        run = row["parts_of_one_run"]
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in run["ms_per_part"].items())
        bare = ", ".join(f"{name} {ms:.1f}" for name, ms in run["ms_of_products"].items())
        print(f"  K={row['draft_tokens']}: {run['ms_per_step']:.1f} ms a step: {parts}")
        print(f"       matrix products alone: {bare}", flush=True)


def plot(results: list[dict[str, Any]], options: argparse.Namespace, out: Path) -> None:
    from canvas import pyplot
    from tlt.colours import INK

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for index, result in enumerate(results):
        rows = result["modes"]
        k = [row["draft_tokens"] for row in rows]
        speed = [row["speed_vs_off"] for row in rows]
        low = [row["speed_vs_off"] - row["speed_low"] for row in rows]
        high = [row["speed_high"] - row["speed_vs_off"] for row in rows]
        label = f"batch {result['batch_size']}"
        axes[0].errorbar(k, speed, [low, high], marker="o", capsize=3, label=label)
        width = 0.84 / len(results)
        shift = (index - (len(results) - 1) / 2) * width
        bottom = [0.0] * len(rows)
        for color, part in enumerate(
            ("target pass", "target head", "sampling", "proposer", "rest")
        ):
            height = []
            for row in rows:
                run = row["parts_of_one_run"]
                named = run["ms_per_part"]
                main = sum(named.get(p, 0.0) for p in PARTS)
                height.append(run["ms_per_step"] - main if part == "rest" else named.get(part, 0.0))
            axes[1].bar(
                [x + shift for x in range(len(rows))],
                height,
                0.9 * width,
                bottom=bottom,
                color=f"C{color}",
                alpha=1.0 - 0.3 * index / max(1, len(results) - 1),
                label=part if index == 0 else None,
            )
            bottom = [a + b for a, b in zip(bottom, height, strict=True)]
    axes[0].set_xticks([row["draft_tokens"] for row in results[0]["modes"]])
    axes[0].axhline(1, color=INK, linewidth=1)
    axes[0].set_xlabel("draft tokens (0: no drafter)")
    axes[0].set_ylabel("tokens/s against no drafter")
    axes[0].set_ylim(bottom=0)
    axes[0].set_title(f"one core, temperature {options.temperature:g}: median and range")
    axes[0].legend()
    axes[1].set_xticks(range(len(results[0]["modes"])))
    axes[1].set_xticklabels([str(row["draft_tokens"] or "off") for row in results[0]["modes"]])
    *firsts, last = (str(result["batch_size"]) for result in results)
    sizes = f"{', '.join(firsts)} and {last}" if firsts else last
    axes[1].set_xlabel(f"draft tokens; bars side by side: batch {sizes}")
    axes[1].set_ylabel("milliseconds of a step")
    axes[1].set_title("where a step goes")
    axes[1].legend(fontsize=8)
    fastest = [max(result["modes"], key=lambda row: row["speed_vs_off"]) for result in results]
    said = ", ".join(
        f"{row['speed_vs_off']:.2f}x at batch {result['batch_size']}"
        for result, row in zip(results, fastest, strict=True)
    )
    figure.suptitle(f"The best draft length: {said}")
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
