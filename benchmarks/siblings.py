"""What siblings teach: tokens of n-gram drafts that are accepted, by what the drafter knows.

    python benchmarks/siblings.py [--model models/smollm2-words] [--prompts 8]

Samples groups of 16 responses to word problems with one engine, speculation off, and replays them
offline: a draft is accepted as far as it equals what was sampled, which has the probability with
which the engine would have accepted it.

`known`: each response alone, with a history that holds its own text and 0, 1, 5 or 15 siblings that
have ended; `other prompts` holds as many responses as 15 siblings, to other problems.

`spread`: all groups at once, one token or accepted draft after the other, each group spread over 1,
2, 4 or 16 engines. Engines learn nothing from each other (`apart`), learn responses that have ended
(`ended`), or also running ones, every 32 engine steps (`running`). Writes results/siblings.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tlt.observe.provenance import provenance

RESULT = Path(__file__).parent / "results" / "siblings.json"
GROUP = 16
SIBLINGS = (0, 1, 5, 15)
ENGINES = (1, 2, 4, 16)
DRAFTED = (4, 8)
MAX_TOKENS = 480
RUNNING_STEPS = 32
"""Engine steps between two hand-overs of running responses."""

Text = tuple[list[int], list[int]]
"""Prompt and response."""


def sample(model: str, num_prompts: int) -> list[list[Text]]:
    """Return groups of responses to word problems of the recipe's sizes."""
    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.rollout.offline import generate
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems
    from tlt.tasks.tail import HeavyTail

    chat = Chat(model)
    asked = problems("word_problems", num_prompts, seed=77, sizes=HeavyTail(2, 6, 14))
    prompts = [chat.prompt(problem.question) for problem in asked]
    requests = [
        SampleRequest(
            f"{index}/{place}", prompt, SamplingSpec(MAX_TOKENS, seed=GROUP * index + place)
        )
        for index, prompt in enumerate(prompts)
        for place in range(GROUP)
    ]
    config = EngineConfig(
        model=model,
        kv_cache_gib=0.5,
        core_group="siblings",
        engine_args={
            **{"enforce_eager": True, "max_model_len": 640},
            **{"max_num_seqs": 32, "dtype": "float32"},
        },
    )
    texts = [
        (list(request.prompt_token_ids), list(found.token_ids))
        for request, found in zip(requests, generate(config, requests), strict=True)
    ]
    return [texts[start : start + GROUP] for start in range(0, len(texts), GROUP)]


@dataclass(slots=True)
class Count:
    """What drafts brought."""

    steps: int = 0
    """Tokens that were sampled after a draft, or without one."""
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def result(self) -> dict[str, float]:
        return asdict(self) | {
            "tokens_per_step": self.tokens / self.steps,
            "accepted_per_draft": self.accepted / self.drafts,
        }


