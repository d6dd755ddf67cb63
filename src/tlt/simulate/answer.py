"""The result of simulated runs: as numbers, in words, and how far to trust it. Pure.

Every answer names its assumptions, and where the simulator was compared with measurements. Those
figures come from `benchmarks/results`; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tlt.simulate.cluster import Cluster, Record
from tlt.simulate.published import nearest
from tlt.simulate.scenario import (
    ScenarioConfig,
    begins_without_drafter,
    calibration_of,
    cluster_of,
    num_nodes,
    workload_of,
)
from tlt.simulate.workload import Workload
from tlt.timing import profiles

Figures = dict[str, dict[str, float]]
"""Figures of every mode."""

LABELS = {
    "off": "no speculation",
    "static": "fixed arm",
    "ngram": "TLT with n-grams only",
    "frozen": "TLT without harvest",
    "tlt": "TLT",
}
"""Names of modes in tables, pictures and sentences."""

VALIDATED = (
    "a tiny model with n-grams, 2 engines on two CPU cores, 32 to 128 samples per RL step, at most "
    "1,800 tokens: RL steps off by 9% in the median, 22% at worst",
    "SmolLM2 with an EAGLE-3 drafter, 2 engines on two CPU cores, 16 samples per RL step, at most "
    "436 tokens: TLT 1.33x end to end, modelled, and 1.46x (1.30 to 1.53), measured",
)
"""Comparisons with runs: `benchmarks/simulator.py` and `benchmarks/simulated_words.py`."""
RANGES = {"ngram": (2, 128, 1800), "eagle3": (2, 16, 436)}
"""Most engines, samples per RL step and tokens of a response in these comparisons, by drafter."""
MIN_SAMPLES = 8
"""Samples per engine below which an answer comes with a warning."""


# --- numbers and words ----------------------------------------------------------------------------


def figures(records: Sequence[Record]) -> dict[str, float]:
    """Return a mode's figures over all RL steps but the first, in which the strategy learns."""
    later = records[1:] or records
    step_s = sum(r["time/step_s"] for r in later)
    rollout_s = sum(r["time/rollout_s"] for r in later)
    found = {
        "step_s": step_s / len(later),
        "rollout_s": rollout_s / len(later),
        "update_s": fmean(r["time/update_s"] for r in later),
        "rollout_share": rollout_s / step_s,
        "idle_share": fmean(r["rollout/idle_share"] for r in later),
        "draft_length": later[-1]["harvest/held_out_length"],
    }
    if "harvest/used_s" in later[-1]:
        coverable_s = sum(r["harvest/coverable_s"] for r in later)
        found["used_share"] = sum(r["harvest/used_s"] for r in later) / max(1e-9, coverable_s)
        found["published"] = sum(r["harvest/published"] for r in later)
    return found


def _speed_up(base: Mapping[str, float], of: Mapping[str, float]) -> dict[str, float]:
    return {
        "end_to_end": base["step_s"] / of["step_s"],
        "rollout": base["rollout_s"] / of["rollout_s"],
    }


def speed_ups(found: Figures) -> dict[str, dict[str, float]]:
    """Return the speed-up of every mode over the first mode."""
    base = next(iter(found.values()))
    return {name: _speed_up(base, of) for name, of in found.items()}


def contributions(found: Figures) -> dict[str, dict[str, float]]:
    """Return how many times as fast TLT is as the fixed arm, and as itself without harvest."""
    others = {"over_fixed_arm": "static", "harvest": "frozen" if "frozen" in found else "ngram"}
    return {
        name: _speed_up(found[other], found["tlt"])
        for name, other in others.items()
        if other in found and "tlt" in found
    }


def in_words(found: Figures, fixed_arm: str = "the fixed arm", from_nothing: bool = False) -> str:
    """Return whether the last mode is worth it, what brings it, and what limits it.

    `from_nothing` says that the run begins without a drafter.
    """
    base, best = next(iter(found)), next(reversed(found))
    gained = _speed_up(found[base], found[best])
    share, idle_share = found[base]["rollout_share"], found[base]["idle_share"]
    most = f"nstant rollouts would bring {1 / max(0.01, 1 - share):.1f}x."
    words = [
        f"Modelled: {LABELS[best]} would run {gained['end_to_end']:.2f}x as fast as "
        f"{LABELS[base]}. Rollouts, {share:.0%} of an RL step, would run "
        f"{gained['rollout']:.2f}x as fast."
    ]
    of = contributions(found)
    if "over_fixed_arm" in of:
        words.append(f"That is {of['over_fixed_arm']['end_to_end']:.2f}x as fast as {fixed_arm}.")
    if "harvest" in of:
        words.append(f"Harvest's part of that is {of['harvest']['end_to_end']:.2f}x.")
    elif from_nothing and "tlt" in found:
        words.append("The whole gain comes from harvest: the run begins without a drafter.")
    if share < 0.5:
        words.append(f"Rollouts are a small part: i{most} Look at the learner.")
    elif idle_share < 0.1:
        words.append("Engines are rarely idle: the tail is short.")
    elif gained["rollout"] < 1.2:
        words.append("Speculation gains little: batches are large, or drafts are rarely accepted.")
    else:
        words.append(f"Engines are idle for {idle_share:.0%} of the rollout. I{most}")
    return " ".join(words)


