"""vLLM's V1 model runner, used on CPUs, as TLT's worker sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tlt.vllm.recorder import StateRecorder
from tlt.vllm.runner import Runner
from tlt.vllm.v1 import sampler, selftest
from tlt.vllm.v1.proposer import LookupProposer, SwitchingProposer


class RunnerV1(Runner):
    """The proposer, sampler and states of vLLM's V1 model runner."""

    factory = "on_v1"

    def install(self, runner: Any) -> None:
        """Replace the proposer of a runner that has not loaded anything yet."""
        super().install(runner)
        speculative = self._config.speculative_config
        if speculative is None or not hasattr(runner, "drafter"):
            return  # no drafts, or not the last pipeline stage
        lookups = self._lookups(self._config, runner)
        if speculative.method == "eagle3":
            budget = self._settings.get("drafter_state_bytes", 0)
            runner.drafter = SwitchingProposer(self._config, runner.device, runner, lookups, budget)
        elif speculative.method == "ngram" and lookups:
            runner.drafter = LookupProposer(lookups)

    def _record_states(self, recorder: StateRecorder, scheduler_output: Any) -> None:
        state = self.runner.execute_model_state
        if state is None or state.aux_hidden_states is None:
            return
        batch = self.runner.input_batch
        names = batch.req_ids
        recorder.add(
            names,
            [scheduler_output.num_scheduled_tokens[name] for name in names],
            torch.tensor(batch.num_computed_tokens_cpu[: len(names)]),
            [*state.aux_hidden_states, state.hidden_states],
        )

    def watch_draws(
        self, request_id: str, num_prompt_tokens: int, expected: Sequence[int]
    ) -> sampler.DrawMargins:
        """Compare the next draws, all of one request, with the tokens expected, until `end`."""
        return sampler.DrawMargins(self.runner.sampler.keys, expected)

    # --- what the runner is made of -----------------------------------------------------------

    @property
    def drafting(self) -> Any:
        """vLLM's proposer, or ours."""
        return getattr(self.runner, "drafter", None)

    @property
    def draft_model(self) -> torch.nn.Module | None:
        """The draft model; None without one."""
        model = getattr(self.drafting, "model", None)
        return model if isinstance(model, torch.nn.Module) else None

    @property
    def sampler(self) -> str:
        """Name of the class that samples."""
        return type(self.runner.sampler).__name__

    @property
    def is_keyed(self) -> bool:
        """Whether seed and policy alone decide a sample, with any drafts."""
        return isinstance(self.runner.sampler, sampler.KeyedSampler)

    def sampling_faults(self) -> list[str]:
        """Return the faults of sampling under speculation in this process."""
        return selftest.sampling_faults(self.runner.device, self.is_keyed)
