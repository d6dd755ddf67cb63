"""vLLM's V2 model runner, used on GPUs, as TLT's worker sees it.

V2 builds its speculator together with the runner, and its sampler when it loads the policy. Under
asynchronous scheduling the host runs one engine step ahead of the device and never learns how many
drafts were rejected, so positions come from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tlt.vllm import compat
from tlt.vllm.recorder import StateRecorder
from tlt.vllm.runner import Runner
from tlt.vllm.v2 import sampler as sampler_v2
from tlt.vllm.v2 import selftest as selftest_v2


class RunnerV2(Runner):
    """The speculator, sampler and states of vLLM's V2 model runner."""

    factory = "on_v2"

    @contextmanager
    def installing(self) -> Iterator[None]:
        """Let vLLM build our speculator instead of its own.

        vLLM has no setting for it, and replacing the speculator later would allocate its buffers
        twice.
        """
        from vllm.v1.worker.gpu import model_runner

        original = model_runner.init_speculator

        def build(vllm_config: Any, device: torch.device, *states: Any) -> Any:
            return self._speculator(vllm_config, device, states, original)

        model_runner.init_speculator = build
        try:
            yield
        finally:
            model_runner.init_speculator = original

    def _speculator(
        self, config: Any, device: torch.device, states: Any, original: Callable[..., Any]
    ) -> Any:
        from tlt.vllm.v2.speculator import LookupSpeculator, SwitchingSpeculator

        method = config.speculative_config.method
        lookups = self._lookups(config, device, *states) if states else {}
        if sampler_v2.wants_keys(config.speculative_config):
            # vLLM would keep the logits of sampled drafts for its ratio test. Acceptance by
            # equality reads none, and our speculator samples without them.
            config.speculative_config.draft_sample_method = "greedy"
        if method == "eagle3":
            budget = self._settings.get("drafter_state_bytes", 0)
            return SwitchingSpeculator(config, device, lookups, budget)
        if method == "ngram_gpu" and lookups:
            return LookupSpeculator(config, device, states[0], lookups)
        return original(config, device, *states)

    def install(self, runner: Any) -> None:
        """Do what vLLM 0.31 leaves to do: lookups, and the number of drafts."""
        super().install(runner)
        drafting = runner.speculator
        if compat.counts_drafts() or not hasattr(drafting, "lookups"):
            return
        drafting.lookups = self._lookups(self._config, runner.device, runner.req_states)
        set_drafts = runner.draft_tokens_handler.set_draft_tokens
        runner.draft_tokens_handler.set_draft_tokens = lambda batch, draft_BK: set_drafts(
            batch, draft_BK[:, : drafting.num_drafts]
        )

    def begin_step(self, scheduler_output: Any, unlearned: Collection[str]) -> None:
        super().begin_step(scheduler_output, unlearned)
        if hasattr(self.drafting, "num_drafts"):
            # vLLM's warm-up names no drafter, and wants the most drafts.
            is_ours = hasattr(scheduler_output, "tlt_drafter")
            number = scheduler_output.num_spec_tokens_to_schedule
            self.drafting.num_drafts = number if is_ours else None

    def loaded(self) -> None:
        """Install the keyed sampler: vLLM builds the sampler when it has loaded the policy."""
        sampler_v2.install(self.runner)

    def _record_states(self, recorder: StateRecorder, scheduler_output: Any) -> None:
        state = self.runner.execute_model_state
        if state is None or state.aux_hidden_states is None:
            return
        batch = state.input_batch
        recorder.add(
            batch.req_ids,
            np.diff(batch.query_start_loc_np[: batch.num_reqs + 1]),
            batch.positions[batch.query_start_loc[: batch.num_reqs].long()],
            [*state.aux_hidden_states, state.hidden_states],
        )

    def watch_draws(
        self, request_id: str, num_prompt_tokens: int, expected: Sequence[int]
    ) -> sampler_v2.DrawMarginsV2:
        """Compare the next draws of a request with the tokens expected, until `end`."""
        return sampler_v2.DrawMarginsV2(self.runner, request_id, num_prompt_tokens, expected)

    # --- what the runner is made of -----------------------------------------------------------

    @property
    def drafting(self) -> Any:
        """vLLM's speculator, or ours."""
        return self.runner.speculator

    @property
    def draft_model(self) -> torch.nn.Module | None:
        """The draft model; None without one."""
        model: torch.nn.Module | None = self.runner.get_draft_model()
        return model

    @property
    def sampler(self) -> str:
        """Name of the class that samples, with drafts if the engine has any."""
        return type(self.runner.rejection_sampler or self.runner.sampler).__name__

    @property
    def is_keyed(self) -> bool:
        """Whether seed and policy alone decide a sample, with any drafts."""
        return sampler_v2.is_keyed(self.runner)

    def sampling_faults(self) -> list[str]:
        """Return the faults of sampling under speculation in this process."""
        if self.runner.rejection_sampler is None:
            return []  # no drafts, or not the last pipeline stage
        return selftest_v2.sampling_faults(self.runner)
