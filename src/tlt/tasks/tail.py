"""Heavy-tailed sizes: most are small and a few very large, like answers of reasoning models."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from tlt.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeavyTail:
    """A log-normal distribution with this median and 95th percentile, cut off at `longest`."""

    median: float
    p95: float
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.median <= self.p95 <= self.longest:
            raise ConfigError(
                f"sizes need 1 <= median <= p95 <= longest, got {self.median}, {self.p95}, "
                f"{self.longest}; e.g. 60, 500, 1500"
            )

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p95 / self.median) / 1.645

    def draw(self, rng: random.Random) -> int:
        return self._at(rng.gauss(0, 1))

    def spread(self, count: int, rng: random.Random) -> list[int]:
        """Draw the sizes of a batch, one from each of `count` equally likely parts.

        Every batch then has its share of the tail, so batches are similar in work and difficulty.
        """
        places = [(place + rng.uniform(0.01, 0.99)) / count for place in range(count)]
        rng.shuffle(places)
        return [self._at(NormalDist().inv_cdf(place)) for place in places]

    def _at(self, deviations: float) -> int:
        size = round(self.median * math.exp(self.sigma * deviations))
        return max(1, min(self.longest, size))


def length_summary(lengths: Sequence[int]) -> dict[str, int]:
    """Return median, 99th percentile and maximum."""
    ordered = sorted(lengths)
    return {
        "median_tokens": ordered[len(ordered) // 2],
        "p99_tokens": ordered[int(0.99 * len(ordered))],
        "longest_tokens": ordered[-1],
    }
