"""Specs that name strategies, and the strategies that do not learn.

A strategy crosses process borders as a *spec*, a plain dict; `EXAMPLES` has one of every kind.
`build_strategy` turns the spec into an object next to the scheduler. A kind that learns which arm
is best chooses from all arms of the engine, unless `arms` names some: `complete_strategy`. New
kinds register in `_BUILDERS`.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tlt.config.train import LONGEST_TRAINED
from tlt.contracts import DRAFTERS, OFF, Arm, DrafterName, StepContext, StepReport, Strategy
from tlt.errors import ConfigError
from tlt.strategy.adaptive import Adaptive, Caution
from tlt.strategy.beg_mab import EPSILON, BegMab

StrategySpec = Mapping[str, Any]

EXAMPLES = {
    "off": '{ kind = "off" }',
    "fixed": '{ kind = "fixed", drafter = "eagle3", num_draft_tokens = 4 }',
    "by_batch_size": '{ kind = "by_batch_size", drafter = "eagle3", schedule = [[4, 4], [16, 2]] }',
    "random": '{ kind = "random", arms = [["ngram", 2], ["off", 0]] }',
    "adaptive": '{ kind = "adaptive" }',
    "beg_mab": '{ kind = "beg_mab", epsilon = 0.1, seed = 0 }',
}
"""A spec of every kind, in TOML."""
TRAINED_ON_CPU = 4
"""Draft length that a drafter is trained for on CPU cores."""
LEARNING = ("adaptive", "beg_mab")
"""Kinds that find the best of their arms while decoding."""


class _Unlearning:
    """A strategy that chooses from `_arms` and learns nothing."""

    _arms: Sequence[Arm]

    def arms(self, num_decodes: int | None = None) -> frozenset[Arm]:
        return frozenset(self._arms)

    def observe(self, report: StepReport) -> None:
        pass


class Fixed(_Unlearning):
    """One arm for the whole run; `OFF` never drafts."""

    def __init__(self, arm: Arm) -> None:
        self._arms = [arm]

    def decide(self, context: StepContext) -> Arm:
        return self._arms[0]


class ByBatchSize(_Unlearning):
    """A draft length for each number of running decodes, and plain decoding above the last entry.

    `schedule` is a list of (largest number of decodes, draft length). Prefills do not count: a
    burst of new prompts should not change how the running requests decode.
    """

    def __init__(self, drafter: DrafterName, schedule: Sequence[tuple[int, int]]) -> None:
        if not schedule:
            raise ConfigError("strategy.schedule is empty; e.g. [[4, 4], [16, 2]]")
        limits = [limit for limit, _ in schedule]
        if limits != sorted(set(limits)) or limits[0] < 1:
            raise ConfigError(
                f"strategy.schedule needs rising batch sizes from 1 on, got {limits}; "
                "e.g. [[4, 4], [16, 2]]"
            )
        if drafter not in DRAFTERS:
            raise ConfigError(
                f"strategy.drafter = {drafter!r} is not a drafter; e.g. 'eagle3' or 'ngram'"
            )
        self._limits = limits
        self._arms = [Arm(drafter, k) if k else OFF for _, k in schedule] + [OFF]

    def arms(self, num_decodes: int | None = None) -> frozenset[Arm]:
        return frozenset(self._arms if num_decodes is None else [self._at(num_decodes)])

    def decide(self, context: StepContext) -> Arm:
        return self._at(context.num_decodes)

    def _at(self, num_decodes: int) -> Arm:
        return self._arms[bisect_left(self._limits, num_decodes)]


class RandomArms(_Unlearning):
    """A random arm at each engine step: the hardest test of switching."""

    def __init__(self, arms: Sequence[Arm], rng: random.Random) -> None:
        if not arms:
            raise ConfigError('strategy.arms is empty; e.g. [["eagle3", 4], ["off", 0]]')
        self._arms = list(arms)
        self._rng = rng

    def decide(self, context: StepContext) -> Arm:
        return self._rng.choice(self._arms)


def _build_adaptive(spec: StrategySpec) -> Strategy:
    caution = {key: value for key, value in spec.items() if key not in ("kind", "arms")}
    unknown = sorted(caution.keys() - {field.name for field in fields(Caution)})
    if unknown:
        known = ", ".join(field.name for field in fields(Caution))
        raise ConfigError(f"strategy.{unknown[0]} is not known to kind 'adaptive'; one of {known}")
    for key, value in caution.items():
        _check_number(key, value)
    return Adaptive(_arms(spec), Caution(**caution))


def _check_number(key: str, value: Any, largest: float = 1e9) -> float:
    """Return a number from 0 to `largest`, or refuse the value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= largest:
        raise ConfigError(
            f"strategy.{key} = {repr(value)[:40]} should be a number from 0 to {largest:g}; or "
            "leave it out"
        )
    return float(value)


