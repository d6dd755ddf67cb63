"""Settings of a training run: `tlt train run.toml`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tlt.config.rollout import CORE_GROUP, EngineSettings, PoolConfig, Transfer
from tlt.config.schema import LONGEST_S, Schema
from tlt.config.tasks import EvalConfig, RewardConfig, SizesConfig, TaskConfig, ToolsConfig
from tlt.errors import ConfigError
from tlt.hardware import DtypeChoice, compute_dtype

ModelName = Literal["qwen2.5-7b", "qwen2.5-32b", "qwen3-8b", "qwen3-32b", "llama-3-70b"]
"""Policies whose times on GPUs are modelled (`tlt.timing.profiles`)."""


LONGEST_TRAINED = 16
"""Longest draft that a drafter can be trained for."""


class RunSection(Schema):
    """The run's folder, length and seed."""

    out: str = Field(examples=["runs/first"])
    """Folder of the run: config, metrics, samples, checkpoints."""
    num_steps: int = Field(ge=1, examples=[100])
    """RL steps in total, including those before a resume."""
    seed: int = Field(default=0, ge=0)
    """Seed of problems, sampling and shuffling."""
    checkpoint_on_term: bool = False
    """Write a checkpoint of the last finished RL step when SIGTERM or SIGINT (Ctrl-C) ends the
    run."""
    term_timeout_s: float = Field(default=25.0, gt=0, le=LONGEST_S)
    """Seconds from SIGTERM or SIGINT to the end of the process, even with work unfinished.
    Kubernetes and Slurm kill by default after 30."""


class PolicyConfig(Schema):
    """The model to train."""

    model: str = Field(examples=["models/smollm2-sft"])
    """Folder or Hub id of the policy to start from, in Hugging Face format. `owner/name@revision`
    fixes the version of a model on the Hub."""
    dtype: DtypeChoice = "auto"
    """Dtype of the engines' weights and of the learner's matrix products. The learner keeps its
    weights and its optimizer in float32. `auto` takes bfloat16 on GPUs and on CPUs with bfloat16
    instructions, and float32 on other CPUs, which only emulate bfloat16."""


class SamplingConfig(Schema):
    """The samples of an RL step."""

    prompts_per_step: int = Field(ge=1, le=100_000, examples=[8])
    """Problems per RL step."""
    group_size: int = Field(ge=2, le=10_000, examples=[8])
    """Samples per problem. Advantages are relative to this group."""
    max_extra_prompts: int = Field(default=0, ge=0, le=100_000)
    """Largest number of extra problems per RL step that replace groups without a signal, whose
    samples all have the same reward (DAPO's dynamic sampling). The replaced groups do not enter the
    update. 0 replaces none."""
    max_tokens: int = Field(ge=1, le=10_000_000, examples=[1024])
    """Largest number of tokens in a response."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature. The learner computes probabilities at the same temperature."""


class AlgorithmConfig(Schema):
    """The RL algorithm: from rewards to a loss."""

    advantage: str = "grpo"
    """Advantage of a sample within its group. `grpo`: distance from the group's mean in standard
    deviations. `dr_grpo`: distance from the group's mean. `rloo`: distance from the mean of the
    other samples. `module:function`: your own function, called with the rewards of a group. The
    learner leaves out samples whose advantage is 0."""
    advantage_over: Literal["group", "step"] = "group"
    """Samples that your own `advantage` function compares. `group`: called with the rewards of one
    group. `step`: called once per RL step with a list of all groups' rewards, and returns a list
    per group; a learner with its own devices then waits for the end of the rollout."""
    loss: str = "clipped"
    """Loss of each token. `clipped`: PPO's clipped ratio. `module:function`: your own function,
    called with each token's new and old log-probability and advantage as tensors, and with these
    settings. Importance weights and the KL term are applied to its result."""
    mean_over: Literal["tokens", "samples", "limit"] = "tokens"
    """Mean that the loss takes. `tokens`: over all tokens. `samples`: over samples, each the mean
    over its tokens (the GRPO paper). `limit`: over samples, each the sum over its tokens divided by
    max_tokens (the Dr. GRPO paper)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Clipping range below 1 of the ratio between a token's new and old probability."""
    clip_high: float = Field(default=0.28, gt=0)
    """Clipping range above 1 of the ratio between a token's new and old probability. A value above
    `clip_low` lets rare tokens become likely."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the initial policy; 0 keeps no copy of that policy."""
    overlong_tokens: int = Field(default=0, ge=0, le=10_000_000)
    """Number of tokens before `sampling.max_tokens` over which a response loses reward, linearly
    (the soft overlong punishment of the DAPO paper). 0 penalizes no response for its length."""
    overlong_penalty: float = Field(default=1.0, gt=0, le=1e6)
    """Reward that a response of `sampling.max_tokens` loses if `overlong_tokens` is set; the DAPO
    paper takes 1, with rewards of 1 and -1."""
    max_importance: float = Field(default=2.0, ge=0)
    """Cap of the importance weights that correct for the gap between the probabilities of engines
    and learner; 0 disables these weights."""


