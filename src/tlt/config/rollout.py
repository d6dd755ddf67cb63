"""Settings of the rollout: the engines, their drafters, and the pool."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tlt.config.schema import Schema


class NgramConfig(Schema):
    """Lookup of the last few tokens in the text so far and in other samples."""

    min_match: int = Field(default=2, ge=1)
    """Shortest run of tokens that counts as a match."""
    max_match: int = Field(default=8, ge=1)
    """Longest run of tokens that is looked up."""
    history_tokens: int = Field(default=1_000_000, ge=0, le=1_000_000_000)
    """Tokens of other samples, running and earlier ones, that are searched too; the oldest are
    dropped first. About 70 bytes each. 0 searches only the request's own text."""


class EngineSettings(Schema):
    """One vLLM engine, whatever it serves."""

    drafter: str | None = None
    """Folder of an EAGLE-3 drafter; without one, only n-grams can draft."""
    strategy: dict[str, Any] = Field(default_factory=lambda: {"kind": "off"})
    """Which arm to use when; see `tlt.strategy.spec`."""
    max_draft_tokens: int | None = Field(default=None, ge=1, le=32)
    """Longest draft that any strategy of this engine may use; by default what `strategy` needs."""
    ngram: NgramConfig | None = Field(default_factory=NgramConfig)
    """The drafter that looks the last tokens up; null leaves it out of the engine."""
    drafter_state_mib: int = Field(default=512, ge=0)
    """Memory, in MiB, for what the draft model will have to catch up on: it is left out of steps in
    which it does not draft. 0 runs it in every step."""
    num_cores: int = Field(default=1, ge=1)
    """CPU cores the engine is bound to (CPU engines only)."""
    num_gpus: int = Field(default=0, ge=0)
    """GPUs of the engine, its tensor-parallel size; 0 is a CPU engine."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for the KV cache of a CPU engine, in GiB. GPU engines take vLLM's setting."""
    core_group: str = "engines"
    """Engines of one group never share a core; engines of different groups may."""
    stall_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds one step may take before the engine counts as hung."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM verbatim; wins over whatever TLT would set, unless that would be lossy."""


class EngineConfig(EngineSettings):
    """One vLLM engine and the model it serves."""

    model: str
    """Folder of the policy, in Hugging Face format."""
    capture: dict[str, Any] | None = None
    """The node's buffer for hidden states of the engine's passes, as fields of `BufferSettings`."""


class PoolConfig(Schema):
    """The pool of engines."""

    num_engines: int = Field(default=1, ge=1)
    """Engines, each in a process of its own."""
    prefetch: int = Field(default=4, ge=0)
    """Requests that wait inside an engine beyond those it runs, to hide the way there."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds an engine may take to start, waiting for free resources included."""
    health_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds without an answer after which an engine counts as lost."""
    max_restarts: int = Field(default=3, ge=0)
    """Starts of one engine after it was lost, before the pool gives it up."""
