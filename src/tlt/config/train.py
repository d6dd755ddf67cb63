"""Settings of a training run: `tlt train run.toml`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tlt.config.rollout import EngineSettings, PoolConfig
from tlt.config.schema import Schema
from tlt.hardware import DtypeChoice, compute_dtype


class RunSection(Schema):
    """What is run, and where it is kept."""

    out: str = Field(examples=["runs/first"])
    """Folder of the run: config, metrics, samples, checkpoints."""
    num_steps: int = Field(ge=1, examples=[100])
    """RL steps in all; a resumed run goes on to this number."""
    seed: int = Field(default=0, ge=0)
    """Of problems, sampling seeds and shuffling."""


class PolicyConfig(Schema):
    """The model that is trained."""

    model: str = Field(examples=["models/smollm2-sft"])
    """Folder of the policy to start from, in Hugging Face format."""
    dtype: DtypeChoice = "auto"
    """Dtype of the engines' weights and of matrix products in the learner; the learner's own
    weights and its optimizer are float32. `auto` takes bfloat16 on GPUs and on CPUs with
    instructions for it, and float32 on other CPUs, which only emulate bfloat16."""


class SizesConfig(Schema):
    """Heavy-tailed problem sizes (terms of a sum, numbers of a gcd, words of a text)."""

    median: float = Field(default=6, gt=0)
    """Half of the problems are smaller."""
    p95: float = Field(default=30, gt=0)
    """One in twenty is larger."""
    longest: int = Field(default=60, ge=1)
    """None is larger."""


class TaskConfig(Schema):
    """Where problems come from: a `reasoning-gym` task by name, or a file."""

    name: str | None = None
    """Name of a reasoning-gym task, such as chain_sum."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Of the reasoning-gym task: its difficulty, as its own documentation names it."""
    sizes: SizesConfig | None = None
    """Sizes of the problems from a heavy tail (chain_sum, gcd, letter_counting); every step has
    its share of it."""
    path: str | None = None
    """A .jsonl or .parquet file with one problem a row."""
    question_key: str = "question"
    """Column of the file that holds the question."""
    answer_key: str = "answer"
    """Column of the file that holds the right answer."""
    id_key: str | None = None
    """Column of the file that names each problem; by default the row number does."""
    instruction: str = ""
    """Appended to every question, such as how to mark the answer."""


class RewardConfig(Schema):
    """How responses are scored, as they end, in processes of their own."""

    function: str = "auto"
    """`gym` (the task's own scoring of what stands in <answer> tags), `exact` (1 if that is the
    answer to the letter), `math` (math-verify against the answer), or a function of yours as
    `module:function`, called with the problem and the response's text; `auto` takes `gym` for tasks
    and `math` for files."""
    num_workers: int = Field(default=1, ge=1)
    """Processes that score."""
    timeout_s: float = Field(default=10.0, gt=0)
    """A reward that takes longer counts as 0."""


class SamplingConfig(Schema):
    """What is generated in every step."""

    prompts_per_step: int = Field(ge=1, examples=[8])
    """Problems of a step."""
    group_size: int = Field(ge=2, examples=[8])
    """Samples of each problem; advantages are relative to the group."""
    max_tokens: int = Field(ge=1, examples=[1024])
    """Longest response."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Of sampling; the learner computes probabilities at the same temperature."""
    seeded: bool = False
    """Give every sample a seed of its own, so that a run can be repeated exactly. Costs speed
    under speculation."""
    forced_lengths: SizesConfig | None = None
    """For measuring speed only: responses of these lengths in tokens, the same in every run,
    whatever they say; rewards then mean nothing."""


class AlgorithmConfig(Schema):
    """From rewards to a loss."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How a sample compares with its group: in standard deviations (grpo), as the distance from
    the mean (dr_grpo), or from the mean of the others (rloo)."""
    mean_over: Literal["tokens", "samples", "limit"] = "tokens"
    """What the loss is a mean over: all tokens; samples, each a mean over its tokens (GRPO as
    published); or samples, each a sum divided by max_tokens (Dr. GRPO as published)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a token's probability may fall below that of the policy that sampled it."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far it may rise."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the first policy; 0 keeps no copy of it."""
    max_importance: float = Field(default=2.0, ge=0)
    """Cap of the weights that make up for engines and learner disagreeing about probabilities;
    0 does without these weights."""


class LearnerConfig(Schema):
    """The policy update: FSDP2 ranks, each a process."""

    num_ranks: int = Field(default=1, ge=1)
    """Processes the policy is sharded over; on GPUs one for each GPU."""
    num_gpus: int = Field(default=0, ge=0, le=1)
    """GPUs of a rank: 0 trains on the CPU."""
    num_cores: int | None = Field(default=None, ge=1)
    """CPU cores of a rank; by default all cores are shared out among the ranks of a node."""
    row_tokens: int = Field(default=4096, ge=1)
    """Tokens of one packed micro-batch; a longer sample has one to itself."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer steps the samples of one RL step are split over."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are scaled down to this norm."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: a third more work for much less memory."""
    max_restarts: int = Field(default=3, ge=0)
    """Times the ranks are started again, from the last checkpoint, before there is a newer one."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds an update may take before the ranks count as hung."""


