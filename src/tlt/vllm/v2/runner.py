"""vLLM's V2 model runner, the one of GPU engines, as TLT's worker sees it.

`v1.runner` has the same methods for V1. V2 builds its speculator together with the runner, and its
sampler when it loads the policy. Under asynchronous scheduling the host runs one engine step ahead
of the device and never learns how many drafts were rejected, so positions come from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tlt.vllm.args import CONFIG_KEY
from tlt.vllm.recorder import StateRecorder
from tlt.vllm.v2 import sampler as sampler_v2
from tlt.vllm.v2 import selftest as selftest_v2
from tlt.vllm.v2.draw_margins import DrawMarginsV2


class RunnerV2:
    """The speculator, sampler and states of vLLM's V2 model runner."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._settings = vllm_config.additional_config[CONFIG_KEY]
        self.runner: Any = None
        """vLLM's runner, once it is built."""

    # --- start --------------------------------------------------------------------------------

    @contextmanager
    def installing(self) -> Iterator[None]:
        """Let vLLM build our speculator instead of its own.

        vLLM has no setting for it, and replacing the speculator later would allocate its buffers
        twice.
        """
        from vllm.v1.worker.gpu import model_runner

        original = model_runner.init_speculator

        def build(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
            return self._speculator(vllm_config, device, req_states, original)

        model_runner.init_speculator = build
        try:
            yield
        finally:
            model_runner.init_speculator = original

    def _speculator(
        self, config: Any, device: torch.device, req_states: Any, original: Callable[..., Any]
    ) -> Any:
        from tlt.vllm.ngram.speculator import HistorySpeculator, ngram_drafts
        from tlt.vllm.v2.speculator import SwitchingSpeculator

        ngram = self._settings["ngram"]
        method = config.speculative_config.method
        if sampler_v2.wants_keys(config.speculative_config):
            # vLLM would keep the logits of sampled drafts for its ratio test. Acceptance by
            # equality reads none, and our speculator samples without them.
            config.speculative_config.draft_sample_method = "greedy"
        if method == "eagle3":
            history = ngram_drafts(config, device, req_states, ngram) if ngram else None
            budget = self._settings.get("drafter_state_bytes", 0)
            return SwitchingSpeculator(config, device, history, budget)
        if method == "ngram_gpu" and ngram["history_tokens"]:
            return HistorySpeculator(config, device, req_states, ngram)
        return original(config, device, req_states)

    def install(self, runner: Any) -> None:
        """Note the runner that vLLM has built."""
        self.runner = runner

    def loaded(self) -> None:
        """Install the keyed sampler: vLLM builds the sampler when it has loaded the policy."""
        sampler_v2.install(self.runner)

    # --- engine steps -------------------------------------------------------------------------

    def begin_step(self, scheduler_output: Any, unlearned: Collection[str]) -> None:
        """Set the drafter of this engine step; learn from ended requests but for `unlearned`."""
        speculator = self.runner.speculator
        if not hasattr(speculator, "drafter"):
            return
        ended = scheduler_output.finished_req_ids
        speculator.drafter = getattr(scheduler_output, "tlt_drafter", speculator.drafter)
        speculator.forget(ended)
        if (history := speculator.history) is not None:
            texts = getattr(scheduler_output, "tlt_ended", {})
            learned = {name: text for name, text in texts.items() if name not in unlearned}
            history.requests_ended(learned)
            history.drop(ended - learned.keys())

    def end_step(self) -> None:
        """Note that the forward pass of this engine step has been started."""

    def record(self, recorder: StateRecorder, scheduler_output: Any) -> None:
        """Record the states that vLLM's runner holds between forward pass and sampling."""
        for request in scheduler_output.scheduled_new_reqs:
            prompt = np.array(request.prompt_token_ids, dtype=np.int32)
            recorder.begin(request.req_id, prompt, request.num_computed_tokens)
        state = self.runner.execute_model_state
        if state is None or state.aux_hidden_states is None:
            return
        batch = state.input_batch
        recorder.add(
            batch.req_ids,
            batch.query_start_loc_np.tolist(),
            batch.positions[batch.query_start_loc[: batch.num_reqs].long()],
            [*state.aux_hidden_states, state.hidden_states],
        )

    def drop_inputs(self) -> None:
        """Drop the inputs that the draft model skipped."""
        if (missed := getattr(self.runner.speculator, "missed", None)) is not None:
            missed.clear()

    def watch_draws(
        self, request_id: str, num_prompt_tokens: int, expected: Sequence[int]
    ) -> DrawMarginsV2:
        """Compare the next draws of a request with the tokens expected, until `end`."""
        return DrawMarginsV2(self.runner, request_id, num_prompt_tokens, expected)

    # --- history of samples -------------------------------------------------------------------

    def forget_history(self) -> None:
        """Forget the history of samples."""
        if (history := getattr(self.runner.speculator, "history", None)) is not None:
            history.forget()

    # --- what the runner is made of -----------------------------------------------------------

    @property
    def draft_model(self) -> torch.nn.Module | None:
        """The draft model; None without one."""
        model: torch.nn.Module | None = self.runner.get_draft_model()
        return model

    @property
    def proposer(self) -> str | None:
        """Name of the class that drafts; None without one."""
        speculator = self.runner.speculator
        return None if speculator is None else type(speculator).__name__

    @property
    def sampler(self) -> str:
        """Name of the class that samples, with drafts if the engine has any."""
        return type(self.runner.rejection_sampler or self.runner.sampler).__name__

    @property
    def is_keyed(self) -> bool:
        """Whether seed and policy alone decide a sample, whatever was drafted."""
        return sampler_v2.is_keyed(self.runner)

    def sampling_faults(self) -> list[str]:
        """Return the faults of sampling under speculation in this process."""
        if self.runner.rejection_sampler is None:
            return []  # no drafts, or not the last pipeline stage
        return selftest_v2.sampling_faults(self.runner)
