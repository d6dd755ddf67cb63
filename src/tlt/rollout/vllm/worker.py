"""Workers that switch the drafter per engine step, and report on themselves at start-up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from tlt.node.weights import check_weights
from tlt.rollout.vllm import compat, invariant, plugin, sampler, selftest
from tlt.rollout.vllm.missed import MissedDraws
from tlt.rollout.vllm.proposer import SwitchingProposer
from tlt.rollout.vllm.recorder import StateRecorder
from tlt.rollout.vllm.scheduler import CONFIG_KEY
from tlt.rollout.vllm.watch import PolicyWatch
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.writer import StateWriter

logger = logging.getLogger(__name__)


class _Adaptive:
    """The part that the workers of every device share, mixed in before vLLM's class."""

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        self._look_into_history()
        speculative = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        if speculative is None or speculative.method != "eagle3":
            return
        runner = self.model_runner  # type: ignore[attr-defined]
        if not hasattr(runner, "drafter"):
            return  # not the last pipeline stage, or vLLM's V2 runner: only draft lengths switch
        settings = self.vllm_config.additional_config[CONFIG_KEY]  # type: ignore[attr-defined]
        # The runner has built vLLM's EAGLE proposer but loaded nothing into it yet.
        runner.drafter = SwitchingProposer(
            self.vllm_config,  # type: ignore[attr-defined]
            runner.device,
            runner,
            settings.get("ngram"),
            settings.get("drafter_state_bytes", 0),
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._renew_drafter()
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        model_config = self.vllm_config.model_config  # type: ignore[attr-defined]
        self._watch = PolicyWatch(
            self.get_model(),  # type: ignore[attr-defined]
            model_config.dtype,
            whole=parallel.world_size == 1
            and model_config.quantization is None
            and self.vllm_config.load_config.load_format != "dummy",  # type: ignore[attr-defined]
        )
        self._watch.expect(Path(model_config.model))

    @property
    def _draft_model(self) -> Any:
        """The draft model of either of vLLM's model runners; None without one."""
        runner = self.model_runner  # type: ignore[attr-defined]
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        model = getattr(drafter, "model", None)
        return model if isinstance(model, torch.nn.Module) else None

    def _renew_drafter(self) -> None:
        """Copy the modules that the drafter's checkpoint lacks from the policy."""
        if (drafter := self._draft_model) is not None:
            compat.copy_policy_into_drafter(self.get_model(), drafter)  # type: ignore[attr-defined]

    def _look_into_history(self) -> None:
        """Replace vLLM's n-gram proposer in an engine without a draft model."""
        speculative = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        runner = self.model_runner  # type: ignore[attr-defined]
        ngram = self.vllm_config.additional_config[CONFIG_KEY].get("ngram")  # type: ignore[attr-defined]
        if not ngram or not ngram["history_tokens"] or not hasattr(runner, "drafter"):
            return
        if speculative.method == "ngram":
            from tlt.rollout.vllm.lookup import HistoryProposer

            matches = {
                "min_match": speculative.prompt_lookup_min,
                "max_match": speculative.prompt_lookup_max,
            }
            runner.drafter = HistoryProposer(
                self.vllm_config,  # type: ignore[attr-defined]
                runner,
                ngram | matches,
            )

    def _history_lookup(self) -> Any:
        """Return the proposer that looks n-grams up in a history of samples; None without one."""
        drafter = getattr(self.model_runner, "drafter", None)  # type: ignore[attr-defined]
        lookup = getattr(drafter, "ngram", drafter)
        return lookup if hasattr(lookup, "history") else None

    def tlt_forget_history(self) -> None:
        """Forget the history of samples."""
        if (lookup := self._history_lookup()) is not None:
            lookup.forget()

    def execute_model(self, scheduler_output: Any) -> Any:
        drafter = getattr(self.model_runner, "drafter", None)  # type: ignore[attr-defined]
        if isinstance(drafter, SwitchingProposer):
            drafter.drafter = getattr(scheduler_output, "tlt_drafter", "eagle3")
            drafter.missed.forget(scheduler_output.finished_req_ids)
        if (lookup := self._history_lookup()) is not None:
            lookup.requests_ended(scheduler_output.finished_req_ids - self._rechecks)
        self._rechecks -= scheduler_output.finished_req_ids
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if self._recorder is not None:
            self._record(scheduler_output)
        return output

    # --- samples generated again without drafts -----------------------------------------------

    _rechecks: frozenset[str] = frozenset()
    """Requests that vLLM's runner knows and that are rechecks; no n-grams are learned from them."""

    def tlt_begin_recheck(self, request_id: str, expected: Sequence[int]) -> None:
        """Compare the next draws, all of one request, with the tokens expected."""
        self._rechecks |= {request_id}
        self._missed = MissedDraws(self.model_runner.sampler.keys, expected)  # type: ignore[attr-defined]

    def tlt_end_recheck(self) -> dict[int, float]:
        """Return by how much expected tokens missed the draw, by position, and drop the states."""
        if self._recorder is not None:
            for request_id in self._rechecks:
                self._recorder.drop(request_id)
        return self._missed.end()

    # --- hidden states for the drafter's training ---------------------------------------------

    _recorder: StateRecorder | None = None
    _writer: StateWriter | None = None

    def tlt_capture(self, settings: dict[str, Any]) -> None:
        """Store the hidden states of all later samples in the buffer of this node."""
        block_size = self.vllm_config.cache_config.block_size  # type: ignore[attr-defined]
        self._recorder = StateRecorder(block_size)
        self._writer = StateWriter(SampleBuffer(BufferSettings(**settings)))

    def _record(self, scheduler_output: Any) -> None:
        """Record the states that vLLM's runner holds between forward pass and sampling."""
        runner = self.model_runner  # type: ignore[attr-defined]
        state = runner.execute_model_state
        if state is None or state.aux_hidden_states is None:
            return
        assert self._recorder is not None
        try:
            self._recorder.record(
                runner.input_batch,
                scheduler_output.num_scheduled_tokens,
                state.aux_hidden_states,
                state.hidden_states,
            )
        except Exception:
            self._give_recording_up()

    def _give_recording_up(self) -> None:
        """Stop recording after a fault, so that samples do not suffer from it."""
        logger.exception("the engine no longer records hidden states")
        self._recorder = None

    def tlt_keep_states(
        self, request_id: str, sample_id: str | None, rl_step: int, token_ids: list[int]
    ) -> int:
        """Store or drop the states of an ended request; return the number of stored samples."""
        assert self._writer is not None
        try:
            captured = self._recorder.take(request_id, token_ids) if self._recorder else None
            if captured is not None and sample_id is not None:
                self._writer.write(sample_id, rl_step, captured)
        except Exception:
            self._give_recording_up()
        return self._writer.num_written

    def tlt_report(self, self_test: bool) -> dict[str, Any]:
        """Return what this process runs; the engine asks every worker before the first request."""
        drafter = getattr(self.model_runner, "drafter", None)  # type: ignore[attr-defined]
        is_keyed = isinstance(self.model_runner.sampler, sampler.KeyedSampler)  # type: ignore[attr-defined]
        return {
            "plugin": plugin.active,
            "vllm": compat.vllm_version(),
            "fixes": compat.applied(),
            "proposer": type(drafter).__name__ if drafter is not None else None,
            "sampler": type(self.model_runner.sampler).__name__,  # type: ignore[attr-defined]
            "faults": selftest.sampling_faults(self.device, is_keyed) if self_test else [],  # type: ignore[attr-defined]
            "drafter_faults": self._drafter_faults(),
            "policy_faults": self._watch.differing(),
            "compared_tensors": self._watch.num_compared,
        }

    def _drafter_faults(self) -> list[str]:
        drafter = self._draft_model
        policy = self.get_model()  # type: ignore[attr-defined]
        return [] if drafter is None else compat.drafter_faults(policy, drafter)

    def tlt_check_weights(self, update_info: dict[str, Any], draft: bool) -> None:
        """Refuse weights that do not fit the model's folder.

        This happens before an update: vLLM cannot undo an update that it has started, and weights
        that do not fit must change nothing.
        """
        config = self.vllm_config  # type: ignore[attr-defined]
        model = config.speculative_config.model if draft else config.model_config.model
        check_weights(update_info["path"], Path(model), whole=not draft)

    def tlt_update_weights(self, update_info: dict[str, Any], draft: bool) -> dict[str, Any]:
        """Load new weights in one call, so that no engine step runs before they are complete.

        Afterwards compare the policy with the learner's, and load a policy that differs again.
        Return the tensors that differed, those that still do, and the seconds of the comparison.
        """
        self._load(update_info, draft)
        started_s = time.monotonic()
        source = Path(update_info["path"])
        differed = self._watch.differing() if draft else self._watch.expect(source)
        if compat.skips("fingerprint"):
            differed = []
        still = self._mend_policy(differed) if differed else []
        return {"differed": differed, "still": still, "seconds": time.monotonic() - started_s}

    def _mend_policy(self, differed: list[str]) -> list[str]:
        """Load the policy again from its source, and return the tensors that still differ."""
        model = self.get_model()  # type: ignore[attr-defined]
        try:
            with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
                compat.begin_reload(model)
                compat.load(model, self._watch.tensors())
                compat.end_reload(model, self.vllm_config.model_config)  # type: ignore[attr-defined]
            self._renew_drafter()
            return self._watch.differing()
        except Exception:
            logger.exception("the policy could not be loaded again")
            return differed

    def _load(self, update_info: dict[str, Any], draft: bool) -> None:
        if draft:
            self.start_draft_weight_update()  # type: ignore[attr-defined]
        else:
            self.start_weight_update()  # type: ignore[attr-defined]
        self.update_weights(update_info)  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]
        if not draft:
            self._renew_drafter()
            self._drop_states()

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        self._drop_states()
        super().sleep(*args, **kwargs)  # type: ignore[misc]

    def _drop_states(self) -> None:
        """Drop kept inputs and states. Between rollouts, the last requests are still known here."""
        drafter = getattr(self.model_runner, "drafter", None)  # type: ignore[attr-defined]
        if isinstance(drafter, SwitchingProposer):
            drafter.missed.clear()
        if self._recorder is not None:
            self._recorder.clear()


class AdaptiveCPUWorker(_Adaptive, CPUWorker):
    """One engine process on CPU cores."""

    def init_device(self) -> None:
        super().init_device()
        config = self.vllm_config
        if not compat.skips("keyed"):
            sampler.install(self.model_runner, config.speculative_config, config.model_config.seed)
        if self._is_invariant:
            invariant.prepare(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self._is_invariant:
            invariant.pad_head(self.get_model())

    @property
    def _is_invariant(self) -> bool:
        """Whether logits must not depend on the batch: only float32 is exact enough to tell."""
        return self.vllm_config.model_config.dtype == torch.float32

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        # vLLM made a generator for every request with a seed. The keyed sampler needs none, and
        # vLLM 0.32 fails on a generator whose request still has a part of its prompt to come.
        self.model_runner.input_batch.generators.clear()
        return output


class AdaptiveGPUWorker(_Adaptive, Worker):
    """One engine process on a GPU."""
