"""Drafts drawn with the request's noise against argmax drafts: acceptance and speed.

    python benchmarks/draft_noise.py prompts TASK OUT
    python benchmarks/draft_noise.py drafter MODEL PROMPTS OUT [--minutes 5]
    python benchmarks/draft_noise.py measure NAME MODEL DRAFTER PROMPTS [--part acceptance|speed]

`prompts` writes natural prompts ("natural") or sums of one-digit terms ("sums"). `drafter` trains a
drafter on one core, as `tlt drafter train` does, without Ray and without measurements. `measure`
starts one engine on one core in float32. Each round generates the same samples (same
prompts, same seeds) with every kind of draft in turn, beginning with another kind each time. All
kinds must give the same tokens; the round counts samples that differ. Ratios are taken within a
round. Prompts are the last 64 of the file, on which no drafter is trained. Writes its part of
benchmarks/results/draft_noise.json. `bash benchmarks/draft_noise.sh` runs it all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlt.observe.provenance import provenance

RESULT = Path(__file__).parent / "results" / "draft_noise.json"
SETTINGS = {
    # (batch, draft tokens, rounds, tokens a sample)
    "acceptance": [(16, 4, 3, 96)],
    "speed": [(1, 3, 6, 48)],  # the tail, where drafts pay
}
TEMPERATURES = (0.7, 1.0)

FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child of ten.",
    "What are the advantages and disadvantages of {}?",
    "Give me five tips about {}.",
    "Write a letter to a friend about {}.",
    "Describe a day in a life that depends on {}.",
    "Why do people disagree about {}?",
    "Write a dialogue between two strangers who talk about {}.",
    "Summarize the history of {}.",
    "Write a poem about {}.",
    "What would the world be without {}?",
    "How has {} changed in the last hundred years?",
    "Write a speech that praises {}.",
    "What is the most common mistake with {}?",
    "Compare {} in the city and in the country.",
    "Invent a company that sells {}, and describe it.",
)
TOPICS = (
    "bicycles", "honey bees", "old maps", "the moon", "learning to cook", "rain", "school lunches",
    "trains", "friendship", "volcanoes", "public libraries", "working at night", "potatoes",
    "lighthouses", "chess", "gardening", "robots", "dentists", "the violin", "swimming", "coffee",
    "winter", "football", "tax forms", "elephants", "bridges", "bread", "video games", "museums",
    "homework", "fishing", "solar power", "old photographs", "hospitals", "cats", "markets",
    "mountain climbing", "the internet", "paper", "sleep", "clocks", "wolves", "pottery",
    "airports", "grandparents", "umbrellas", "rivers", "money", "languages", "dancing",
    "earthquakes", "glass", "neighbours", "camels", "theatre", "milk", "deserts", "shoes",
    "submarines", "salt",
)  # fmt: skip


def prompts(task: str) -> list[str]:
    """Return prompts in a random order that is always the same."""
    if task == "sums":
        from tlt.tasks.gym import problems
        from tlt.tasks.tail import HeavyTail

        digits = {"min_digits": 1, "max_digits": 1}
        made = problems("chain_sum", 320, 0, "noise", HeavyTail(14, 26, 30), digits)
        return [problem.question for problem in made]
    pairs = [form.format(topic) for form, topic in itertools.product(FORMS, TOPICS)]
    random.Random(0).shuffle(pairs)
    return pairs


def chats(model: str, file: Path) -> list[tuple[int, ...]]:
    from tlt.tasks.chat import Chat

    chat = Chat(model)
    lines = file.read_text().splitlines()
    return [tuple(chat.prompt(json.loads(line)["prompt"])) for line in lines]


def engine(model: str, **settings: Any) -> Any:
    """Return a started engine, in float32 on one core."""
    from tlt.config.rollout import EngineConfig
    from tlt.rollout.engine import RolloutEngine

    arguments = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "logprobs_mode": "processed_logprobs",  # their mean is minus the entropy
    }
    config = EngineConfig(
        model=model, kv_cache_gib=1, core_group="draft-noise", engine_args=arguments, **settings
    )
    started = RolloutEngine(config)
    started.start()
    return started


def generate(started: Any, requests: list[Any]) -> list[Any]:
    started.submit(requests)
    samples: dict[str, Any] = {}
    while len(samples) < len(requests):
        for sample in started.take_finished(timeout_s=60):
            samples[sample.sample_id] = sample
    return [samples[request.sample_id] for request in requests]


# --- the drafter ----------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Sample from the policy, capture its states, train a drafter, and save it."""
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.drafter.checkpoint import save_drafter
    from tlt.drafter.evaluation import evaluate_samples
    from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
    from tlt.states.buffer import BufferSettings, SampleBuffer
    from tlt.states.captured import capture

    started_s = time.monotonic()
    texts = chats(options.model, options.prompts)[: options.samples]
    sampling = SamplingSpec(options.max_tokens, 1.0, logprobs=False)
    requests = [
        SampleRequest(str(row), text, replace(sampling, seed=row)) for row, text in enumerate(texts)
    ]
    policy_engine = engine(options.model)
    samples = generate(policy_engine, requests)
    policy_engine.shutdown()
    print(f"sampled after {time.monotonic() - started_s:.0f} s", flush=True)

    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    head = policy.get_output_embeddings().weight.detach()
    embedding = policy.get_input_embeddings().weight.detach()
    drafter = fresh_drafter(policy.config, head, torch.arange(options.draft_vocab))
    settings = TrainerSettings(
        num_draft_tokens=4, row_tokens=2048, lr=1e-3, temperature=1.0, bfloat16=False, seed=0
    )
    trainer = DrafterTrainer(drafter, head, embedding, settings)
    trainer.check_vocabulary([torch.tensor(sample.token_ids) for sample in samples])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        buffer = SampleBuffer(
            BufferSettings(folder, 2**30, max_sample_tokens=1024, held_out_share=1 / 16)
        )
        for row, (text, sample) in enumerate(zip(texts, samples, strict=True)):
            states = capture(
                policy, text + sample.token_ids, len(text), drafter.config.aux_layer_ids
            )
            buffer.put(str(row), 0, states)
        print(f"captured after {time.monotonic() - started_s:.0f} s", flush=True)
        begun_s = time.monotonic()

        def progress() -> float:
            return min(1.0, (time.monotonic() - begun_s) / (60 * options.minutes))

        losses: list[float] = []
        trainer.session(
            buffer,
            lambda: progress() >= 1,
            lambda step, loss: losses.append(loss),
            lambda: 0.05 + 0.475 * (1 + math.cos(math.pi * progress())),
        )
        found = evaluate_samples(trainer.passes, buffer.held_out(2048), [0.7, 1.0])
    lengths = {at: round(found.length(at), 3) for at in (0.7, 1.0)}
    print(f"{trainer.step} optimizer steps, losses {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)
    print(f"top-1 agreement {found.agreement}, expected lengths {lengths}", flush=True)
    save_drafter(drafter, options.out, torch.float32)
    described = {
        "num_samples": len(samples),
        "num_tokens": sum(len(sample.token_ids) for sample in samples),
        "draft_vocab": options.draft_vocab,
        "optimizer_steps": trainer.step,
        "minutes": options.minutes,
        "agreement": list(found.agreement),
    }
    (options.out / "training.json").write_text(json.dumps(described) + "\n")


# --- measurements ---------------------------------------------------------------------------------


class Bench:
    """An engine whose kind of drafts can be fixed."""

    def __init__(self, model: str, drafter: str, max_draft_tokens: int) -> None:
        self.engine = engine(model, drafter=drafter, max_draft_tokens=max_draft_tokens)
        # vLLM's start-up on CPU fails on the modules of numba.
        from tlt.vllm import keyed

        self._keyed = keyed
        self.kinds = {"level 1": 1.0, "level 0.5": 0.5, "level 0": 1e-6}

    def run(self, kind: str, requests: list[Any], draft_tokens: int) -> dict[str, Any]:
        """Generate some samples; return counts, seconds and tokens."""
        self._keyed.DRAFT_NOISE = self.kinds[kind]
        strategy = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": draft_tokens}
        self.engine.set_strategy(strategy)
        before = self.engine.stats()
        samples = generate(self.engine, requests)
        after = self.engine.stats()
        accepted = [
            count - (before.accepted_at[place] if place < len(before.accepted_at) else 0)
            for place, count in enumerate(after.accepted_at)
        ]
        drafts = after.drafts - before.drafts
        num_tokens = after.output_tokens - before.output_tokens
        return {
            "tokens": [sample.token_ids for sample in samples],
            "entropy": -statistics.mean(x for sample in samples for x in sample.logprobs),
            "drafts": drafts,
            "accepted_at": (accepted + [0] * draft_tokens)[:draft_tokens],
            "length": 1 + sum(accepted) / drafts,
            "tokens_per_s": num_tokens / (after.busy_s - before.busy_s),
        }


def measure(
    bench: Bench,
    texts: list[tuple[int, ...]],
    kinds: list[str],
    setting: tuple[int, ...],
    temperature: float,
) -> dict[str, Any]:
    """Measure all kinds of drafts in one setting, round by round."""
    from tlt.contracts import SampleRequest, SamplingSpec

    batch, draft_tokens, num_rounds, max_tokens = setting
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    num_differing = 0
    for index in range(num_rounds):
        first = index * batch % (len(texts) - batch + 1)
        turn = index % len(kinds)
        for kind in kinds[turn:] + kinds[:turn]:
            requests = [
                SampleRequest(
                    f"{kind}/{index}/{row}",
                    text,
                    SamplingSpec(max_tokens, temperature, seed=100 * index + row, ignore_eos=True),
                )
                for row, text in enumerate(texts[first : first + batch])
            ]
            runs[kind].append(bench.run(kind, requests, draft_tokens))
        tokens = [runs[kind][index].pop("tokens") for kind in kinds]
        num_differing += sum(
            a != b for other in tokens[1:] for a, b in zip(tokens[0], other, strict=True)
        )
    return {
        "batch_size": batch,
        "draft_tokens": draft_tokens,
        "temperature": temperature,
        "rounds": num_rounds,
        "max_tokens": max_tokens,
        "entropy": statistics.mean(run["entropy"] for run in runs[kinds[0]]),
        "differing_samples": num_differing,
        "kinds": {kind: summary(runs[kind], runs["level 0"]) for kind in kinds},
    }


def summary(runs: list[dict[str, Any]], argmax: list[dict[str, Any]]) -> dict[str, Any]:
    """Return acceptance and speed of one kind, also as ratios to argmax drafts round by round."""
    drafts = sum(run["drafts"] for run in runs)
    up_to = [sum(column) / drafts for column in zip(*(r["accepted_at"] for r in runs), strict=True)]
    longer = [run["length"] / base["length"] for run, base in zip(runs, argmax, strict=True)]
    pairs = zip(runs, argmax, strict=True)
    faster = [run["tokens_per_s"] / base["tokens_per_s"] for run, base in pairs]
    return {
        "drafts": drafts,
        "accepted_up_to": up_to,
        "accepted_once_reached": [
            now / before if before else 0.0 for before, now in itertools.pairwise([1.0, *up_to])
        ],
        "length": mean([run["length"] for run in runs]),
        "length_vs_argmax": mean(longer),
        "tokens_per_s": mean([run["tokens_per_s"] for run in runs]),
        "speed_vs_argmax": mean(faster),
        "rounds": [{k: r[k] for k in ("drafts", "accepted_at", "tokens_per_s")} for r in runs],
    }


def mean(values: list[float]) -> dict[str, float]:
    """Return the mean of some rounds and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return {"mean": statistics.mean(values), "standard_error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    written = commands.add_parser("prompts")
    written.add_argument("task", choices=["natural", "sums"])
    written.add_argument("out", type=Path)
    trained = commands.add_parser("drafter")
    trained.add_argument("model")
    trained.add_argument("prompts", type=Path)
    trained.add_argument("out", type=Path)
    trained.add_argument("--minutes", type=float, default=5.0, help="of training alone")
    trained.add_argument("--samples", type=int, default=192)
    trained.add_argument("--max-tokens", type=int, default=128)
    trained.add_argument("--draft-vocab", type=int, default=4096)
    measured = commands.add_parser("measure")
    measured.add_argument("name", help="key of the policy in the result")
    measured.add_argument("model")
    measured.add_argument("drafter")
    measured.add_argument("prompts", type=Path)
    measured.add_argument("--part", choices=[*SETTINGS], action="append")
    measured.add_argument("--rounds", type=int, help="rounds of every setting")
    measured.add_argument("--kinds", nargs="+", help="such as 'level 1'; all by default")
    options = parser.parse_args()
    if options.command == "prompts":
        lines = [json.dumps({"prompt": text}) + "\n" for text in prompts(options.task)]
        options.out.write_text("".join(lines))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.command == "drafter":
        train(options)
        return
    texts = chats(options.model, options.prompts)[-64:]
    bench = Bench(options.model, options.drafter, 4)
    kinds = options.kinds or [*bench.kinds]
    for part in options.part or [*SETTINGS]:
        rows: list[dict[str, Any]] = []
        for setting, temperature in itertools.product(SETTINGS[part], TEMPERATURES):
            if options.rounds:
                setting = (*setting[:2], options.rounds, setting[3])
            started_s = time.monotonic()
            rows.append(measure(bench, texts, kinds, setting, temperature))
            tell(part, setting, rows[-1], time.monotonic() - started_s)
            save(options.name, options.drafter, part, rows)
    bench.engine.shutdown()


def tell(part: str, setting: tuple[int, ...], row: dict[str, Any], seconds: float) -> None:
    """Print what was found in one setting."""
    print(part, *setting[:2], row["temperature"], f"{seconds:.0f} s", flush=True)
    print(f"  entropy {row['entropy']:.2f}, {row['differing_samples']} differ", flush=True)
    for kind, result in row["kinds"].items():
        once = " ".join(f"{share:.3f}" for share in result["accepted_once_reached"])
        cells = [
            f"{name} {result[name]['mean']:.3f} +- {result[name]['standard_error']:.3f}"
            for name in ("length", "length_vs_argmax", "speed_vs_argmax")
        ]
        print(f"  {kind:10s} once reached {once} | {' | '.join(cells)}", flush=True)


def save(name: str, drafter: str, part: str, rows: list[dict[str, Any]]) -> None:
    """Write what was found so far: a measurement that is cut off keeps its settings."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"policies": {}}
    result["provenance"] = provenance()
    training = json.loads((Path(drafter) / "training.json").read_text())
    result["policies"].setdefault(name, {}).update({part: rows, "drafter": training})
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