@dataclass(slots=True)
class Engine:
    """The n-gram drafter of an engine, and the responses that it decodes."""

    history: Any
    running: dict[str, Text]
    done: dict[str, int] = field(default_factory=dict)
    """Tokens of each running response so far."""

    def __post_init__(self) -> None:
        self.done = dict.fromkeys(self.running, 1)

    def step(self, num_drafted: int, count: Count) -> dict[str, Text]:
        """Decode one step of every running response, and return those that end."""
        if not self.running:
            return {}
        texts = [
            prompt + response[: self.done[name]]
            for name, (prompt, response) in self.running.items()
        ]
        lengths = [len(text) for text in texts]
        rows: Any = np.zeros((len(texts), max(lengths)), dtype=np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        num_prompt = [len(prompt) for prompt, _ in self.running.values()]
        wanted = [num_drafted] * len(texts)
        drafts = self.history.draft(list(self.running), num_prompt, lengths, rows, wanted)
        for (name, (_, response)), draft in zip(self.running.items(), drafts, strict=True):
            rest = response[self.done[name] :]
            good = 0
            while good < min(len(draft), len(rest)) and draft[good] == rest[good]:
                good += 1
            count.steps += 1
            count.tokens += min(good + 1, len(rest))
            count.drafts += bool(draft)
            count.accepted += good
            self.done[name] += good + 1
        ended = {n: text for n, text in self.running.items() if self.done[n] >= len(text[1])}
        for name, text in ended.items():
            learn(self.history, name, text)
            del self.running[name], self.done[name]
        return ended


def learn(history: Any, name: str, text: Text) -> None:
    """Let a history learn a response that has ended."""
    prompt, response = text
    history.end(name, len(prompt), np.array(prompt + response, dtype=np.int32))


def learn_running(history: Any, name: str, text: Text, num_tokens: int) -> None:
    """Let a history learn the first tokens of a response that goes on."""
    prompt, response = text
    so_far: Any = np.array([prompt + response[:num_tokens]], dtype=np.int32)
    history.draft([name], [len(prompt)], [so_far.shape[1]], so_far, [0])


def decode_alone(target: Text, known: Sequence[Text], num_drafted: int, count: Count) -> None:
    """Decode a response with a history of these texts."""
    from tlt.vllm.ngram.history import History

    engine = Engine(History(1 << 15, 2, 8), {"target": target})
    for number, text in enumerate(known):
        learn(engine.history, f"known {number}", text)
    while engine.running:
        engine.step(num_drafted, count)


def decode_spread(
    groups: list[list[Text]], num_engines: int, hand_over: str, num_drafted: int
) -> Count:
    """Decode all groups at once, each spread over the engines."""
    from tlt.vllm.ngram.history import History

    count = Count()
    shares: list[dict[str, Text]] = [{} for _ in range(num_engines)]
    for number, group in enumerate(groups):
        for place, text in enumerate(group):
            shares[place % num_engines][f"{number}/{place}"] = text
    engines = [Engine(History(1 << 17, 2, 8), share) for share in shares]
    for step in range(MAX_TOKENS):
        for engine in engines:
            others = [other for other in engines if other is not engine]
            for name, text in engine.step(num_drafted, count).items():
                if hand_over != "apart":
                    for other in others:
                        learn(other.history, name, text)
            if hand_over == "running" and step % RUNNING_STEPS == RUNNING_STEPS - 1:
                for name, text in engine.running.items():
                    for other in others:
                        learn_running(other.history, name, text, engine.done[name])
    assert not any(engine.running for engine in engines)
    return count


def known_cases(groups: list[list[Text]]) -> dict[str, list[tuple[Text, list[Text]]]]:
    """Return each response, and the texts known to it, by the name of the case."""
    rng = random.Random(0)
    cases: dict[str, list[tuple[Text, list[Text]]]] = {str(count): [] for count in SIBLINGS}
    cases["other prompts"] = []
    for number, group in enumerate(groups):
        others = [text for other, texts in enumerate(groups) if other != number for text in texts]
        for place, target in enumerate(group):
            siblings = group[:place] + group[place + 1 :]
            rng.shuffle(siblings)
            for count in SIBLINGS:
                cases[str(count)].append((target, siblings[:count]))
            cases["other prompts"].append((target, rng.sample(others, min(15, len(others)))))
    return cases


def measure(groups: list[list[Text]], num_drafted: int) -> dict[str, Any]:
    """Return what is accepted of drafts of this length."""
    known = {}
    for name, case in known_cases(groups).items():
        count = Count()
        for target, texts in case:
            decode_alone(target, texts, num_drafted, count)
        known[name] = count.result()
    spread = {
        str(num_engines): {
            hand_over: decode_spread(groups, num_engines, hand_over, num_drafted).result()
            for hand_over in (("apart", "ended", "running") if num_engines > 1 else ("apart",))
        }
        for num_engines in ENGINES
    }
    return {"known": known, "spread": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-words")
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args()
    sampled = sample(options.model, options.prompts)
    groups = [[text for text in group if len(text[1]) > 2] for group in sampled]
    lengths = [len(response) for group in groups for _, response in group]
    result: dict[str, Any] = {
        "provenance": provenance(),
        "options": vars(options),
        "responses": len(lengths),
        "tokens": sum(lengths),
        "drafted": {str(num_drafted): measure(groups, num_drafted) for num_drafted in DRAFTED},
    }
    for num_drafted, found in result["drafted"].items():
        for kind, cases in found.items():
            print(num_drafted, kind, json.dumps(_rounded(cases)))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def _rounded(cases: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(case["tokens_per_step"], 3) if "tokens" in case else _rounded(case)
        for name, case in cases.items()
    }


if __name__ == "__main__":
    main()
