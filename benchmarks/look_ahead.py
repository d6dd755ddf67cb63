"""Look-ahead, measured: how much of a text survives one policy update under the same noise.

    python benchmarks/look_ahead.py --start raw --model models/smollm2
    python benchmarks/look_ahead.py --start cool --model models/smollm2
    python benchmarks/look_ahead.py --start sft --model runs/draft_noise/sft  # of draft_noise.sh

Look-ahead would generate the samples of the next RL step with the present policy, on idle engines.
After the update these texts are drafts. With keyed noise (`tlt.vllm.keyed`) a sample has the
same noise under both policies, so both draw the same token unless the update moved the draw.

A call is one short RL run: one engine, one learner rank (`tlt.learner`), GRPO, AdamW without
warm-up and weight decay, float32. At the first and the last update, the policy before the update
generates the samples of the next RL step ahead of time ("old text"). The policy after the update
generates them again ("new text"). AdamW moves the weights by the learning rate times a direction
that does not depend on it. So the last update is made at each of `--lrs`, from the same policy,
gradients and optimizer state. The run itself uses the last of these rates. Then:

    per token     both policies' logits on the old text (transformers, one pass each): KL(old||new),
                  total variation (TV), whether the new policy draws the old token, the lower bound
                  (1-TV)/(1+TV) of that; by the old policy's entropy
    per text      tokens until old and new text differ; of the tokens after that, the share that the
                  old text predicts at the same position, and after a match of 4 tokens or more
    as drafts     tokens per engine step with drafts of 4 and 8 tokens from the old text, and from
                  the old text of another sample of the same prompt, which had other noise

Starts: `raw` and `cool` write a paragraph that uses five given words, at temperature 1 and 0.6;
`sft` works out sums after `tlt sft`, at temperature 1. All runs go into
benchmarks/results/look_ahead.json; a run replaces the one of the same start.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULT = Path(__file__).parent / "results" / "look_ahead.json"
BINS = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0)
"""Lower limits of the bins of entropy, in nats."""
MIN_MATCH = 4
"""Tokens that must match before a place in the old text counts as found again."""
DRAFT_LENGTHS = (4, 8)
ROW_TOKENS = 2048
"""Tokens of one packed row of the learner."""


# --- old and new text ---------------------------------------------------------------------------


def first_difference(old: Sequence[int], new: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ; None if they are the same text."""
    for position, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            return position
    return None if len(old) == len(new) else min(len(old), len(new))


def places(old: Sequence[int], new: Sequence[int], min_match: int = MIN_MATCH) -> list[int | None]:
    """Return for each position of the new text where the old text would be drafted from.

    That is the same position while the texts are equal so far, and again wherever the last
    `min_match` tokens are equal there. Elsewhere it is the end of the longest match of at least
    `min_match` tokens, the nearest of several. None if there is no such match, or nothing behind
    it.
    """
    text = np.asarray(old)
    matched = np.zeros(len(old) + 1, np.int64)  # [place]: equal tokens before old[place]
    found: list[int | None] = []
    for position in range(len(new)):
        if position:
            matched[1:] = np.where(text == new[position - 1], matched[:-1] + 1, 0)
        usable = matched[: len(old)]
        here = usable[position] if position < len(old) else -1
        longest = usable.max(initial=0)
        if here >= min(position, min_match):
            found.append(position)
        elif longest >= min_match:
            ends = np.flatnonzero(usable == longest)
            found.append(int(ends[np.abs(ends - position).argmin()]))
        else:
            found.append(None)
    return found


def engine_steps(old: Sequence[int], new: Sequence[int], draft_length: int) -> int:
    """Return the engine steps of the new text with drafts from the old one."""
    sources = places(old, new)
    position = steps = 0
    while position < len(new):
        source = sources[position]
        accepted = 0
        if source is not None:
            for drafted, drawn in zip(
                old[source : source + draft_length], new[position:], strict=False
            ):
                if drafted != drawn:
                    break
                accepted += 1
        position += accepted + 1
        steps += 1
    return steps