class LoraConfig(Schema):
    """LoRA: the learner trains small adapters beside the policy's frozen weights. Engines get both
    merged."""

    rank: int = Field(default=0, ge=0, le=100_000, examples=[16])
    """Rank of the adapters; 0 trains all weights."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Strength of the adapters, whose product is scaled by `alpha / rank`."""
    target_modules: list[str] = Field(default_factory=list, examples=[["q_proj", "v_proj"]])
    """Names of the linear layers that get adapters; by default all of the decoder layers."""


class LearnerConfig(Schema):
    """The policy update, on FSDP2 ranks with one process each."""

    num_ranks: int = Field(default=1, ge=1, le=100_000)
    """Processes that the policy is sharded over; on GPUs, one per GPU."""
    num_gpus: int = Field(default=0, ge=0, le=1)
    """GPUs per rank; 0 trains on the CPU."""
    num_cores: int | None = Field(default=None, ge=1, le=10_000)
    """CPU cores per rank; by default the ranks of a node share all its cores equally."""
    row_tokens: int = Field(default=4096, ge=1)
    """Tokens of one packed micro-batch; a longer sample gets its own."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer steps per RL step, each on its part of the samples."""
    lr: float = Field(default=1e-6, gt=0, le=1)
    """Learning rate of the policy after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which the gradient is scaled down to it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: a third more work for much less memory."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of the ranks from the same checkpoint before the run fails."""
    timeout_s: float = Field(default=1800.0, gt=0, le=LONGEST_S)
    """Seconds an update may take before the ranks count as hung."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """LoRA instead of training all weights."""


class AlarmConfig(Schema):
    """The alarms on samples that may not come from the policy (the gap between the probabilities of
    engines and learner, and samples that come out different when they are generated again), and on
    RL steps that teach nothing."""

    gap_factor: float = Field(default=4.0, gt=1)
    """Alarm threshold: the mean gap of an update's tokens (`learner/gap_mean`) divided by the
    median of the 20 updates before it."""
    then: Literal["warn", "drop", "stop"] = "drop"
    """Reaction to an alarm. `warn` trains on the samples nevertheless. `drop` skips the update,
    repeats the weight sync, and ends the run after five such RL steps in a row. `stop` ends the run
    at once. A dropped update costs one RL step, while an update on samples of another policy cannot
    be undone."""
    recheck_share: float = Field(default=0.02, ge=0, le=1)
    """Share of the finished samples that idle engines generate again without drafts, to compare the
    tokens; a differing token that is not a near-tie raises an alarm. With harvest on, an engine
    makes one recheck in an idle spell before it is leased. A single engine is never idle, and makes
    none. 0 turns rechecks off."""
    recheck_tokens: int = Field(default=256, ge=1)
    """Largest number of tokens that a recheck generates: the beginning of a longer sample."""
    max_lost_steps: int = Field(default=5, ge=0)
    """RL steps in a row without a usable update before the run ends: no finite gradient, or no
    reward for more than half of the samples. 0 never ends the run."""


class CaptureConfig(Schema):
    """The capture of the policy's hidden states, on which the drafter trains."""

    enabled: bool = False
    """Capture hidden states."""
    by: Literal["engines", "learner"] | None = None
    """Source of the hidden states. `engines`: all samples, while they are generated; needs harvest.
    `learner`: the samples that the learner trains on. By default `engines` when harvest is on, but
    `learner` on emulated GPUs, where recording would take time from emulated engine steps."""
    capacity_gib: float = Field(default=1.0, gt=0)
    """Memory per node for hidden states, in GiB."""
    folder: str = "/dev/shm"
    """Memory file system in which the run keeps the states, in a folder that only its user can
    read."""
    max_sample_tokens: int = Field(default=4096, ge=2)
    """Largest number of tokens kept per sample; a longer sample keeps a window of this size."""