def _arms(spec: StrategySpec) -> list[Arm]:
    return [parse_arm(arm) for arm in spec["arms"]]


_BUILDERS: dict[str, Callable[[StrategySpec], Strategy]] = {
    "off": lambda spec: Fixed(OFF),
    "fixed": lambda spec: Fixed(parse_arm([spec["drafter"], spec["num_draft_tokens"]])),
    "by_batch_size": lambda spec: ByBatchSize(
        spec["drafter"], [(int(b), int(k)) for b, k in spec["schedule"]]
    ),
    "random": lambda spec: RandomArms(_arms(spec), random.Random(spec.get("seed", 0))),
    "adaptive": _build_adaptive,
    "beg_mab": lambda spec: BegMab(
        _arms(spec),
        random.Random(spec.get("seed", 0)),
        epsilon=_check_number("epsilon", spec.get("epsilon", EPSILON), 1.0),
    ),
}


def parse_arm(value: Sequence[Any]) -> Arm:
    """Parse an arm such as `["eagle3", 4]`."""
    drafter, num_draft_tokens = value
    if drafter not in ("off", *DRAFTERS):
        names = ", ".join(map(repr, ("off", *DRAFTERS)))
        raise ConfigError(f"unknown drafter {drafter!r}; one of {names}")
    try:
        return Arm(drafter, int(num_draft_tokens))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def complete_strategy(
    spec: StrategySpec, drafters: Collection[DrafterName], on_gpu: bool = False
) -> dict[str, Any]:
    """Return the spec with all arms of an engine with these drafters, if it names no arms."""
    if spec.get("kind") not in LEARNING or spec.get("arms"):
        return dict(spec)
    found = [(name, DRAFTERS[name]) for name in sorted(drafters)]
    arms = [
        [name, k]
        for name, drafter in found
        for k in (drafter.gpu_draft_lengths if on_gpu else drafter.draft_lengths)
    ]
    return {**spec, "arms": [["off", 0], *arms]}


def trained_draft_tokens(spec: StrategySpec, on_gpu: bool) -> int:
    """Return the draft length to train a drafter for that this strategy uses.

    On GPUs, whose engines use long drafts, it is the longest one. On CPU cores every further
    pass of the training takes long, and few drafts are accepted that far.
    """
    if not on_gpu:
        return TRAINED_ON_CPU
    models = [name for name, drafter in DRAFTERS.items() if not drafter.module]
    arms = build_strategy(complete_strategy(spec, models, on_gpu)).arms()
    lengths = [arm.num_draft_tokens for arm in arms if arm.uses_model]
    return min(max(lengths, default=TRAINED_ON_CPU), LONGEST_TRAINED)


def build_strategy(spec: StrategySpec) -> Strategy:
    """Build the strategy that a spec describes."""
    kind = spec.get("kind")
    if kind not in _BUILDERS:
        raise ConfigError(f"strategy.kind is {kind!r}; one of {sorted(_BUILDERS)}")
    try:
        return _BUILDERS[kind](spec)
    except KeyError as error:
        raise ConfigError(
            f"strategy of kind {kind!r} needs the key {error}; e.g. {EXAMPLES[kind]}"
        ) from error
