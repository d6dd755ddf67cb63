"""What a benchmark generates: prompts, and response lengths fixed in advance.

Lengths are fixed so that two ways of decoding do exactly the same work. They come from a file, or
from a log-normal distribution, whose tail looks like that of reasoning models: most responses are
short, a few are very long.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlt.contracts import SampleRequest, SamplingSpec
from tlt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LengthSpec:
    """Response lengths: log-normal with this median and 95th percentile, cut off at `longest`."""

    num_requests: int = 64
    median: int = 60
    p95: int = 500
    longest: int = 1500
    seed: int = 0

    def draw(self) -> list[int]:
        if not 1 <= self.median <= self.p95 <= self.longest:
            raise ConfigError(
                f"lengths need 1 <= median <= p95 <= longest, got {self.median}, {self.p95}, "
                f"{self.longest}; e.g. 60, 500, 1500"
            )
        rng = random.Random(self.seed)
        sigma = math.log(self.p95 / self.median) / 1.645
        return [
            max(1, min(self.longest, round(self.median * math.exp(sigma * rng.gauss(0, 1)))))
            for _ in range(self.num_requests)
        ]


def read_lengths(path: Path) -> list[int]:
    """Lengths from a JSON list, or from a text file with one number per line."""
    text = path.read_text()
    values = json.loads(text) if text.lstrip().startswith("[") else text.split()
    lengths = [int(value) for value in values]
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"{path}: expected response lengths of at least 1, e.g. [60, 75, 1500]")
    return lengths


def arithmetic_prompts(count: int, seed: int = 0) -> list[str]:
    """Small word problems, each another one."""
    rng = random.Random(seed)
    templates = (
        "What is {a} + {b} * {c}? Think step by step, then give the answer.",
        "Tom has {a} apples and buys {b} bags of {c} apples each. How many apples does he have? "
        "Explain your reasoning.",
        "A train travels {a} km in the first hour and {b} km in each of the next {c} hours. How "
        "far does it go? Show your work.",
        "Compute ({a} - {b}) * {c} and explain each step.",
    )
    return [
        rng.choice(templates).format(
            a=rng.randint(10, 99), b=rng.randint(2, 60), c=rng.randint(2, 12)
        )
        for _ in range(count)
    ]


def tokenize_chat(model: str, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    """Prompts as the model's chat template puts them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        encoded.append(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return encoded


def requests(
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    *,
    run: str,
    temperature: float,
    top_p: float = 1.0,
) -> list[SampleRequest]:
    """One request per length; prompts repeat when there are fewer of them."""
    return [
        SampleRequest(
            sample_id=f"{run}/{index}",
            prompt_token_ids=prompts[index % len(prompts)],
            sampling=SamplingSpec(
                max_tokens=length,
                temperature=temperature,
                top_p=top_p,
                ignore_eos=True,
                logprobs=True,
            ),
        )
        for index, length in enumerate(lengths)
    ]


def describe(spec: LengthSpec | None, lengths: Sequence[int]) -> dict[str, Any]:
    ordered = sorted(lengths)
    return {
        "source": asdict(spec) if spec else "file",
        "num_requests": len(ordered),
        "total_tokens": sum(ordered),
        "median": ordered[len(ordered) // 2],
        "longest": ordered[-1],
        "lengths": list(lengths),
    }