def compare(old: Sequence[int], new: Sequence[int], other: Sequence[int]) -> dict[str, Any]:
    """Return where two texts of one sample part, what follows, and what drafts would save.

    `other` is the old text of another sample of the same prompt.
    """
    parted = first_difference(old, new)
    after = range(len(new) if parted is None else parted + 1, len(new))
    sources = places(old, new)
    return {
        "num_tokens": len(new),
        "first_difference": parted,
        "tokens_after": len(after),
        "same_position": sum(p < len(old) and old[p] == new[p] for p in after),
        "by_match": sum(q is not None and old[q] == new[p] for p in after for q in [sources[p]]),
        "steps": {str(k): engine_steps(old, new, k) for k in DRAFT_LENGTHS},
        "steps_other": {str(k): engine_steps(other, new, k) for k in DRAFT_LENGTHS},
    }


# --- two policies on the same text --------------------------------------------------------------


def compare_tokens(
    old_TV: Any, new_TV: Any, tokens: Sequence[int], seed: int, temperature: float
) -> dict[str, np.ndarray[Any, Any]]:
    """Return entropy, KL, TV and keyed draws of two policies at each position of an old text."""
    old_logp_TV = (old_TV / temperature).log_softmax(-1)
    new_logp_TV = (new_TV / temperature).log_softmax(-1)
    old_p_TV = old_logp_TV.exp()
    text = np.asarray(tokens)
    return {
        "entropy": -(old_p_TV * old_logp_TV).sum(-1).numpy(),
        "kl": (old_p_TV * (old_logp_TV - new_logp_TV)).sum(-1).clamp(min=0).numpy(),
        "tv": 0.5 * (old_p_TV - new_logp_TV.exp()).abs().sum(-1).numpy(),
        "redrawn": keyed_draws(old_TV.numpy(), seed, temperature) == text,
        "agrees": keyed_draws(new_TV.numpy(), seed, temperature) == text,
    }


def keyed_draws(logits: Any, seed: int, temperature: float) -> Any:
    """Return the token that a sample's noise draws at each position of its response."""
    from tlt.vllm import keyed

    count = len(logits)
    tokens = np.zeros((count, 1), np.int32)
    keyed.draw_rows(
        np.ascontiguousarray(logits, np.float32),
        np.zeros(count, np.int64),
        np.zeros(0, np.int64),
        np.full(count, seed, np.uint64),
        np.arange(count, dtype=np.int64),
        np.float32(1) / np.full(count, temperature, np.float32),
        keyed.NOTHING,
        tokens,
        np.zeros((count, 1), np.float32),
        np.zeros((count, 1), np.int64),
    )
    return tokens[:, 0]


def by_entropy(token: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, float]]:
    """Return sums over the tokens of each bin of entropy."""
    bin_of = np.digitize(token["entropy"], BINS) - 1
    bound = (1 - token["tv"]) / (1 + token["tv"])
    found = []
    for index, low in enumerate(BINS):
        of = bin_of == index
        found.append(
            {
                "entropy_from": low,
                "tokens": int(of.sum()),
                "entropy": float(token["entropy"][of].sum()),
                "kl": float(token["kl"][of].sum()),
                "tv": float(token["tv"][of].sum()),
                "bound": float(bound[of].sum()),
                "agreed": int(token["agrees"][of].sum()),
                "redrawn": int(token["redrawn"][of].sum()),
            }
        )
    return found


# --- tasks --------------------------------------------------------------------------------------

