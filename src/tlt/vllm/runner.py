"""Our side of vLLM's model runner, as far as V1 and V2 agree; and what drafts without a model.

The worker calls these methods at fixed points: around the building of the runner, after loading,
and around every engine step. `v1.runner` and `v2.runner` hold the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from tlt.contracts import DRAFTERS
from tlt.vllm.args import CONFIG_KEY, num_begun
from tlt.vllm.recorder import StateRecorder

Texts = Mapping[str, tuple[int, Sequence[int]]]
"""The length of the prompt, and the whole text, of requests."""


class Lookup:
    """Drafts without a model.

    `propose` drafts on V1, as vLLM's n-gram proposer does, and `draft` on V2. A drafter that learns
    from samples overrides the other methods.
    """

    def propose(
        self,
        num_speculative_tokens: int,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
    ) -> list[list[int]]:
        """Return a draft for each row in which a token was sampled, and none for the others."""
        raise NotImplementedError

    def draft(
        self,
        batch: Any,
        num_drafts: int,
        num_sampled_B: torch.Tensor,
        last_sampled: torch.Tensor,
        draft_BK: torch.Tensor,
    ) -> None:
        """Write `num_drafts` drafts for each request of the batch."""
        raise NotImplementedError

    def requests_ended(self, texts: Texts) -> None:
        """Learn the rest of ended requests."""

    def drop(self, request_ids: Collection[str]) -> None:
        """Drop ended requests that nothing is learned from."""

    def forget(self) -> None:
        """Forget all samples."""


class Runner:
    """The drafting, sampler and states of one of vLLM's model runners."""

    factory = ""
    """Function of a drafter's module that makes its `Lookup` for this runner."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._settings = vllm_config.additional_config[CONFIG_KEY]
        self.runner: Any = None
        """vLLM's runner, once it is built."""

    @contextmanager
    def installing(self) -> Iterator[None]:
        """Let vLLM build its runner."""
        yield

    def install(self, runner: Any) -> None:
        """Note the runner that vLLM has built."""
        self.runner = runner

    def loaded(self) -> None:
        """Note that the models are loaded."""

    def _lookups(self, *args: Any) -> dict[str, Lookup]:
        """Return what drafts without a model in this engine, by the name of the drafter."""
        return {
            name: getattr(import_module(drafter.module), self.factory)(*args, self._settings[name])
            for name, drafter in DRAFTERS.items()
            if drafter.module and self._settings.get(name) is not None
        }

    @property
    def drafting(self) -> Any:
        """The object that drafts; None without one."""
        raise NotImplementedError

    @property
    def proposer(self) -> str | None:
        """Name of the class that drafts; None without one."""
        return None if self.drafting is None else type(self.drafting).__name__

    # --- engine steps -------------------------------------------------------------------------

    def record(self, recorder: StateRecorder, scheduler_output: Any) -> None:
        """Record the states that vLLM's runner holds between forward pass and sampling."""
        for request in scheduler_output.scheduled_new_reqs:
            recorder.begin(
                request.req_id,
                request.prompt_token_ids,
                request.num_computed_tokens,
                num_begun(request.sampling_params),
            )
        self._record_states(recorder, scheduler_output)

    def _record_states(self, recorder: StateRecorder, scheduler_output: Any) -> None:
        """Hand the states of this engine step to the recorder."""
        raise NotImplementedError

    def begin_step(self, scheduler_output: Any, unlearned: Collection[str]) -> None:
        """Set the drafter of this engine step; learn from ended requests except `unlearned`."""
        drafting = self.drafting
        if not hasattr(drafting, "lookups"):
            return  # not one of ours
        drafting.drafter = getattr(scheduler_output, "tlt_drafter", drafting.drafter)
        ended = scheduler_output.finished_req_ids
        if hasattr(drafting, "missed"):
            drafting.missed.forget(ended)
        texts = getattr(scheduler_output, "tlt_ended", {})
        learned = {name: text for name, text in texts.items() if name not in unlearned}
        for lookup in drafting.lookups.values():
            lookup.requests_ended(learned)
            lookup.drop(ended - learned.keys())

    def end_step(self) -> None:
        """Note that the forward pass of this engine step has been started."""

    def drop_inputs(self) -> None:
        """Drop the inputs that the draft model skipped."""
        if (missed := getattr(self.drafting, "missed", None)) is not None:
            missed.clear()

    def forget_history(self) -> None:
        """Forget the samples that drafts are looked up in."""
        for lookup in getattr(self.drafting, "lookups", {}).values():
            lookup.forget()