class CheckpointConfig(Schema):
    """Checkpoints to resume from."""

    every_steps: int = Field(default=10, ge=1)
    """RL steps between checkpoints; the last RL step always has one."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep."""


class PlacementConfig(Schema):
    """The devices of engines and learner."""

    kind: Literal["colocated", "separate"] = "colocated"
    """`colocated`: ranks and engines take turns on the same devices. `separate`: ranks have their
    own devices and compute updates while the tail of the rollout still runs."""
    weights: Literal["auto", "shared_memory", "ipc", "nccl"] = "auto"
    """Transfer of the policy from learner to engines. `auto` takes `ipc` for engines and ranks on
    the same GPUs, `nccl` for separate GPUs, and `shared_memory` on CPUs."""


class NodeConfig(Schema):
    """One node of the cluster, for the memory plan; by default this machine. Set it to plan for
    hardware that is not here."""

    num_gpus: int | None = Field(default=None, ge=1, examples=[8])
    """GPUs of a node."""
    gpu_gib: float | None = Field(default=None, gt=0, examples=[79])
    """Memory of one GPU in GiB; 79 for one sold as 80 GB."""
    host_gib: float | None = Field(default=None, gt=0, examples=[1900])
    """Host memory of a node in GiB."""


class MetricsConfig(Schema):
    """Outputs of metrics besides `metrics.jsonl` in the run's folder."""

    tensorboard: bool = False
    """Write TensorBoard events into the run's folder."""
    wandb_project: str | None = None
    """Weights & Biases project to log to. It gets metrics, settings, and for every RL step a table
    of at most 8 of the samples that `keep_samples` keeps; with 0 it gets no samples."""
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Port that serves the latest values to Prometheus; 0 takes a free one."""
    prometheus_host: str = "127.0.0.1"
    """Address that serves the latest values; by default only this machine can read them."""
    timeline: bool = True
    """Write every worker's activity to `timeline.json`, for Perfetto and `tlt report`."""
    keep_samples: int = Field(default=8, ge=0)
    """Samples of every RL step to write to the run's folder, for reading."""


class TltConfig(Schema):
    """TLT: a strategy that follows measured speed, and a drafter that idle workers train."""

    enabled: bool = False
    """Turn on the adaptive strategy (unless `engine.strategy` names another), the capture of hidden
    states, and harvest."""
    harvest: bool = True
    """Train the drafter on idle workers; false leaves the drafter of `engine.drafter` frozen."""
    lr: float | None = Field(default=None, gt=0, le=1, examples=[1e-4])
    """Learning rate of the drafter; by default 1e-4, or 1e-3 for the new drafter of a run without
    `engine.drafter`. One RL step has little training data: at higher rates a trained drafter
    forgets more than it learns."""
    row_tokens: int = Field(default=512, ge=16)
    """Tokens of one optimizer step of the drafter; also the longest part of a sample it trains on.
    Where responses are short and an optimizer step is faster with fewer tokens, a smaller row
    teaches a new drafter more in the same time."""
    num_draft_tokens: int | None = Field(default=None, ge=1, le=LONGEST_TRAINED, examples=[4])
    """Draft length to train and to evaluate for; by default 4 on CPU cores, and on GPUs the longest
    draft of the drafter in `engine.strategy`, up to 16."""
    draft_vocab_size: int | None = Field(default=None, ge=16)
    """Size of a new drafter's vocabulary, the tokens that the policy writes most; by default 4,096
    on CPU cores, and on GPUs all tokens, or 32,768 if the policy has more than 65,536. A drafter
    from `engine.drafter` keeps its own size. The tokens follow the policy's text."""
    session_s: float = Field(default=10.0, gt=0, le=LONGEST_S)
    """Seconds of training between evaluations of the drafter; a better drafter is published."""
    held_out_tokens: int = Field(default=1024, ge=16)
    """Largest number of held-out tokens in an evaluation of a drafter; an evaluation takes fewer if
    they suffice or time is short."""
    min_lease_s: float = Field(default=2.0, ge=0, le=LONGEST_S)
    """Shortest predicted idle time, in seconds, for which a worker is leased."""
    lease_s: float = Field(default=60.0, gt=0, le=LONGEST_S)
    """Seconds after which a lease ends by itself; a worker that stays idle gets a new one."""
    stop_timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_S, examples=[2.0])
    """Seconds a trainer may take to stop before it is killed; by default 2, and on GPUs also the
    time in which its drafter and optimizer reach the host."""
    max_trainers: int = Field(default=8, ge=1)
    """Largest number of trainers at the same time."""

    @property
    def harvests(self) -> bool:
        return self.enabled and self.harvest


