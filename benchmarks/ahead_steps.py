"""Look-ahead in an engine: engine steps by how much of the text was generated ahead.

    python benchmarks/ahead_steps.py --start cool
    python benchmarks/ahead_steps.py --start sft --model runs/draft_noise/sft  # of draft_noise.sh
    python benchmarks/ahead_steps.py --tiny --out /tmp/ahead_steps.json  # a minute, to try it

`benchmarks/look_ahead.py` compares texts; this runs the engine with them. A call is a short RL run
of its kind: one engine, one learner rank, GRPO, AdamW, float32. Before the last update the engine
generates the samples of the next RL step ahead, as an idle engine does in a run. The last update is
made at each of `--lrs`, from the same policy, gradients and optimizer state. Then the new policy
generates its samples with fixed n-gram arms, and with 0, a quarter, half or all of each text: as
long as the idle time was. A share of 0 is the n-gram drafter without look-ahead.

All of these give the same samples in every bit, or the script fails. It counts the engine steps of
each request: tokens less accepted draft tokens. Runs of several `--max-tokens` show what the length
of responses changes. Writes results/ahead_steps.json; a run replaces the one of the same start,
model and length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import look_ahead

RESULT = Path(__file__).parent / "results" / "ahead_steps.json"
SHARES = (0.0, 0.25, 0.5, 1.0)
DRAFT_LENGTHS = (4, 8, 16)
Texts = dict[str, list[int]]


# --- in the engine's process --------------------------------------------------------------------


_turns = itertools.count(1)


def _look_ahead(requests: list[Any]) -> Texts:
    """Return the texts of these samples, generated as an idle engine does."""
    from tlt.rollout.ahead import PREFIX, LookAhead
    from tlt.rollout.lengths import LengthForecast

    turn, plan = next(_turns), LookAhead(LengthForecast(), time.monotonic)
    plan.plan(requests)
    found: Texts = {}
    new = plan.next(len(requests))
    while len(found) < len(requests):
        texts, is_over = look_ahead._engine.look_ahead(turn, new, 10.0)
        assert not is_over, "the engine cannot look ahead"
        found |= {text.name.removeprefix(PREFIX): text.tokens.tolist() for text in texts}
        new = []
    look_ahead._engine.end_look_ahead(turn)
    return found


def _generate(
    num_draft_tokens: int, requests: list[Any], texts: Texts
) -> tuple[list[Any], dict[str, Any]]:
    """Return the samples, and the engine's counters, with a history of these texts only."""
    from array import array

    from tlt.contracts import EngineStats
    from tlt.rollout.texts import Lesson

    engine = look_ahead._engine
    engine.reset_prefix_cache()
    strategy = {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": num_draft_tokens}
    engine.set_strategy(strategy if num_draft_tokens else {"kind": "off"})
    lessons = [
        Lesson(r.prompt_token_ids, array("i", texts[r.sample_id]), sample_id=r.sample_id)
        for r in requests
        if texts.get(r.sample_id)
    ]
    before = engine.stats()
    engine.learn(lessons)
    samples = look_ahead._generate(requests)
    return samples, asdict(EngineStats.difference([before], [engine.stats()]))


# --- the run ------------------------------------------------------------------------------------


def begin_of(texts: Texts, share: float) -> Texts:
    """Return the first part of each text, as if look-ahead had been aborted."""
    return {name: tokens[: round(share * len(tokens))] for name, tokens in texts.items()}


def counted(stats: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine did; `request_steps` counts an engine step once for each request."""
    tokens, accepted = stats["output_tokens"], stats["accepted_tokens"]
    return {
        "tokens": tokens,
        "request_steps": tokens - accepted,
        "engine_steps": stats["steps"],
        "drafts": stats["drafts"],
        "draft_tokens": stats["draft_tokens"],
        "accepted_tokens": accepted,
        "busy_s": stats["busy_s"],
    }


class Steps(look_ahead.Run):
    """A short RL run whose last update is followed by an engine with texts of look-ahead."""

    def measured(self) -> dict[str, Any]:
        """Take the RL steps, and return the counts of every learning rate, arm and share."""
        from tlt.node.weights import SharedWeights

        started = time.perf_counter()
        with SharedWeights(self.plain.named_parameters()) as weights:
            self.engine.submit(look_ahead._load, weights.manifest(), 0).result()
        exercises, requests = self.prepare(1)
        samples = self.generate(requests)
        updates, found = [], []
        for update in range(1, self.options.num_updates + 1):
            is_last = update == self.options.num_updates
            num_prompts = self.options.last_prompts if is_last else None
            next_exercises, ahead = self.prepare(update + 1, num_prompts)
            before = {name: p.detach().clone() for name, p in self.plain.named_parameters()}
            texts = self.engine.submit(_look_ahead, ahead).result() if is_last else {}
            updates.append(self.learn(exercises, requests, samples))
            look_ahead.show(f"update {update}", updates[-1], started)
            exercises, requests = next_exercises, ahead
            if not is_last:
                self.move_policy(before, self.lr)
                samples = self.generate(requests)
                continue
            for lr in self.options.lrs:
                self.move_policy(before, lr)
                found.append({"lr": lr, **self.with_texts(requests, texts)})
                look_ahead.show(f"learning rate {lr}", self.told(found[-1]), started)
        return {"updates": updates, "rates": found, "seconds": time.perf_counter() - started}

    def with_texts(self, requests: list[Any], texts: Texts) -> dict[str, Any]:
        """Return the counts of a policy by arm and share; its samples must be the same in all."""
        from tlt.rollout.ahead import common_length

        off, stats = self.engine.submit(_generate, 0, requests, {}).result()
        expected = [(sample.token_ids, sample.logprobs) for sample in off]
        lengths = [len(sample.token_ids) for sample in off]
        repeated = [common_length(texts[s.sample_id], s.token_ids) for s in off]
        arms: dict[str, dict[str, Any]] = {"off": {"0": counted(stats)}}
        for num_draft_tokens in DRAFT_LENGTHS:
            arm = arms.setdefault(f"ngram:{num_draft_tokens}", {})
            for share in SHARES:
                part = begin_of(texts, share)
                new, stats = self.engine.submit(
                    _generate, num_draft_tokens, requests, part
                ).result()
                same = [(s.token_ids, s.logprobs) for s in new] == expected
                assert same, f"samples differ: {num_draft_tokens} draft tokens, {share} of the text"
                arm[f"{share:g}"] = counted(stats)
        return {
            "lengths": lengths,
            "text_lengths": [len(texts[s.sample_id]) for s in off],
            "repeated": repeated,
            "arms": arms,
        }

    @staticmethod
    def told(rate: dict[str, Any]) -> dict[str, Any]:
        """Return tokens per request and engine step, to print."""
        return {
            "repeated": sum(rate["repeated"]) / sum(rate["text_lengths"]),
            **{
                f"{arm} {share}": of["tokens"] / of["request_steps"]
                for arm, shares in rate["arms"].items()
                for share, of in shares.items()
            },
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--start", choices=look_ahead.STARTS, default="raw", help="task, temperature"
    )
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-6, 2e-5, 5e-6])
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--num-updates", type=int, default=2)
    parser.add_argument("--last-prompts", type=int, default=3, help="prompts after the last update")
    parser.add_argument("--tiny", action="store_true", help="the tiny model and short responses")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.model, options.max_tokens, options.lrs = "models/tiny", [24], [1e-5, 1e-4]
        options.prompts = options.last_prompts = options.group_size = 2

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch.distributed as dist

    from tlt.config.rollout import EngineConfig
    from tlt.observe.provenance import provenance

    dist.init_process_group(
        "gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1
    )
    config = EngineConfig(
        model=options.model,
        core_group="ahead_steps",
        strategy={"kind": "fixed", "drafter": "ngram", "num_draft_tokens": max(DRAFT_LENGTHS)},
        engine_args={
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": max(options.max_tokens) + 256,
            "max_num_seqs": max(options.prompts, options.last_prompts) * options.group_size,
            "logprobs_mode": "processed_logprobs",  # at the temperature, as the learner's
        },
    )
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as engine:
        engine.submit(look_ahead._start, config).result()
        try:
            for max_tokens in options.max_tokens:
                left_out = ("out", "max_tokens", "tiny")
                settings = {k: v for k, v in vars(options).items() if k not in left_out}
                one = argparse.Namespace(**settings, max_tokens=max_tokens)
                found = {**settings, "max_tokens": max_tokens, **Steps(one, engine).measured()}
                _save(options.out, found, provenance())
        finally:
            engine.submit(look_ahead._stop).result()
    dist.destroy_process_group()


def _save(out: Path, run: dict[str, Any], where: dict[str, Any]) -> None:
    def key(of: dict[str, Any]) -> tuple[str, str, int]:
        return of["start"], of["model"], of["max_tokens"]

    runs = json.loads(out.read_text())["runs"] if out.exists() else []
    runs = sorted([*(of for of in runs if key(of) != key(run)), run], key=key)
    out.write_text(json.dumps({"provenance": where, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