class AlarmConfig(Schema):
    """What happens when engines and learner disagree about the probabilities of samples."""

    gap_factor: float = Field(default=4.0, gt=1)
    """An update is alarming when the mean gap of its tokens (`learner/gap_mean`) is more than this
    many times the median of the 20 updates before it."""
    then: Literal["warn", "drop", "stop"] = "drop"
    """What follows: `warn` trains on the samples all the same; `drop` makes no update of them,
    gives the engines their weights again, and ends the run after five such steps in a row; `stop`
    ends the run at once. A dropped step costs one step, while an update of samples that came from
    another policy cannot be taken back."""


class CaptureConfig(Schema):
    """Hidden states of the policy's own passes, kept for the drafter."""

    enabled: bool = False
    """Keep them."""
    by: Literal["engines", "learner"] | None = None
    """Whose passes: the engines', over all samples, while they are generated; or the learner's,
    over the samples that it learns from. By default the engines' where harvest is on and engines
    run on CPU cores, the only ones that can; otherwise the learner's."""
    capacity_gib: float = Field(default=1.0, gt=0)
    """Memory of a node for them."""
    folder: str = "/dev/shm"
    """A memory file system; the run makes a folder of its own there."""
    max_sample_tokens: int = Field(default=4096, ge=2)
    """Of longer samples a window of this size is kept."""


class EvalConfig(Schema):
    """Held-out problems, scored every so often."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations, one before the first step included; 0 never evaluates."""
    num_problems: int = Field(default=64, ge=1)
    """Problems, kept apart from those trained on; of a file, its last rows."""
    temperature: float = Field(default=0.0, ge=0)
    """Of sampling; 0 takes the most likely tokens."""


class CheckpointConfig(Schema):
    """What a run resumes from."""

    every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints that are kept."""


class PlacementConfig(Schema):
    """Where engines and learner run."""

    kind: Literal["colocated", "separate"] = "colocated"
    """`colocated`: ranks use the engines' devices in turn with them; `separate`: devices of
    their own, and updates are computed while the rollout's tail still runs."""


class MetricsConfig(Schema):
    """Where metrics go besides `metrics.jsonl` in the run's folder."""

    tensorboard: bool = False
    """Write TensorBoard events into the run's folder."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project."""
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Serve the latest values at this port; 0 takes a free one."""
    prometheus_host: str = "127.0.0.1"
    """Address to serve at: by default only this machine can read it."""
    timeline: bool = True
    """Write where every worker's seconds go to `timeline.json`, for Perfetto and `tlt report`."""
    keep_samples: int = Field(default=8, ge=0)
    """Samples of every step that are written down to be read."""


class TltConfig(Schema):
    """Speculation chosen by measured speed, with a drafter that idle workers train."""

    enabled: bool = False
    """The one switch: turns on the adaptive strategy unless `engine.strategy` names another, the
    capture of hidden states, and harvest."""
    harvest: Literal["on", "unpublished", "off"] = "on"
    """Whether idle workers train the drafter: `on`; `unpublished` does all the work but tells the
    engines nothing, to measure what it costs; `off` leaves the drafter as it is, if there is
    one."""
    lr: float | None = Field(default=None, gt=0, examples=[1e-4])
    """Learning rate of the drafter; by default 1e-4, or 1e-3 in a run without
    `engine.drafter`, which makes a new one. An RL step brings little to learn from, and at higher
    rates a trained drafter forgets more than it learns."""
    row_tokens: int = Field(default=512, ge=16)
    """Tokens of one step of the drafter's training, as many of a longer sample."""
    num_draft_tokens: int = Field(default=4, ge=1, le=16)
    """Draft length that is trained for."""
    draft_vocab_size: int | None = Field(default=None, ge=16)
    """Tokens that a new drafter can draft, those the policy writes most; by default all. A drafter
    from `engine.drafter` keeps its own."""
    session_s: float = Field(default=10.0, gt=0)
    """Seconds of training after which a drafter is judged, and published if it is better."""
    held_out_tokens: int = Field(default=1024, ge=16)
    """Tokens of the policy's that it is judged by."""
    min_lease_s: float = Field(default=2.0, ge=0)
    """An engine that will be idle for less is left alone."""
    lease_s: float = Field(default=60.0, gt=0)
    """A lease ends by itself after this time; an engine that will still be idle gets another."""
    stop_timeout_s: float = Field(default=2.0, gt=0)
    """A trainer that has not stopped after this time is killed."""
    max_trainers: int = Field(default=8, ge=1)
    """Trainers at once."""

    @property
    def harvests(self) -> bool:
        return self.enabled and self.harvest != "off"


class TrainConfig(Schema):
    """A training run."""

    run: RunSection
    policy: PolicyConfig
    task: TaskConfig
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
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)


def written_out(config: TrainConfig) -> TrainConfig:
    """Return the settings with everything that follows from this machine and `tlt.enabled`."""
    dtype = compute_dtype(config.policy.dtype, on_gpu=config.engine.num_gpus > 0)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": dtype})})
    if not config.tlt.enabled:
        return config
    engine, capture = config.engine, config.capture
    if engine.strategy == EngineSettings().strategy:
        engine = engine.model_copy(update={"strategy": {"kind": "adaptive"}})
    if config.tlt.harvests:
        by = capture.by or ("learner" if engine.num_gpus else "engines")
        capture = capture.model_copy(update={"enabled": True, "by": by})
    return config.model_copy(update={"engine": engine, "capture": capture})
