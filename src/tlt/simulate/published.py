"""Published speed-ups of RL steps by speculation, and what the simulator finds for each of them.

The figures come from `benchmarks/published.py`, which names the assumptions of each case; a test
compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tlt.timing.profiles import MODELS


@dataclass(frozen=True, slots=True)
class Case:
    """One published run, end to end."""

    run: str
    model: str
    gpus_per_engine: int
    nodes: int
    published: float
    simulated: float

    @property
    def error(self) -> float:
        """Share by which the simulated speed-up is above the published one."""
        return self.simulated / self.published - 1

    def __str__(self) -> str:
        """Return the case and its error."""
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        return (
            f"{self.run}, {self.model} on {nodes}, {self.gpus_per_engine} GPU"
            f"{'s' * (self.gpus_per_engine > 1)} per engine: {self.published:.2f}x published, "
            f"{self.simulated:.2f}x modelled, {self.error:+.0%}"
        )


CASES = (
    Case("TLT paper", "qwen2.5-7b", 1, 1, 1.21, 1.838),
    Case("TLT paper", "qwen2.5-7b", 1, 2, 1.45, 2.194),
    Case("TLT paper", "qwen2.5-7b", 1, 4, 1.62, 2.533),
    Case("TLT paper", "qwen2.5-7b", 1, 8, 1.76, 2.637),
    Case("TLT paper", "qwen2.5-7b", 2, 1, 1.21, 1.475),
    Case("TLT paper", "qwen2.5-7b", 2, 2, 1.45, 1.709),
    Case("TLT paper", "qwen2.5-7b", 2, 4, 1.62, 1.945),
    Case("TLT paper", "qwen2.5-7b", 2, 8, 1.76, 2.147),
    Case("TLT paper", "qwen2.5-7b", 4, 1, 1.21, 1.253),
    Case("TLT paper", "qwen2.5-7b", 4, 2, 1.45, 1.403),
    Case("TLT paper", "qwen2.5-7b", 4, 4, 1.62, 1.565),
    Case("TLT paper", "qwen2.5-7b", 4, 8, 1.76, 1.706),
    Case("TLT paper", "qwen2.5-32b", 4, 4, 1.83, 1.82),
    Case("TLT paper", "qwen2.5-32b", 4, 8, 2.12, 2.157),
    Case("SkyRL", "qwen3-8b", 1, 1, 1.62, 2.357),
    Case("NeMo-RL, RL-Think", "qwen3-8b", 1, 8, 1.35, 2.126),
    Case("NeMo-RL, RL-Zero", "qwen3-8b", 1, 8, 1.41, 2.443),
)


def nearest(model: str, gpus_per_engine: int, nodes: int) -> list[Case]:
    """Return the nearest cases: first by size of the model, then by GPUs per engine, then by nodes.

    Models whose sizes differ by less than a factor of 1.4 count as the same size.
    """

    def distance(case: Case) -> tuple[float, ...]:
        size = abs(math.log2(MODELS[model][0] / MODELS[case.model][0]))
        parallel = abs(math.log2(gpus_per_engine / case.gpus_per_engine))
        return round(size), parallel, abs(math.log2(nodes / case.nodes))

    least = min(map(distance, CASES))
    return [case for case in CASES if distance(case) == least]