TOPICS = (
    *("a lighthouse", "bread", "the first day at school", "a long train journey", "bees"),
    *("a small island", "learning to swim", "rain", "an old library", "the moon", "a market"),
    *("growing tomatoes", "a lost dog", "winter", "a bicycle", "the sea", "a teacher"),
    *("a power cut", "chess", "a mountain village", "the invention of paper", "sleep"),
)
WORDS = (
    *("river", "quiet", "green", "remember", "window", "carefully", "bridge", "salt", "morning"),
    *("neighbour", "paper", "friend", "cold", "music", "stone", "garden", "promise", "light"),
    *("water", "story", "always", "small", "hands", "road", "winter", "question", "bright"),
    *("evening", "market", "simple", "letter", "birds", "kitchen", "together", "slow", "map"),
)


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question, and how good an answer to it is, from 0 to 1."""

    question: str
    reward: Callable[[str], float]


def words(step: int, count: int) -> list[Exercise]:
    """Return questions for a paragraph; the reward is the share of the given words in it."""
    rng = random.Random(f"words/{step}")
    made = []
    for topic in rng.sample(TOPICS, count):
        wanted = rng.sample(WORDS, 5)

        def reward(text: str, wanted: list[str] = wanted) -> float:
            used = set(re.findall(r"[a-z]+", text.lower()))
            return len(used.intersection(wanted)) / len(wanted)

        question = f"Write a paragraph about {topic}. Use these words: {', '.join(wanted)}."
        made.append(Exercise(question, reward))
    return made


def chain_sum(step: int, count: int) -> list[Exercise]:
    """Return sums of up to 20 terms; the reward is the share of the solution's lines."""
    from tlt.tasks.gym import problems
    from tlt.tasks.tail import HeavyTail

    sizes, digits = HeavyTail(19, 20, 20), {"min_digits": 1, "max_digits": 1}
    made = []
    for problem in problems("chain_sum", count, step, "look-ahead", sizes, digits):
        lines = problem.solution.split("\n")

        def reward(text: str, lines: list[str] = lines) -> float:
            written = set(text.split("\n"))
            return sum(line in written for line in lines) / len(lines)

        made.append(Exercise(problem.question, reward))
    return made


STARTS = {"raw": (words, 1.0), "cool": (words, 0.6), "sft": (chain_sum, 1.0)}
"""Task and sampling temperature of a run."""


# --- the run ------------------------------------------------------------------------------------

_engine: Any = None
"""The engine of the child process: vLLM wants a process of its own."""


def _start(config: Any) -> None:
    global _engine
    from tlt.rollout.engine import RolloutEngine

    _engine = RolloutEngine(config)
    _engine.start()


def _generate(requests: list[Any]) -> list[Any]:
    _engine.submit(requests)
    samples: dict[str, Any] = {}
    while len(samples) < len(requests):
        samples |= {s.sample_id: s for s in _engine.take_finished(timeout_s=10.0)}
    return [samples[request.sample_id] for request in requests]


def _load(manifest: dict[str, Any], version: int) -> None:
    _engine.update_policy(manifest, version)


def _stop() -> None:
    _engine.shutdown()