class EmulateConfig(Schema):
    """The emulation of a GPU node on CPU cores: engines, learner, drafter training and speculation
    are real, with a small model, and each piece of work waits until the time that it would take on
    the GPU is over. It shows what TLT does in the regime of GPUs. Refused on GPUs."""

    hardware: Literal["h100"] | None = None
    """GPU to emulate, one for each engine and all of them for the learner. By default nothing is
    emulated."""
    model: ModelName = "qwen2.5-7b"
    """Policy whose times are emulated."""
    dilation: float = Field(default=8.0, ge=1, le=1000)
    """Real seconds per emulated second. All engines share the CPU cores, so they must mostly wait.
    A run reports it if many engine steps take too long: then raise this number."""
    tokens: int = Field(default=1, ge=1, le=1000)
    """Emulated tokens per real token. Responses of small models are short, so weight syncs, swaps,
    sleep and wake would weigh too much; their emulated time is divided by this number."""

    @property
    def settings(self) -> dict[str, Any] | None:
        """Return these settings for other processes; None if nothing is emulated."""
        return self.model_dump() if self.hardware else None

    def label(self, num_engines: int) -> str:
        """Return what is emulated, in words; empty if nothing is."""
        if not self.hardware:
            return ""
        gpus = f"{num_engines} {self.hardware.upper()}{'s' * (num_engines > 1)}"
        tokens = f", 1 token for {self.tokens}" if self.tokens > 1 else ""
        return f"emulated: {gpus}, {self.model}{tokens}"


class DebugConfig(Schema):
    """Settings for tests and benchmarks; a real run needs none of them."""

    core_group: str = CORE_GROUP
    """Runs on one machine whose groups differ may share CPU cores; the engines of one group never
    do."""
    publish_drafters: bool = True
    """Publish drafters that became better; false does all other work of harvest, to measure its
    cost."""
    forced_lengths: SizesConfig | None = None
    """Forced lengths of the responses in tokens, the same in every run, to measure speed only;
    rewards then mean nothing."""
    gate: str | None = None
    """Unix socket of a process that makes several runs take turns, RL step by RL step; set by
    benchmarks/e2e/run.py."""


class TrainConfig(Schema):
    """A training run."""

    run: RunSection
    policy: PolicyConfig
    task: TaskConfig
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    sampling: SamplingConfig
    engine: EngineSettings = Field(default_factory=EngineSettings)
    pool: PoolConfig = Field(default_factory=PoolConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    alarm: AlarmConfig = Field(default_factory=AlarmConfig)
    tlt: TltConfig = Field(default_factory=TltConfig)
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    node: NodeConfig = Field(default_factory=NodeConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    emulate: EmulateConfig = Field(default_factory=EmulateConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)


def transfer(config: TrainConfig) -> Transfer:
    """Return how the policy reaches the engines, as `EngineConfig.weights`."""
    given = config.placement.weights
    fitting: Transfer = "ipc" if config.placement.kind == "colocated" else "nccl"
    if not (config.engine.num_gpus and config.learner.num_gpus):
        fitting = "shared_memory"
    if given == "auto":
        return fitting
    if given not in ("shared_memory", fitting):
        raise ConfigError(
            f"placement.weights = {given!r}: 'ipc' is for engines and ranks that share GPUs, "
            f"'nccl' for separate GPUs; here {fitting!r} works, or leave it out"
        )
    return given


def resolve_defaults(config: TrainConfig) -> TrainConfig:
    """Return the settings with the values that this machine and `tlt.enabled` imply."""
    dtype = compute_dtype(config.policy.dtype, on_gpu=config.engine.num_gpus > 0)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": dtype})})
    if not config.tlt.enabled:
        return config
    engine, capture = config.engine, config.capture
    if engine.strategy == EngineSettings().strategy:
        engine = engine.model_copy(update={"strategy": {"kind": "adaptive"}})
    if config.tlt.harvests:
        by = capture.by or ("learner" if config.emulate.hardware else "engines")
        capture = capture.model_copy(update={"enabled": True, "by": by})
    return config.model_copy(update={"engine": engine, "capture": capture})
