"""vLLM's V1 model runner, the one of CPU engines, as TLT's worker sees it.

`v2.runner` has the same methods for V2. The worker calls them at fixed points: around the building
of the runner, after loading, and around every engine step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tlt.vllm.args import CONFIG_KEY
from tlt.vllm.recorder import StateRecorder
from tlt.vllm.v1 import sampler, selftest
from tlt.vllm.v1.draw_margins import DrawMargins
from tlt.vllm.v1.proposer import SwitchingProposer


class RunnerV1:
    """The proposer, sampler and states of vLLM's V1 model runner."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._settings = vllm_config.additional_config[CONFIG_KEY]
        self.runner: Any = None
        """vLLM's runner, once it is built."""

    # --- start --------------------------------------------------------------------------------

    @contextmanager
    def installing(self) -> Iterator[None]:
        """Let vLLM build its runner; V1's proposer can be replaced afterwards."""
        yield

    def install(self, runner: Any) -> None:
        """Replace the proposer of a runner that has not loaded anything yet."""
        self.runner = runner
        speculative = self._config.speculative_config
        if speculative is None or not hasattr(runner, "drafter"):
            return  # no drafts, or not the last pipeline stage
        ngram = self._settings["ngram"]
        if speculative.method == "ngram" and ngram and ngram["history_tokens"]:
            self._look_into_history(ngram)
        elif speculative.method == "eagle3":
            runner.drafter = SwitchingProposer(
                self._config,
                runner.device,
                runner,
                ngram,
                self._settings.get("drafter_state_bytes", 0),
            )

    def _look_into_history(self, ngram: dict[str, int]) -> None:
        """Replace vLLM's n-gram proposer in an engine without a draft model."""
        from tlt.vllm.ngram.proposer import HistoryProposer

        matches = {
            "min_match": self._config.speculative_config.prompt_lookup_min,
            "max_match": self._config.speculative_config.prompt_lookup_max,
        }
        self.runner.drafter = HistoryProposer(self._config, self.runner, ngram | matches)

    def loaded(self) -> None:
        """Note that the models are loaded."""

    # --- engine steps -------------------------------------------------------------------------

    def begin_step(self, scheduler_output: Any, unlearned: Collection[str]) -> None:
        """Set the drafter of this engine step; learn from ended requests but for `unlearned`."""
        drafter = getattr(self.runner, "drafter", None)
        ended = scheduler_output.finished_req_ids
        if isinstance(drafter, SwitchingProposer):
            drafter.drafter = getattr(scheduler_output, "tlt_drafter", "eagle3")
            drafter.missed.forget(ended)
        if (lookup := self._history_lookup()) is not None:
            lookup.requests_ended(ended - set(unlearned))

    def end_step(self) -> None:
        """Note that the forward pass of this engine step has been started."""

    def record(self, recorder: StateRecorder, scheduler_output: Any) -> None:
        """Record the states that vLLM's runner holds between forward pass and sampling."""
        state = self.runner.execute_model_state
        if state is None or state.aux_hidden_states is None:
            return
        recorder.record(
            self.runner.input_batch,
            scheduler_output.num_scheduled_tokens,
            state.aux_hidden_states,
            state.hidden_states,
        )

    def drop_inputs(self) -> None:
        """Drop the inputs that the draft model skipped."""
        drafter = getattr(self.runner, "drafter", None)
        if isinstance(drafter, SwitchingProposer):
            drafter.missed.clear()

    def watch_draws(
        self, request_id: str, num_prompt_tokens: int, expected: Sequence[int]
    ) -> DrawMargins:
        """Compare the next draws, all of one request, with the tokens expected, until `end`."""
        return DrawMargins(self.runner.sampler.keys, expected)

    # --- history of samples -------------------------------------------------------------------

    def forget_history(self) -> None:
        """Forget the history of samples."""
        if (lookup := self._history_lookup()) is not None:
            lookup.forget()

    def _history_lookup(self) -> Any:
        """Return the proposer that looks n-grams up in a history of samples; None without one."""
        drafter = getattr(self.runner, "drafter", None)
        lookup = getattr(drafter, "ngram", drafter)
        return lookup if hasattr(lookup, "history") else None

    # --- what the runner is made of -----------------------------------------------------------

    @property
    def draft_model(self) -> torch.nn.Module | None:
        """The draft model; None without one."""
        model = getattr(getattr(self.runner, "drafter", None), "model", None)
        return model if isinstance(model, torch.nn.Module) else None

    @property
    def proposer(self) -> str | None:
        """Name of the class that drafts; None without one."""
        drafter = getattr(self.runner, "drafter", None)
        return None if drafter is None else type(drafter).__name__

    @property
    def sampler(self) -> str:
        """Name of the class that samples."""
        return type(self.runner.sampler).__name__

    @property
    def is_keyed(self) -> bool:
        """Whether seed and policy alone decide a sample, whatever was drafted."""
        return isinstance(self.runner.sampler, sampler.KeyedSampler)

    def sampling_faults(self) -> list[str]:
        """Return the faults of sampling under speculation in this process."""
        return selftest.sampling_faults(self.runner.device, self.is_keyed)
