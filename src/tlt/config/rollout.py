"""Settings of the rollout: engines, their drafters, and the pool."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tlt.config.schema import LONGEST_S, Schema

CORE_GROUP = "engines"


class NgramConfig(Schema):
    """The n-gram drafter: looks up the last tokens in the text so far and in other samples."""

    min_match: int = Field(default=2, ge=1, le=1024)
    """Shortest sequence of tokens that counts as a match."""
    max_match: int = Field(default=8, ge=1, le=1024)
    """Longest sequence of tokens to look up."""
    history_tokens: int = Field(default=1_000_000, ge=0, le=1_000_000_000)
    """Tokens of other samples to search, both running and earlier ones. The engine drops the oldest
    first and needs about 70 bytes for each. 0 searches only the request's own text."""


class DraftSettings(Schema):
    """How one vLLM engine drafts."""

    drafter: str | None = None
    """Folder or Hub id of an EAGLE-3 drafter, in the plain layout or the speculators format.
    Without a drafter, only n-grams can draft."""
    strategy: dict[str, Any] = Field(default_factory=lambda: {"kind": "off"})
    """Strategy that chooses drafter and draft length; its keys are under `engine.strategy`."""
    max_draft_tokens: int | None = Field(default=None, ge=1, le=32)
    """Longest draft that a strategy of this engine may use; by default what `strategy` needs."""
    ngram: NgramConfig | None = Field(default_factory=NgramConfig)
    """Settings of the n-gram drafter; null leaves n-grams out of the engine."""
    drafter_state_mib: int = Field(default=512, ge=0)
    """Memory in MiB for the draft model's catch-up: hidden states of tokens from engine steps in
    which it did not draft. 0 runs the draft model in every engine step."""


class SwitchConfig(DraftSettings):
    """The settings of `TLT_CONFIG`, for engines of other programs."""

    strategy: dict[str, Any] = Field(default_factory=lambda: {"kind": "adaptive"})
    """Strategy that chooses drafter and draft length; its keys are under `engine.strategy`."""


class EngineSettings(DraftSettings):
    """One vLLM engine."""

    num_cores: int = Field(default=1, ge=1, le=10_000)
    """CPU cores that a CPU engine is bound to."""
    num_gpus: int = Field(default=0, ge=0, le=10_000)
    """GPUs of the engine, which is its tensor-parallel size; 0 makes a CPU engine."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory in GiB for the KV cache of a CPU engine. GPU engines follow vLLM's own setting."""
    stall_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """Seconds an engine step or a command may take before the engine counts as hung."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments passed to vLLM verbatim. They override TLT's own. TLT refuses lossy arguments, and
    without `allow_code` arguments that load code."""
    allow_code: bool = False
    """Permission for `engine_args` that make vLLM run code of others, such as `trust_remote_code`,
    classes and plug-ins. It runs with your privileges."""


Transfer = Literal["shared_memory", "ipc", "nccl"]


class EngineConfig(EngineSettings):
    """One vLLM engine and the model it serves."""

    model: str
    """Folder of the policy, in Hugging Face format."""
    capture: dict[str, Any] | None = None
    """Buffer of the node for hidden states of the engine's forward passes, as `BufferSettings`."""
    weights: Transfer = "shared_memory"
    """How the policy reaches the engine: through a file in the node's shared memory, from a learner
    on the same GPU, or from a learner on other GPUs."""
    emulate: dict[str, Any] | None = None
    """The GPU to emulate, as `EmulateConfig`; None emulates nothing."""
    core_group: str = CORE_GROUP
    """Engines of one group never share a core; engines of different groups may."""


class PoolConfig(Schema):
    """The pool of engines that generates the samples."""

    num_engines: int = Field(default=1, ge=1, le=100_000)
    """Number of engines, each in its own process."""
    prefetch: int = Field(default=4, ge=0)
    """Requests queued inside an engine beyond those it runs, to hide the latency of dispatch."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_S)
    """Seconds an engine may take to start, including the wait for free resources."""
    health_timeout_s: float = Field(default=120.0, gt=0, le=LONGEST_S)
    """Seconds without an answer before an engine counts as lost."""
    command_timeout_s: float = Field(default=900.0, gt=0, le=LONGEST_S)
    """Seconds an engine may take for a command, such as a weight update, before it counts as lost.
    Commands wait for the engine step under way."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of an engine within `restart_window_s`, or in a row without a single sample, before
    the pool gives its place up."""
    restart_window_s: float = Field(default=3600.0, gt=0, le=LONGEST_S)
    """Seconds over which the pool counts the losses of one place."""
