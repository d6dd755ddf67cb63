"""Two parts of DAPO (arXiv 2503.14476): dynamic sampling, and the soft penalty of long responses.

Dynamic sampling replaces groups without a signal, whose samples all have the same reward, by groups
of extra problems. `Replacements` starts the next extra problem for each such group, so at its end
it has started the shortest prefix of the RL step's problems that holds enough groups with a signal.
That prefix does not depend on the order in which groups complete: engines, drafts, kills and
timing change neither the samples of an RL step nor the groups of its update.

Pure. `Rollouts` generates, and `Groups` finds out which groups have a signal.
"""

from __future__ import annotations

from tlt.config.train import AlgorithmConfig


class Replacements:
    """Decides how many of an RL step's problems to start: first those asked for, then extra ones.

    Problems are numbered in the order of the RL step. `num_wanted` groups with a signal are enough.
    """

    def __init__(self, num_wanted: int, num_problems: int) -> None:
        assert num_wanted <= num_problems
        self._num_wanted = num_wanted
        self._num_problems = num_problems
        self._without_signal: set[int] = set()
        self.num_started = num_wanted
        """Problems that the RL step has started."""

    def observe(self, number: int) -> None:
        """Note that the group of a problem that was started has no signal."""
        assert number < self.num_started
        self._without_signal.add(number)

    def decide(self) -> range:
        """Return the numbers of the problems to start now."""
        first = self.num_started
        wanted = self._num_wanted + len(self._without_signal)
        self.num_started = min(wanted, self._num_problems)
        return range(first, self.num_started)

    @property
    def are_left(self) -> bool:
        """Whether an extra problem is left."""
        return self.num_started < self._num_problems


def overlong_penalty(num_tokens: int, max_tokens: int, algorithm: AlgorithmConfig) -> float:
    """Return the penalty of a response, which rises linearly over the last tokens."""
    if not algorithm.overlong_tokens:
        return 0.0
    over = num_tokens - (max_tokens - algorithm.overlong_tokens)
    return algorithm.overlong_penalty * max(0, over) / algorithm.overlong_tokens