# --- how far to trust it --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Validity:
    """How far to trust an answer."""

    assumptions: list[str]
    validated: tuple[str, ...]
    """Where the simulator was compared with runs."""
    published: list[str]
    """The nearest published runs, each with the simulator's error; none with a calibration."""
    outside: list[str]
    """Where the scenario leaves that range."""
    warnings: list[str]

    def lines(self) -> list[str]:
        """Return everything as text, one line per statement."""
        return [
            *(f"assumed: {each}" for each in self.assumptions),
            *(f"compared with runs: {each}" for each in self.validated),
            *(f"nearest published run: {each}" for each in self.published),
            f"beyond these comparisons: {'; '.join(self.outside) or 'nothing'}",
        ]


def validity(config: ScenarioConfig) -> Validity:
    """Return what the answer to a scenario assumes, and where it leaves the validated range."""
    cluster, workload = cluster_of(config), workload_of(config)
    of = config.cluster
    near = [] if of.calibration else nearest(of.model, of.tensor_parallel, num_nodes(of))
    return Validity(
        _assumptions(config, cluster, workload),
        VALIDATED,
        [str(case) for case in near],
        _outside(config, cluster, workload),
        few_samples(workload.num_samples, workload.group_size, of.num_engines),
    )


def few_samples(samples: int, group_size: int, num_engines: int) -> list[str]:
    """Return a warning if an RL step has too few samples for its engines."""
    if samples >= MIN_SAMPLES * num_engines:
        return []
    enough = math.ceil(MIN_SAMPLES * num_engines / group_size)
    return [
        f"{samples:,} samples per RL step are {samples / num_engines:.2g} for each of "
        f"{num_engines:,} engines, so the speed-up holds for nearly empty engines; e.g. "
        f"workload.prompts_per_step={enough}, or cluster.num_engines="
        f"{max(1, samples // MIN_SAMPLES)}"
    ]


def _assumptions(config: ScenarioConfig, cluster: Cluster, workload: Workload) -> list[str]:
    learner, training, sizes = cluster.learner, cluster.training, config.workload.lengths
    nodes = num_nodes(config.cluster)
    machine = (
        f"engine steps of {config.cluster.model}, {config.cluster.tensor_parallel} H100 per "
        "engine, calculated from memory bandwidth and operations per second"
    )
    if (found := calibration_of(config)) is not None:
        machine = f"engine steps, acceptance and learner as in the runs {found.source}"
    rates = {name: rates[0] for name, rates in cluster.drafting.rates.items()}
    accepted = ", ".join(f"{name} {rate:.0%}" for name, rate in rates.items()) or "none"
    new = ", as for a new drafter" if begins_without_drafter(config) else ""
    lengths = (
        f"lengths with a median of {sizes.median:,.0f} tokens, {sizes.p95:,.0f} at 95%, at most "
        f"{sizes.longest:,}"
    )
    if config.workload.trace:
        lengths = f"lengths of {config.workload.trace}"
    trees = []
    if found is None and config.drafter.acceptance is None:
        trees.append(
            f"drafts are chains, but their acceptance, {profiles.BEFORE:.0%} at each position, "
            f"comes from published trees; measured chains of SmolLM2 had "
            f"{profiles.MEASURED_CHAIN:.0%}: compare drafter.acceptance={profiles.MEASURED_CHAIN}"
        )
    return [
        machine,
        f"{config.num_steps:,} RL steps, the first not counted, of {workload.num_samples:,} "
        f"samples at any size of the cluster; {lengths}; "
        f"prompts of {workload.prompt_tokens:,.0f} tokens",
        f"first draft tokens accepted: {accepted}; power of EAGLE-3's rates "
        f"{config.drafter.start_power:g} at the start{new}, {training.drift:+.4f} with every "
        "policy update",
        *trees,
        f"a trainer learns from {training.tokens_per_s:,.0f} tokens/s; the drafter's lag behind "
        f"power {training.best_power:g} shrinks e-fold in {training.tokens:,.0f} tokens",
        f"the learner trains on {learner.trained_share:.0%} of the tokens, "
        f"{learner.tokens_per_s:,.0f} tokens/s, and takes {learner.step_s:.1f} s besides",
        f"a weight sync of {learner.sync_s:.2f} s, for {nodes} node{'s' * (nodes > 1)}"
        + (f", by {config.cluster.transport}" if found is None else ""),
    ]


def _outside(config: ScenarioConfig, cluster: Cluster, workload: Workload) -> list[str]:
    calibrated, nodes = calibration_of(config), num_nodes(config.cluster)
    engines, samples, tokens = RANGES["eagle3" if "eagle3" in cluster.drafting.rates else "ngram"]
    leaves = {
        "GPUs": calibrated is None or calibrated.num_gpus > 0,
        f"{cluster.num_engines:,} engines": cluster.num_engines > engines,
        f"{nodes:,} nodes": nodes > 1,
        f"{workload.num_samples:,} samples per RL step": workload.num_samples > samples,
        f"responses of {workload.max_tokens:,} tokens": workload.max_tokens > tokens,
        "engines that die": cluster.engine_deaths_per_hour > 0,
        "a run that begins without a drafter": begins_without_drafter(config),
    }
    return [what for what, does in leaves.items() if does]
