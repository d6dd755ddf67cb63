"""The calculator of examples/calculator_agent with waits: median 0.5 s, 99th percentile 5 s.

A call waits as long in every arm and every run: its wait follows from the story and its number.
"""

import hashlib
import math
import sys
import time
from pathlib import Path
from statistics import NormalDist
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "examples" / "calculator_agent"))
from calculator import Calculator

MEDIAN_S, P99_S = 0.5, 5.0
SIGMA = math.log(P99_S / MEDIAN_S) / NormalDist().inv_cdf(0.99)


class SlowCalculator(Calculator):
    """A tool that takes its time."""

    def reset(self, **problem: Any) -> None:
        super().reset()
        self._story = problem["question"]

    def calculate(self, sum: str) -> str:
        """Work out a sum.

        Args:
            sum: Such as 4 + 1 or 5 - 2.
        """
        self._wait()
        return super().calculate(sum)

    def _wait(self) -> None:
        text = f"{self.num_calls}/{self._story}".encode()
        share = int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "big") / 2**48
        share = min(max(share, 1e-6), 1 - 1e-6)
        time.sleep(MEDIAN_S * math.exp(SIGMA * NormalDist().inv_cdf(share)))