class Run:
    """A short RL run whose consecutive policies are compared."""

    def __init__(self, options: argparse.Namespace, engine: ProcessPoolExecutor) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from tlt.config.train import AlgorithmConfig, LearnerConfig
        from tlt.learner.batch import Weighting
        from tlt.learner.rank import LearnerRank, RankSettings
        from tlt.tasks.chat import Chat

        self.options = options
        self.engine = engine
        self.chat = Chat(options.model)
        self.weighting = Weighting("tokens", options.max_tokens)
        self.lr = options.lrs[-1]
        self.task, self.temperature = STARTS[options.start]
        settings = RankSettings(
            options.model,
            "float32",
            self.temperature,
            self.weighting,
            AlgorithmConfig(),
            LearnerConfig(lr=self.lr, row_tokens=ROW_TOKENS),
        )
        self.rank = LearnerRank(settings, torch.device("cpu"))
        self.plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        """The policy that computes logits and goes into the engine."""

    def run(self, save: Callable[[dict[str, Any]], None]) -> None:
        """Take the RL steps; save one record per measured update and learning rate."""
        pairs, updates, started = [], [], time.perf_counter()
        exercises, requests = self.prepare(1)
        samples = self.generate(requests)
        last = self.options.num_updates
        for update in range(1, last + 1):
            measured = update in (1, last)
            num_prompts = self.options.last_prompts if update == last else None
            ahead_exercises, ahead = self.prepare(update + 1, num_prompts)
            before = {name: p.detach().clone() for name, p in self.plain.named_parameters()}
            if measured:
                old = self.generate(ahead)
                old_logits = self.logits(ahead, old)
            updates.append(self.learn(exercises, requests, samples))
            show(f"update {update}", updates[-1], started)
            exercises, requests = ahead_exercises, ahead
            for lr in self.options.lrs if update == last else [self.lr]:
                change = self.move_policy(before, lr)
                samples = self.generate(requests)
                if measured:
                    pair = self.measure(requests, old, samples, old_logits)
                    pairs.append({"update": update, "lr": lr, "rms_change_of_lr": change, **pair})
                    show(f"learning rate {lr}", summary(pair), started)
                    seconds = time.perf_counter() - started
                    save({"updates": updates, "pairs": pairs, "seconds": seconds})

    def prepare(
        self, step: int, num_prompts: int | None = None
    ) -> tuple[list[Exercise], list[Any]]:
        """Return the questions and requests of an RL step."""
        from tlt.contracts import SampleRequest, SamplingSpec

        exercises = self.task(step, num_prompts or self.options.prompts)
        requests = []
        for number, exercise in enumerate(exercises):
            prompt = self.chat.prompt(exercise.question)
            for place in range(self.options.group_size):
                name = f"{step}/{number}/{place}"
                seed = random.Random(f"look-ahead/{name}").getrandbits(63)
                spec = SamplingSpec(self.options.max_tokens, self.temperature, seed=seed)
                requests.append(SampleRequest(name, prompt, spec))
        return exercises, requests

    def generate(self, requests: list[Any]) -> list[Any]:
        return self.engine.submit(_generate, requests).result()

    def learn(
        self, exercises: list[Exercise], requests: list[Any], samples: list[Any]
    ) -> dict[str, float]:
        """Update the learner's policy on the samples of an RL step."""
        from tlt.contracts import Scored
        from tlt.learner.advantage import grpo
        from tlt.learner.batch import Groups, rows_by_rank

        groups = Groups(self.options.group_size, grpo)
        trained, rewards = [], []
        for index, (request, sample) in enumerate(zip(requests, samples, strict=True)):
            number, place = divmod(index, self.options.group_size)
            text = self.chat.text(sample.token_ids)
            rewards.append(exercises[number].reward(text))
            scored = Scored(number, place, request, sample, text, rewards[-1], None)
            trained += groups.add(scored)
        useful = [sample for sample in trained if sample.advantage]
        if useful:
            self.rank.accumulate(rows_by_rank(useful, ROW_TOKENS, 1)[0])
        lengths = [len(s.token_ids) for s in samples]
        report = self.rank.step(self.weighting.denominator(lengths), math.inf)
        return {
            "reward_mean": sum(rewards) / len(rewards),
            "tokens_mean": sum(lengths) / len(lengths),
            "groups_with_signal": groups.num_with_signal,
            "grad_norm": report.grad_norm,
            "gap_mean": report.sums.gap / max(report.sums.learned_tokens, 1),
        }

    def move_policy(self, before: dict[str, Any], lr: float) -> float:
        """Make the learner's last update at this learning rate, and load it into the engine.

        Return the root mean square of the change, in learning rates.
        """
        import torch

        from tlt.node.weights import SharedWeights

        left, squares, count = dict(self.plain.named_parameters()), 0.0, 0
        with torch.no_grad():
            for name, tensor in self.rank.full_weights(torch.float32):
                if name in left:
                    change = tensor - before[name]
                    left.pop(name).copy_(
                        tensor if lr == self.lr else before[name] + change * (lr / self.lr)
                    )
                    squares += float(change.square().sum())
                    count += change.numel()
        assert not left, f"the learner has no {sorted(left)}"
        with SharedWeights(self.plain.named_parameters()) as weights:
            self.engine.submit(_load, weights.manifest(), self.rank.num_updates).result()
        return math.sqrt(squares / count) / self.lr

    def logits(self, requests: list[Any], samples: list[Any]) -> list[Any]:
        """Return the policy's logits at every position of the responses."""
        import torch

        found = []
        with torch.no_grad():
            for request, sample in zip(requests, samples, strict=True):
                ids = torch.tensor([[*request.prompt_token_ids, *sample.token_ids]])
                keep = len(sample.token_ids) + 1
                out = self.plain(input_ids=ids, logits_to_keep=keep, use_cache=False)
                found.append(out.logits[0, :-1])
        return found

    def measure(
        self, requests: list[Any], old: list[Any], new: list[Any], old_logits: list[Any]
    ) -> dict[str, Any]:
        """Compare the present policy with that of the old texts."""
        new_logits = self.logits(requests, old)
        tokens, texts = [], []
        for index, request in enumerate(requests):
            of = compare_tokens(
                old_logits[index],
                new_logits[index],
                old[index].token_ids,
                request.sampling.seed,
                self.temperature,
            )
            group = self.options.group_size
            other = index // group * group + (index + 1) % group
            text = compare(old[index].token_ids, new[index].token_ids, old[other].token_ids)
            parted = np.flatnonzero(~of["agrees"])
            expected = int(parted[0]) if len(parted) else None
            text["as_teacher_forced"] = expected == text["first_difference"]
            text["entropy"] = float(of["entropy"].mean())
            tokens.append(of)
            texts.append(text)
        together = {key: np.concatenate([of[key] for of in tokens]) for key in tokens[0]}
        return {"by_entropy": by_entropy(together), "texts": texts}


