"""The records that the parts exchange. Standard library only.

Read this first: it is the vocabulary of the system.

- A `SampleRequest` goes into the rollout, a `Sample` comes out, and its reward makes it a `Scored`
  one. Every sample of a group has its own request. The order of samples follows from the
  numbers in `Scored`; nothing reads a sample's id back. With an environment, a sample has several
  turns, each one a request whose prompt is everything before it (`Turns`).
- An `Arm` is one choice of drafter and draft length. Before each engine step a `Strategy` chooses
  an arm from a `StepContext`; after the engine step it sees a `StepReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

DrafterName = str
"""Name of a drafter: `off`, or a key of `DRAFTERS`."""
FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
WHOLE: frozenset[FinishReason] = frozenset({"stop", "length"})
"""How a whole sample ends. Any other end is a fault, and the sample is generated again."""
ShowProgress = Callable[[str, float, float], None]
"""`show(what, done, total)`: the present part of a long piece of work, and its progress."""


# --- rollout ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How to sample one response; `extra` goes verbatim into vLLM's `SamplingParams`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a response that an engine has drawn and that has not ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Empty unless the request asked for them."""
    policy_version: int


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response to generate; its id is unique among the requests in flight."""

    sample_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSpec
    rl_step: int | None = None
    """The RL step of the sample, under which engines store its hidden states; None stores none."""
    begun: Text | None = None
    """The beginning of the response, drawn by an engine that was lost. With keyed sampling another
    engine continues it as the first one would have; an engine with another policy starts again."""
    prefers: str | None = None
    """The engine that should generate it if a slot is free there: its cache has the prompt."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished response."""

    sample_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the policy; empty unless the request asked for it."""
    finish_reason: FinishReason
    engine: str
    policy_version: int
    """Version of the policy weights that generated the last token."""
    queued_s: float
    """Seconds between arrival at the engine and the first engine step."""
    running_s: float
    """Seconds between the first engine step and the last token."""
    finished_at_s: float
    """Wall-clock time of the end, seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one request, as the core reports it."""

    sample_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    finished_at_s: float
    """Wall-clock time of the end, seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """A sample to generate again, and the tokens it must have."""

    request: SampleRequest
    token_ids: tuple[int, ...]
    policy_version: int


@dataclass(frozen=True, slots=True)
class Turns:
    """The environment's part of a sample of several turns."""

    observed: tuple[tuple[int, int], ...] = ()
    """Begin and end of each part of the response that the policy read and did not draw."""
    num_turns: int = 1
    num_errors: int = 0
    """Calls that ended in an error."""
    tool_s: float = 0.0
    """Seconds that the sample waited for tools."""

    @property
    def num_observed(self) -> int:
        return sum(end - begin for begin, end in self.observed)


ONE_TURN = Turns()
Worked = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""A prompt with its solution as token ids, and begin and end of the parts that the policy says."""
LARGEST_SHORTFALL = 100.0
"""Shortfall of a token that could not be drawn at all."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample with its reward and its place in the RL step."""

    problem_number: int
    """The problem's number in the RL step, from 0."""
    place: int
    """The sample's place in its group, from 0."""
    request: SampleRequest
    """Request of the first turn."""
    sample: Sample
    """The whole response; with several turns, it includes the environment's answers."""
    text: str
    reward: float
    fault: str | None
    """Why the reward is a zero that the response did not earn; None where it is not."""
    turns: Turns = ONE_TURN

    @property
    def num_drawn(self) -> int:
        """Return how many tokens of the response the policy drew."""
        return len(self.sample.token_ids) - self.turns.num_observed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one engine since it started."""

    engine: str
    steps: int = 0
    drafts: int = 0
    """Verified drafts: one per request and engine step that had any draft tokens."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    model_drafts: int = 0
    """Verified drafts of the draft model."""
    model_accepted_tokens: int = 0
    """Accepted tokens of the draft model's drafts."""
    model_first_accepted: int = 0
    """Drafts of the draft model whose first token was accepted."""
    output_tokens: int = 0
    busy_s: float = 0.0
    """Seconds spent in engine steps."""
    accepted_at: Sequence[int] = ()
    """Drafts accepted at least up to position i, for i = 0, 1, ..."""
    running: int = 0
    queued: int = 0
    policy_version: int = 0
    drafter_version: int = 0
    captured_samples: int = 0
    """Samples whose hidden states the engine stored for the drafter's training."""
    dropped_samples: int = 0
    """Samples to train on whose hidden states the engine lost."""
    policy_mismatches: int = 0
    """Times that the policy differed from the learner's after new weights, and was loaded again."""
    fingerprint_s: float = 0.0
    """Seconds spent on comparing the policy with the learner's."""
    late: int = 0
    """Engine steps that took longer than their emulated time."""
    late_s: float = 0.0
    commands_late_s: float = 0.0
    """Seconds by which weight syncs, swaps, sleep and wake took longer than their emulated time."""

    @classmethod
    def difference(cls, before: Sequence[EngineStats], after: Sequence[EngineStats]) -> EngineStats:
        """Return the engines' counts between `before` and `after`; a new engine counts from
        zero."""
        earlier = {stats.engine: stats for stats in before}
        pairs = [(earlier.get(stats.engine, cls("")), stats) for stats in after]
        version = max((stats.drafter_version for stats in after), default=0)
        counted = {
            name: sum(getattr(b, name) - getattr(a, name) for a, b in pairs) for name in COUNTERS
        }
        return cls("all", drafter_version=version, **counted)

    @property
    def acceptance_length(self) -> float:
        """Return tokens per verified draft, the policy's own token included."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0


COUNTERS = (
    *("steps", "drafts", "draft_tokens", "accepted_tokens", "output_tokens", "busy_s"),
    *("model_drafts", "model_accepted_tokens", "model_first_accepted"),
    *("captured_samples", "dropped_samples", "policy_mismatches", "fingerprint_s"),
    *("late", "late_s", "commands_late_s"),
)
"""The fields of `EngineStats` that only grow."""


# --- speculation --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drafter:
    """The facts about a drafter that every part needs."""

    label: str
    """Its name in reports."""
    prior: float
    """Chance that a draft token is accepted, before any draft was verified."""
    draft_lengths: tuple[int, ...]
    """Draft lengths on CPUs that a learning strategy chooses from when its spec names no arms."""
    gpu_draft_lengths: tuple[int, ...] = (1, 3, 7)
    """The same on GPUs. Full CUDA graphs serve every batch of such engine steps: they verify 2, 4
    or 8 tokens per request."""
    setting: str = ""
    """Key of `[engine]` that an engine with this drafter sets; empty if it needs none."""
    example: str = ""
    """A value of that key."""
    module: str = ""
    """Module that drafts without a draft model: its functions `on_v1` and `on_v2` return what
    drafts on vLLM's two model runners (`tlt.vllm.runner.Lookup`). Empty for the draft model."""


