"""The responses of an RL step: how many, how long, to which prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from tlt.errors import ConfigError
from tlt.observe.record import read_lengths
from tlt.tasks.tail import HeavyTail

Trace = tuple[tuple[int, ...], ...]
"""Lengths of the responses of a run, by RL step."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of responses: drawn, or taken in turn from the RL steps of a real run."""

    prompts: int
    group_size: int
    prompt_tokens: float
    lengths: HeavyTail | Trace
    prompt_share: float = 0.0
    """Share of the variance of the lengths' logarithms that prompts explain."""
    epoch_steps: int = 0
    """RL steps after which prompts come again; 0 for new prompts in every RL step."""

    @property
    def num_samples(self) -> int:
        return self.prompts * self.group_size

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens that a response may have."""
        lengths = self.lengths
        return lengths.longest if isinstance(lengths, HeavyTail) else max(map(max, lengths))

    def of_step(self, step: int, seed: int) -> Any:
        """Return the lengths of all samples of an RL step, as an array."""
        rng = np.random.default_rng((seed, step))
        if isinstance(self.lengths, HeavyTail):
            sizes = spread(self.lengths, self.num_samples, rng)
            found = np.empty_like(sizes)
            found[np.argsort(self._deviations(step, seed, rng))] = sizes
            return found
        taken = np.array(self.lengths[(step - 1) % len(self.lengths)], dtype=float)
        return taken if len(taken) == self.num_samples else rng.choice(taken, self.num_samples)

    def _deviations(self, step: int, seed: int, rng: Any) -> Any:
        """Return how far each response is from a usual length, in standard deviations."""
        turn = (step - 1) % self.epoch_steps if self.epoch_steps else step
        prompts = np.random.default_rng((seed, turn * self.prompts, 1))
        of_prompts = prompts.standard_normal(self.prompts)
        own = rng.standard_normal(self.num_samples)
        share = self.prompt_share
        return np.repeat(of_prompts, self.group_size) * share**0.5 + own * (1 - share) ** 0.5


_PLACES = 1 / (1 + np.exp(-np.linspace(-16, 16, 4001)))
_DEVIATIONS = np.array([NormalDist().inv_cdf(float(place)) for place in _PLACES])


def spread(lengths: HeavyTail, count: int, rng: Any) -> Any:
    """Draw one length from each equally likely part, as `HeavyTail.spread`; in rising order."""
    places = (np.arange(count) + rng.uniform(0.01, 0.99, count)) / count
    sizes = lengths.median * np.exp(lengths.sigma * np.interp(places, _PLACES, _DEVIATIONS))
    return np.clip(np.round(sizes), 1, lengths.longest)


def read_trace(path: Path) -> Trace:
    """Read the lengths of every RL step from `lengths.jsonl` of a run."""
    way_out = "give lengths.jsonl of a `tlt train`"
    try:
        found = tuple(tuple(tokens) for tokens in read_lengths(path) if any(tokens))
    except OSError as error:
        raise ConfigError(
            f"workload.trace: {path} cannot be read ({error.strerror}); {way_out}"
        ) from error
    if not found:
        raise ConfigError(f"workload.trace: {path} holds no lengths of a run; {way_out}")
    return found
