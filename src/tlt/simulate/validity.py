"""What an answer assumes, and where the simulator was compared with measurements. Pure.

Both stand beside every answer. The figures are those of `benchmarks/results`; a test compares them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlt.simulate.calibrate import Calibration
from tlt.simulate.scenario import (
    ScenarioConfig,
    begins_without_drafter,
    cluster_of,
    num_nodes,
    prompt_tokens_of,
    workload_of,
)

VALIDATED = (
    "a tiny model with n-grams, 2 engines on two CPU cores, 32 to 128 samples per RL step, at most "
    "1,800 tokens: RL steps off by 9% in the median, 22% at worst",
    "SmolLM2 with an EAGLE-3 drafter, 2 engines on two CPU cores, 16 samples per RL step, at most "
    "436 tokens: TLT 1.33x end to end, modelled, and 1.46x (1.30 to 1.53), measured",
)
"""Comparisons with runs: `benchmarks/simulator.py` and `benchmarks/simulated_words.py`."""
RANGES = {"ngram": (2, 128, 1800), "eagle3": (2, 16, 436)}
"""Most engines, samples per RL step and tokens of a response in these comparisons, by drafter."""


@dataclass(frozen=True, slots=True)
class Validity:
    """How far to trust an answer."""

    assumptions: tuple[str, ...]
    validated: tuple[str, ...]
    """Where the simulator was compared with runs."""
    outside: tuple[str, ...]
    """Where the scenario leaves that range."""

    def as_data(self) -> dict[str, Any]:
        return {"modelled": True, **asdict(self)}

    def lines(self) -> list[str]:
        """Return everything as text, one line per statement."""
        beyond = "; ".join(self.outside) or "nothing"
        return [
            *(f"assumed: {each}" for each in self.assumptions),
            *(f"compared with runs: {each}" for each in self.validated),
            f"beyond these comparisons: {beyond}",
        ]


def validity(config: ScenarioConfig) -> Validity:
    """Return what the answer to a scenario assumes, and where it leaves the validated range."""
    return Validity(tuple(_assumptions(config)), VALIDATED, tuple(_outside(config)))


def _assumptions(config: ScenarioConfig) -> list[str]:
    cluster, workload = cluster_of(config), workload_of(config)
    learner, training = cluster.learner, cluster.training
    nodes = num_nodes(config.cluster)
    if config.cluster.calibration is None:
        machine = (
            f"engine steps of {config.cluster.model}, {config.cluster.tensor_parallel} H100 per "
            "engine, calculated from memory bandwidth and operations per second"
        )
    else:
        source = Calibration.load(Path(config.cluster.calibration)).source
        machine = f"engine steps, acceptance and learner as in the runs {source or 'calibrated by'}"
    rates = {name: rates[0] for name, rates in cluster.drafting.rates.items()}
    accepted = ", ".join(f"{name} {rate:.0%}" for name, rate in rates.items()) or "none"
    start = f"{config.drafter.start_power:g} at the start"
    if begins_without_drafter(config):
        start += ", that of a new drafter"
    if workload.trace:
        lengths = f"lengths of {config.workload.trace}"
    else:
        sizes = config.workload.lengths
        lengths = (
            f"lengths with a median of {sizes.median:,.0f} tokens, {sizes.p95:,.0f} at 95%, at "
            f"most {sizes.longest:,}"
        )
    return [
        machine,
        f"{config.num_steps:,} RL steps, the first not counted, of {workload.num_samples:,} "
        f"samples at any size of the cluster; {lengths}; "
        f"prompts of {prompt_tokens_of(config):,.0f} tokens",
        f"first draft tokens accepted: {accepted}; power of EAGLE-3's rates {start}, "
        f"{training.drift:+.4f} with every policy update",
        f"a trainer learns from {training.tokens_per_s:,.0f} tokens/s; the drafter's lag behind "
        f"power {training.best_power:g} shrinks e-fold in {training.tokens:,.0f} tokens",
        f"the learner trains on {learner.trained_share:.0%} of the tokens, "
        f"{learner.tokens_per_s:,.0f} tokens/s",
        f"a weight sync of {learner.sync_s:.1f} s, for {nodes} node{'s' * (nodes > 1)}: one "
        "network card sends the policy to all of them",
    ]


def _outside(config: ScenarioConfig) -> list[str]:
    cluster, workload = config.cluster, workload_of(config)
    calibrated = cluster.calibration and Calibration.load(Path(cluster.calibration))
    drafters = cluster_of(config).drafting.rates
    engines, samples, tokens = RANGES["eagle3" if "eagle3" in drafters else "ngram"]
    nodes = num_nodes(cluster)
    leaves = {
        "GPUs": not calibrated or calibrated.num_gpus > 0,
        f"{cluster.num_engines:,} engines": cluster.num_engines > engines,
        f"{nodes:,} nodes": nodes > 1,
        f"{workload.num_samples:,} samples per RL step": workload.num_samples > samples,
        f"responses of {workload.max_tokens:,} tokens": workload.max_tokens > tokens,
        "engines that die": cluster.engine_deaths_per_hour > 0,
        "a run that begins without a drafter": begins_without_drafter(config),
    }
    return [what for what, does in leaves.items() if does]