def summary(pair: dict[str, Any]) -> dict[str, Any]:
    """Return the means over all tokens, and where the texts part."""
    keys = ("entropy", "kl", "tv", "agreed", "bound", "redrawn")
    bins = pair["by_entropy"]
    count = sum(of["tokens"] for of in bins)
    means = {key: sum(of[key] for of in bins) / count for key in keys}
    return {**means, "parts at": [text["first_difference"] for text in pair["texts"]]}


def show(what: str, values: dict[str, Any], started: float) -> None:
    told = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
    print(f"{time.perf_counter() - started:.0f} s, {what}: {', '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", choices=STARTS, required=True, help="which row of the table")
    parser.add_argument("--model", required=True)
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-6, 2e-5, 5e-6])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--num-updates", type=int, default=5)
    parser.add_argument("--last-prompts", type=int, default=6, help="prompts after the last update")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch.distributed as dist

    from tlt.config.rollout import EngineConfig
    from tlt.observe.provenance import provenance

    dist.init_process_group(
        "gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1
    )
    config = EngineConfig(
        model=options.model,
        core_group="look_ahead",
        engine_args={
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 640,
            "max_num_seqs": max(options.prompts, options.last_prompts) * options.group_size,
            "logprobs_mode": "processed_logprobs",  # at the temperature, as the learner's
        },
    )

    def save(found: dict[str, Any]) -> None:
        left_out = ("out", "model")
        settings = {key: value for key, value in vars(options).items() if key not in left_out}
        doc = json.loads(options.out.read_text()) if options.out.exists() else {"runs": []}
        kept = [run for run in doc["runs"] if run["start"] != options.start]
        run = {**settings, **found}
        runs = sorted([*kept, run], key=lambda run: run["start"])
        text = json.dumps({"provenance": provenance(), "runs": runs}, indent=1)
        options.out.write_text(text + "\n")

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as engine:
        engine.submit(_start, config).result()
        try:
            Run(options, engine).run(save)
        finally:
            engine.submit(_stop).result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