DRAFTERS = {
    "ngram": Drafter(
        label="n-grams",
        prior=0.3,
        draft_lengths=(2, 4, 8),
        gpu_draft_lengths=(3, 7),
        setting="ngram",
        example="{ min_match = 2 }",
        module="tlt.vllm.ngram",
    ),
    "eagle3": Drafter(
        label="EAGLE-3 drafter",
        prior=0.7,
        draft_lengths=(1, 2, 3, 4, 6),
        setting="drafter",
        example='"models/my-eagle3"',
    ),
}
"""All drafters. A new one that needs no model is an entry here and the module that it names."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One choice of drafter and draft length. `Arm()` is plain decoding."""

    drafter: DrafterName = "off"
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        if (self.drafter == "off") != (self.num_draft_tokens == 0):
            raise ValueError(
                f"arm {self.drafter!r} cannot draft {self.num_draft_tokens} tokens: "
                "'off' drafts 0, every drafter at least 1"
            )

    @property
    def uses_model(self) -> bool:
        """Whether the draft model drafts."""
        found = DRAFTERS.get(self.drafter)
        return found is not None and not found.module

    @property
    def looks_up(self) -> bool:
        """Whether drafts come from the texts of requests, without the draft model."""
        found = DRAFTERS.get(self.drafter)
        return found is not None and bool(found.module)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Return the arm that `str` wrote as this text."""
        drafter, _, length = text.partition(":")
        return cls(drafter, int(length)) if length else cls()

    def __str__(self) -> str:
        return self.drafter if self.drafter == "off" else f"{self.drafter}:{self.num_draft_tokens}"


OFF = Arm()


class StepContext(NamedTuple):
    """The engine's situation when a strategy chooses the arm of an engine step."""

    step: int
    num_decodes: int
    """Requests that decode in this engine step, without prefills."""
    num_prefills: int
    num_waiting: int
    drafter_version: int = 0


class StepReport(NamedTuple):
    """Result of one engine step. Many are made: a tuple takes a fifth of a frozen dataclass's time.

    An engine step verifies the drafts of the previous one, and then proposes its own. So drafted
    and accepted tokens belong to `verified`, and the drafting time belongs to `proposed`.
    """

    step: int
    verified: Arm
    proposed: Arm
    num_decodes: int
    num_prefill_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_at: tuple[int, ...]
    """Drafts accepted at least up to position i, for i = 0, 1, ..."""
    num_output_tokens: int
    elapsed_s: float
    drafter_version: int = 0
    ended_s: float = 0.0
    """Time of the end, by the clock of the engine's node."""


class Strategy(Protocol):
    """Chooses the arm of every engine step. Pure: no torch, no vLLM, only an injected clock."""

    def arms(self, num_decodes: int | None = None) -> frozenset[Arm]:
        """Return every arm that `decide` may return, with this many decodes or with any number.

        The engine prepares for exactly these.
        """
        ...

    def decide(self, context: StepContext) -> Arm:
        """Choose the arm of the next engine step."""
        ...

    def observe(self, report: StepReport) -> None:
        """Learn from a finished engine step."""
        ...
