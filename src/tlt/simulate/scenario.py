"""A scenario to simulate: cluster, workload and modes, read from TOML like every config."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tlt.config.rollout import Transfer
from tlt.config.schema import LONGEST_S, Schema
from tlt.config.tasks import SizesConfig
from tlt.config.train import ModelName, TltConfig
from tlt.errors import ConfigError
from tlt.harvest.coordinator import coordinator_settings
from tlt.simulate import clock
from tlt.simulate.calibrate import Calibration
from tlt.simulate.cluster import Cluster, Learner, Mode, Record, Simulation, Training
from tlt.simulate.workload import Workload, read_trace
from tlt.strategy.spec import build_strategy
from tlt.tasks.tail import HeavyTail
from tlt.timing import profiles
from tlt.timing.model import Drafting, powers

ModeName = Literal["off", "static", "ngram", "frozen", "tlt"]
DraftTokens = Annotated[int, Field(ge=1, le=64)]
PROMPT_TOKENS = 300.0
"""Tokens per prompt without a calibration."""
SEARCH_STEPS = 2
"""RL steps that find the best fixed arm, for each state of the drafter."""
SEARCH_SHARES = (1 / 6, 1 / 2, 5 / 6)
"""Where in a run with much drift the best fixed arm is sought."""
MUCH_DRIFT = 0.1
"""Drift over a run, as a power of acceptance rates, up to which the start stands for the whole
run."""
MAX_SAMPLES = 10_000_000
"""Samples of an RL step above which a simulation would take hours."""


class ClusterConfig(Schema):
    """The cluster."""

    num_engines: int = Field(default=8, ge=1, le=100_000)
    """Number of engines."""
    calibration: str | None = None
    """Result of `tlt simulate calibrate`, the model of a measured machine."""
    model: ModelName = "qwen2.5-7b"
    """Policy on H100s, modelled from published figures; used without `calibration`."""
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    """GPUs per engine."""
    gpus_per_node: int = Field(default=8, ge=1, le=1024)
    """GPUs of a node, or CPU engines."""
    transport: Transfer = "ipc"
    """Transfer of the policy from learner to engines, as `placement.weights` of a run; used without
    `calibration`."""
    slots: int = Field(default=256, ge=1, le=100_000)
    """Requests that an engine runs at the same time (vLLM's `max_num_seqs`)."""
    engine_deaths_per_hour: float = Field(default=0.0, ge=0, le=3600)
    """Failures of one engine per hour."""
    engine_start_s: float = Field(default=120.0, ge=0, le=LONGEST_S)
    """Seconds until a new engine replaces a failed one."""


class WorkloadConfig(Schema):
    """The samples of an RL step."""

    prompts_per_step: int = Field(default=64, ge=1, le=100_000)
    """Problems per RL step."""
    group_size: int = Field(default=16, ge=1, le=10_000)
    """Samples per problem."""
    prompt_tokens: float | None = Field(default=None, ge=0, le=10_000_000)
    """Tokens per prompt; by default from the calibration, or 300."""
    lengths: SizesConfig = Field(
        default_factory=lambda: SizesConfig(median=2500, p95=12000, longest=32768)
    )
    """Lengths of responses in tokens: median, 95th percentile, longest."""
    prompt_share: float = Field(default=0.65, ge=0, le=1)
    """Share of the variance of the lengths' logarithms that prompts explain; the rest differs from
    sample to sample."""
    epoch_steps: int = Field(default=0, ge=0)
    """RL steps after which prompts come again; 0 for new prompts in every RL step."""
    trace: str | None = None
    """File `lengths.jsonl` of a run, used instead of `lengths`."""

    @model_validator(mode="after")
    def _is_feasible(self) -> WorkloadConfig:
        samples = self.prompts_per_step * self.group_size
        if samples > MAX_SAMPLES:
            raise ValueError(
                f"at most {MAX_SAMPLES:,} samples per RL step, but prompts_per_step x group_size "
                f"is {samples:,}"
            )
        return self


class LearnerSection(Schema):
    """The rest of an RL step; by default from the calibration, or calculated for the model."""

    tokens_per_s: float | None = Field(default=None, gt=0)
    """Training tokens per second of all ranks together."""
    step_s: float | None = Field(default=None, ge=0)
    """Seconds of an update besides its tokens: collectives and the optimizer."""
    trained_share: float | None = Field(default=None, ge=0, le=1)
    """Share of the samples whose group has different rewards, and is trained on."""
    reward_s: float | None = Field(default=None, ge=0)
    """Seconds from the last sample to the last reward."""
    sync_s: float | None = Field(default=None, ge=0)
    """Seconds of the weight sync; by default calculated for the model, `cluster.transport` and the
    number of nodes, or from the calibration, times the number of nodes."""


class DrafterSection(Schema):
    """The drafter: its acceptance, how it falls as the policy changes, how training restores it."""

    acceptance: float | None = Field(default=None, gt=0, lt=1)
    """Share of first draft tokens accepted; its powers are the shares at later positions."""
    start_power: float = Field(default=1.0, gt=0, le=1000)
    """Power of EAGLE-3's acceptance rates at the start: above 1 the drafter lags behind the policy,
    a new drafter has 17."""
    drift: float | None = Field(default=None, ge=0, le=1000)
    """Amount that every policy update adds to the power of EAGLE-3's acceptance rates; by default
    from the calibration, or 0.0003, as measured with SmolLM2."""
    best_power: float | None = Field(default=None, gt=0, le=1000)
    """Power of EAGLE-3's acceptance rates that training approaches; by default from the
    calibration, or 1."""
    training_tokens: float | None = Field(default=None, ge=1)
    """Training tokens that shrink the drafter's lag e-fold; by default from the calibration, or a
    million."""
    training_tokens_per_s: float | None = Field(default=None, gt=0)
    """Training tokens per second of one trainer; by default from the calibration, or 10,000."""


class ScenarioConfig(Schema):
    """A scenario to simulate."""

    num_steps: int = Field(default=20, ge=1, le=10_000)
    """RL steps to simulate."""
    seed: int = Field(default=0, ge=0)
    """Seed of lengths and noise."""
    modes: list[ModeName] = Field(
        default=["off", "static", "frozen", "tlt"], min_length=1, max_length=5
    )
    """Modes to compare with the first one: `off` (no speculation), `static` (a fixed strategy with
    a frozen drafter), `ngram` (adaptive, n-grams only), `frozen` (TLT without harvest: adaptive,
    with a frozen drafter) and `tlt`."""
    draft_tokens: list[DraftTokens] = Field(
        default_factory=lambda: [1, 2, 3, 4, 6, 8], min_length=1, max_length=64
    )
    """Draft lengths that the adaptive strategy chooses from."""
    static_draft_tokens: DraftTokens | None = None
    """Draft length of the `static` mode; by default the fastest of `draft_tokens`."""
    static_drafter: Literal["eagle3", "ngram"] | None = None
    """Drafter of the `static` mode; by default the faster one."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    learner: LearnerSection = Field(default_factory=LearnerSection)
    drafter: DrafterSection = Field(default_factory=DrafterSection)
    tlt: TltConfig = Field(default_factory=TltConfig)
    """Harvest of the mode `tlt`, as in a run; `enabled` and `harvest` are the modes' affair."""


def begins_without_drafter(config: ScenarioConfig) -> bool:
    """Say whether the drafter of a scenario knows as little as a new one."""
    return config.drafter.start_power >= profiles.NEW_DRAFTER


def num_nodes(cluster: ClusterConfig) -> int:
    """Return the number of nodes that the engines take."""
    return math.ceil(cluster.num_engines * cluster.tensor_parallel / cluster.gpus_per_node)


def calibration_of(config: ScenarioConfig) -> Calibration | None:
    """Load the calibration of a scenario that has one."""
    path = config.cluster.calibration
    return None if path is None else Calibration.load(Path(path))


def cluster_of(config: ScenarioConfig) -> Cluster:
    """Return the cluster: from the calibration or from published figures, with the overrides."""
    cluster, drafter = config.cluster, config.drafter
    found = calibration_of(config)
    if found is None:
        found = _published(cluster)
    else:  # measured on one node; the policy is sent to each
        once = found.learner
        found = replace(found, learner=replace(once, sync_s=once.sync_s * num_nodes(cluster)))
    asked = {
        "drift": drafter.drift,
        "tokens": drafter.training_tokens,
        "best_power": drafter.best_power,
        "tokens_per_s": drafter.training_tokens_per_s,
    }
    rates = found.drafting.rates
    if drafter.acceptance is not None:
        rates = rates | {"eagle3": powers(drafter.acceptance)}
    return Cluster(
        found.engine,
        Drafting(rates, found.drafting.power),
        cluster.num_engines,
        replace(found.learner, **config.learner.model_dump(exclude_none=True)),
        replace(found.training, **{k: v for k, v in asked.items() if v is not None}),
        cluster.engine_deaths_per_hour,
        cluster.engine_start_s,
        cluster.slots,
    )


def _published(cluster: ClusterConfig) -> Calibration:
    """Return the model of H100s; refuse an engine whose GPUs do not hold the policy."""
    parameters, kv_bytes = profiles.MODELS[cluster.model]
    weights, gpu = 2 * parameters, profiles.GPU_BYTES
    if cluster.tensor_parallel < weights / gpu:
        raise ConfigError(
            f"cluster.tensor_parallel = {cluster.tensor_parallel}: {weights / 1e9:.0f} GB of "
            f"weights of {cluster.model} do not fit GPUs of {gpu / 1e9:.0f} GB; e.g. "
            f"cluster.tensor_parallel={2 ** math.ceil(math.log2(weights / gpu))}"
        )
    num_gpus, of_node = cluster.num_engines * cluster.tensor_parallel, cluster.gpus_per_node
    nodes = num_nodes(cluster)
    learner = Learner(
        tokens_per_s=profiles.training_speed(cluster.model, num_gpus),
        step_s=profiles.update_fixed_s(cluster.model, num_gpus, of_node),
        sync_s=profiles.sync_s(parameters, cluster.transport, nodes, min(num_gpus, of_node)),
    )
    return Calibration(
        profiles.h100(parameters, kv_bytes, cluster.tensor_parallel),
        Drafting({"eagle3": powers(profiles.BEFORE)}),
        learner,
        PROMPT_TOKENS,
        Training(drift=profiles.DRIFT),
    )


def workload_of(config: ScenarioConfig) -> Workload:
    """Return the workload, with the lengths of a trace if one is given."""
    workload = config.workload
    prompt_tokens = workload.prompt_tokens
    if prompt_tokens is None:
        found = calibration_of(config)
        prompt_tokens = found.prompt_tokens if found else PROMPT_TOKENS
    sizes = workload.lengths
    try:
        lengths = HeavyTail(sizes.median, sizes.p95, sizes.longest)
    except ConfigError as error:
        raise ConfigError(f"workload.lengths: {error}") from error
    return Workload(
        workload.prompts_per_step,
        workload.group_size,
        prompt_tokens,
        read_trace(Path(workload.trace)) if workload.trace else lengths,
        workload.prompt_share,
        workload.epoch_steps,
    )


def mode_of(name: str, config: ScenarioConfig, drafting: Drafting) -> Mode:
    """Return a mode by name: its strategy, and its harvest if it has one.

    The arm of `static` is set: `completed` finds it.
    """
    if name == "off":
        spec: dict[str, Any] = {"kind": "off"}
    elif name == "static":
        length = config.static_draft_tokens
        spec = {"kind": "fixed", "drafter": config.static_drafter, "num_draft_tokens": length}
    else:
        drafters = [d for d in drafting.rates if name != "ngram" or d == "ngram"]
        arms = [[drafter, n] for drafter in drafters for n in config.draft_tokens]
        spec = {"kind": "adaptive", "arms": [["off", 0], *arms]}
    harvest = coordinator_settings(config.tlt, publish=True) if name == "tlt" else None
    return Mode(name, lambda: build_strategy(spec), harvest)


def _check_rates(config: ScenarioConfig, drafting: Drafting) -> None:
    """Refuse modes whose acceptance was never measured."""
    fixed = "static" in config.modes and config.static_drafter == "ngram"
    if ("ngram" in config.modes or fixed) and "ngram" not in drafting.rates:
        raise ConfigError(
            "modes: how many n-grams the policy accepts is not known without a run; give the "
            "calibration of a run with n-grams as cluster.calibration=calibration.json, or "
            'modes=["off","tlt"]'
        )
    if "tlt" in config.modes and begins_without_drafter(config) and "eagle3" not in drafting.rates:
        raise ConfigError(
            "modes: how much the drafter of `tlt` improves is not known; give the calibration of "
            "a run with a drafter, or drafter.acceptance=0.7"
        )


def completed(config: ScenarioConfig) -> ScenarioConfig:
    """Return the scenario with the arm of its `static` mode: the fastest arm it may use."""
    cluster, workload = cluster_of(config), workload_of(config)
    _check_rates(config, cluster.drafting)
    drafters = [config.static_drafter] if config.static_drafter else list(cluster.drafting.rates)
    lengths = [config.static_draft_tokens] if config.static_draft_tokens else config.draft_tokens
    choices = [
        config.model_copy(update={"static_drafter": drafter, "static_draft_tokens": length})
        for drafter in drafters or ["eagle3"]
        for length in lengths
    ]
    if len(choices) == 1 or "static" not in config.modes:
        return choices[0]

    start, drift = config.drafter.start_power, cluster.training.drift * config.num_steps
    states = [start + drift * share for share in SEARCH_SHARES] if drift > MUCH_DRIFT else [start]
    num_steps = min(config.num_steps, SEARCH_STEPS)

    def seconds(choice: ScenarioConfig) -> float:
        mode = mode_of("static", choice, cluster.drafting)
        runs = (Simulation(cluster, workload, mode, config.seed, power) for power in states)
        return sum(r["time/step_s"] for run in runs for r in clock.run(run.run(num_steps)))

    return min(choices, key=seconds)


def simulate(
    config: ScenarioConfig, on_end: Callable[[str, Simulation], None] = lambda name, run: None
) -> dict[str, list[Record]]:
    """Simulate every mode, and return its records of all RL steps. `on_end` gets each run."""
    config = completed(config)
    cluster, workload = cluster_of(config), workload_of(config)
    found: dict[str, list[Record]] = {}
    for name in config.modes:
        mode = mode_of(name, config, cluster.drafting)
        run = Simulation(cluster, workload, mode, config.seed, config.drafter.start_power)
        found[name] = clock.run(run.run(config.num_steps))
        on_end(name, run)
    return found
