"""The responses of an RL step: how many, how long, on which engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from tlt.errors import ConfigError
from tlt.observe.record import read_lengths
from tlt.tasks.tail import HeavyTail


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of responses: drawn, or taken in turn from the RL steps of a real run."""

    prompts: int
    group_size: int
    prompt_tokens: float
    lengths: HeavyTail | None = None
    trace: tuple[tuple[int, ...], ...] = ()

    @property
    def num_samples(self) -> int:
        return self.prompts * self.group_size

    def of_step(self, step: int, seed: int) -> Any:
        """Return the lengths of all samples of an RL step, as an array."""
        if self.trace:
            taken = self.trace[(step - 1) % len(self.trace)]
            rng = np.random.default_rng((seed, step))
            if len(taken) == self.num_samples:
                return np.array(taken, dtype=float)
            return rng.choice(np.array(taken, dtype=float), self.num_samples)
        assert self.lengths is not None
        return spread(self.lengths, self.num_samples, np.random.default_rng((seed, step)))


_PLACES = 1 / (1 + np.exp(-np.linspace(-16, 16, 4001)))
_DEVIATIONS = np.array([NormalDist().inv_cdf(float(place)) for place in _PLACES])


def spread(lengths: HeavyTail, count: int, rng: Any) -> Any:
    """Draw one length from each equally likely part, as `HeavyTail.spread` does, with NumPy."""
    places = (np.arange(count) + rng.uniform(0.01, 0.99, count)) / count
    sizes = lengths.median * np.exp(lengths.sigma * np.interp(places, _PLACES, _DEVIATIONS))
    rng.shuffle(sizes)
    return np.clip(np.round(sizes), 1, lengths.longest)


def read_trace(path: Path) -> tuple[tuple[int, ...], ...]:
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


def spread_over(lengths: Any, num_engines: int) -> Any:
    """Deal samples to engines as the dispatcher does: one after another, round by round.

    Returns an array of engines by places; unused places are 0.
    """
    per_engine = -(-len(lengths) // num_engines)
    dealt = np.zeros(per_engine * num_engines)
    dealt[: len(lengths)] = lengths
    return dealt.reshape(per_engine, num_engines).T


def ends(sorted_lengths: Any, seconds_per_token: Any) -> Any:
    """Return when each sample of each engine ends.

    `sorted_lengths` has engines by places, in rising order. `seconds_per_token(running, low, high)`
    returns the seconds in which `running` requests grow from length `low` to length `high`.
    """
    places = sorted_lengths.shape[1]
    low = np.concatenate([np.zeros((len(sorted_lengths), 1)), sorted_lengths[:, :-1]], axis=1)
    running = np.arange(places, 0, -1)[None, :]
    # Unused places come first and take no time.
    return np.cumsum(seconds_per_token(running, low, sorted_lengths), axis=1)
