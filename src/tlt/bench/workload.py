"""The work of a benchmark: prompts, and response lengths fixed in advance.

Fixed lengths make all modes do exactly the same work. Lengths come from a file or from a log-normal
distribution with a tail like that of reasoning models: most responses are short, a few very long.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlt.contracts import SampleRequest, SamplingSpec
from tlt.errors import ConfigError
from tlt.tasks.tail import HeavyTail


@dataclass(frozen=True, slots=True)
class LengthSpec:
    """Log-normal response lengths with this median and 95th percentile, cut off at `longest`."""

    num_requests: int
    median: int
    p95: int
    longest: int
    seed: int

    def draw(self) -> list[int]:
        """Draw the lengths."""
        rng = random.Random(self.seed)
        tail = HeavyTail(self.median, self.p95, self.longest)
        return [tail.draw(rng) for _ in range(self.num_requests)]


def read_lengths(path: Path) -> list[int]:
    """Read lengths from a JSON list, or from a text file with one number per line."""
    text = path.read_text()
    values = json.loads(text) if text.lstrip().startswith("[") else text.split()
    lengths = [int(value) for value in values]
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"{path}: expected response lengths of at least 1, e.g. [60, 75, 1500]")
    return lengths


def requests(
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    *,
    run: str,
    temperature: float,
    top_p: float = 1.0,
) -> list[SampleRequest]:
    """Return one request per length. Prompts repeat when there are fewer prompts than lengths."""
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
    """Return the lengths and their summary, as plain data."""
    ordered = sorted(lengths)
    return {
        "source": asdict(spec) if spec else "file",
        "num_requests": len(ordered),
        "total_tokens": sum(ordered),
        "median": ordered[len(ordered) // 2],
        "longest": ordered[-1],
        "lengths": list(lengths),
    }
