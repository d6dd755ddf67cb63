"""The worker of GPU engines, and the part that it shares with `cpu_worker`.

The worker records states, loads and watches weights, and reports on itself. What differs between
vLLM's model runners is in `v1.runner` and `v2.runner`. This module must not import vLLM's CPU
worker: that import patches torch for a machine without a GPU.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.worker.gpu_worker import Worker

from tlt.errors import EngineError
from tlt.node.fingerprint import Fingerprint, fingerprint
from tlt.node.weights import check_shapes, check_weights
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import Captured
from tlt.states.writer import StateWriter
from tlt.vllm import compat, plugin
from tlt.vllm.args import CONFIG_KEY, RECORDED_CACHES, WAITING_STEPS
from tlt.vllm.embedded import EmbeddedWorker
from tlt.vllm.policy_verifier import PolicyVerifier
from tlt.vllm.recorder import StateRecorder

logger = logging.getLogger(__name__)


class AdaptiveWorker(EmbeddedWorker):
    """A worker that switches the drafter per engine step, mixed in before vLLM's class."""

    def init_device(self) -> None:
        self._runner = self._make_runner()
        with self._runner.installing():
            super().init_device()  # type: ignore[misc]
        self._runner.install(self.model_runner)  # type: ignore[attr-defined]

    def _make_runner(self) -> Any:
        """Return our side of the model runner that vLLM is about to build."""
        expected = self.vllm_config.additional_config[CONFIG_KEY]["runner"]  # type: ignore[attr-defined]
        actual = "v2" if self.use_v2_model_runner else "v1"  # type: ignore[attr-defined]
        method = getattr(self.vllm_config.speculative_config, "method", None)  # type: ignore[attr-defined]
        if method == "ngram_gpu" and not compat.counts_drafts():
            raise EngineError(
                "n-grams without a drafter need vLLM 0.32 on GPUs; set engine.drafter, or pip "
                "install 'vllm>=0.32'"
            )
        if actual != expected:
            raise EngineError(
                f"vLLM runs this model on its model runner {actual}, and the engine was set up for "
                f"{expected}; set VLLM_USE_V2_MODEL_RUNNER={int(actual == 'v2')}"
            )
        return self._make_v2() if actual == "v2" else self._make_v1()

    def _make_v1(self) -> Any:
        from tlt.vllm.v1.runner import RunnerV1

        return RunnerV1(self.vllm_config)  # type: ignore[attr-defined]

    def _make_v2(self) -> Any:
        from tlt.vllm.v2.runner import RunnerV2

        return RunnerV2(self.vllm_config)  # type: ignore[attr-defined]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._runner.loaded()
        self._renew_drafter()
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        model_config = self.vllm_config.model_config  # type: ignore[attr-defined]
        self._watch = PolicyVerifier(
            self.get_model(),  # type: ignore[attr-defined]
            model_config.dtype,
            whole=parallel.world_size == 1
            and model_config.quantization is None
            and self.vllm_config.load_config.load_format != "dummy",  # type: ignore[attr-defined]
        )
        self._watch.expect(Path(model_config.model))

    def _renew_drafter(self) -> None:
        """Copy the modules that the drafter's checkpoint lacks from the policy."""
        if (drafter := self._runner.draft_model) is not None:
            compat.copy_policy_into_drafter(self.get_model(), drafter)  # type: ignore[attr-defined]

    def tlt_forget_history(self) -> None:
        """Forget the history of samples."""
        self._runner.forget_history()

    def execute_model(self, scheduler_output: Any) -> Any:
        self._runner.begin_step(scheduler_output, self._rechecks)
        self._rechecks -= scheduler_output.finished_req_ids
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if self._recorder is not None:
            self._keep_ended(scheduler_output)
            self._record(scheduler_output)
        self._runner.end_step()
        return output

    # --- samples generated again without drafts -----------------------------------------------

    _rechecks: frozenset[str] = frozenset()
    """Requests that vLLM's runner knows and that are rechecks; no n-grams are learned from them."""

    def tlt_begin_recheck(
        self, request_id: str, num_prompt_tokens: int, expected: Sequence[int]
    ) -> None:
        """Compare the next draws, all of one request, with the tokens expected."""
        self._rechecks |= {request_id}
        self._missed = self._runner.watch_draws(request_id, num_prompt_tokens, expected)

    def tlt_end_recheck(self) -> dict[int, float]:
        """Return by how much expected tokens missed the draw, by position, and drop the states."""
        if self._recorder is not None:
            self._recorder.drop(self._rechecks)
        missed: dict[int, float] = self._missed.end()
        return missed

    # --- hidden states for the drafter's training ---------------------------------------------

    _recorder: StateRecorder | None = None
    _writer: StateWriter | None = None

    def tlt_capture(self, settings: dict[str, Any]) -> None:
        """Store the hidden states of all later samples in the buffer of this node.

        All tensor-parallel ranks compute the same states. One rank stores them. It keeps the states
        of `RECORDED_CACHES` times as many tokens as the KV cache holds.
        """
        if get_tensor_model_parallel_rank() > 0:
            return
        config = self.vllm_config  # type: ignore[attr-defined]
        cache = config.cache_config
        scheduler = config.scheduler_config
        self._recorder = StateRecorder(
            cache.block_size,
            num_tokens=RECORDED_CACHES * cache.num_gpu_blocks * cache.block_size,
            max_requests=2 * scheduler.max_num_seqs,  # preempted ones keep their states
            max_len=config.model_config.max_model_len,
            max_waiting=WAITING_STEPS * scheduler.max_num_batched_tokens,
        )
        self._writer = StateWriter(SampleBuffer(BufferSettings(**settings)))

    def _record(self, scheduler_output: Any) -> None:
        try:
            self._runner.record(self._recorder, scheduler_output)
        except Exception:
            self._recorder.stop()  # type: ignore[union-attr]

    def tlt_keep_states(
        self, request_id: str, sample_id: str | None, rl_step: int, token_ids: list[int]
    ) -> tuple[int, int]:
        """Store the states of an ended sample, or drop the states of a request without `sample_id`.

        Return the numbers of samples stored and lost so far.
        """
        if self._writer is None or self._recorder is None:
            return 0, 0
        if sample_id is None:
            self._recorder.drop([request_id])
        else:
            window = partial(self._writer.buffer.window, sample_id, rl_step)
            then = partial(self._store, sample_id, rl_step)
            self._recorder.take(request_id, token_ids, window, then)
        return self._writer.num_written, self._writer.num_dropped

    def _store(self, sample_id: str, rl_step: int, captured: Captured | None) -> None:
        """Store a sample in the recorder's thread; count a sample whose states are missing."""
        assert self._writer is not None
        if captured is None:
            self._writer.missing(sample_id)
        else:
            self._writer.write(sample_id, rl_step, captured)

    def tlt_report(self, self_test: bool) -> dict[str, Any]:
        """Return what this process runs; the engine asks every worker before the first request."""
        return {
            "plugin": plugin.active,
            "vllm": compat.vllm_version(),
            "fixes": compat.applied(),
            "proposer": self._runner.proposer,
            "sampler": self._runner.sampler,
            "keyed": self._runner.is_keyed,
            "faults": self._runner.sampling_faults() if self_test else [],
            "drafter_faults": self._drafter_faults(),
            "policy_faults": self._watch.differing(),
            "compared_tensors": self._watch.num_compared,
        }

    def _drafter_faults(self) -> list[str]:
        drafter = self._runner.draft_model
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

        Then compare the policy with the learner's, and reload it if it differs. Return the tensors
        that differed, the tensors that still do, and the seconds of the comparison.
        """
        if draft and self.is_embedded:
            return self.tlt_swap_drafter(update_info)
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
        self.finish_weight_update()
        if not draft:
            self._renew_drafter()
            self._drop_states()

    # --- a policy without a file: from GPU to GPU, or from a trainer in this process -----------

    def tlt_start_policy(self, shapes: list[tuple[str, list[int]]]) -> None:
        """Refuse a policy that does not fit the model's folder; otherwise start an update."""
        config = self.vllm_config  # type: ignore[attr-defined]
        check_shapes(shapes, Path(config.model_config.model), whole=True)
        self.start_weight_update()  # type: ignore[attr-defined]

    def tlt_finish_policy(self, seed: int, fingerprints: dict[str, Fingerprint]) -> dict[str, Any]:
        """Finish an update, and compare the policy with the learner's.

        A policy that differs cannot be reloaded, because there is no file: the engine must be
        replaced.
        """
        self.finish_weight_update()
        return self._compared(seed, fingerprints)

    def tlt_load_policy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Load the policy of a trainer in this process, and compare it as `tlt_finish_policy`.

        No request may run. vLLM reads the tensors while it loads them, and copies nothing before.
        """
        config = self.vllm_config  # type: ignore[attr-defined]
        dtype = config.model_config.dtype
        seed = secrets.randbits(31)
        seen: dict[str, Fingerprint] = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                seen[name] = fingerprint(tensor, seed, dtype)
                yield name, tensor

        model = self.get_model()  # type: ignore[attr-defined]
        with set_current_vllm_config(config), torch.no_grad():
            compat.begin_reload(model)
            compat.load(model, noted())
            compat.end_reload(model, config.model_config)
        return self._compared(seed, seen)

    def _compared(self, seed: int, fingerprints: dict[str, Fingerprint]) -> dict[str, Any]:
        self._renew_drafter()
        self._drop_states()
        started_s = time.monotonic()
        differed = self._watch.expect_sent(seed, fingerprints)
        if compat.skips("fingerprint"):
            differed = []
        return {"differed": differed, "still": differed, "seconds": time.monotonic() - started_s}

    # --- memory -------------------------------------------------------------------------------

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        self._drop_states()
        super().sleep(*args, **kwargs)  # type: ignore[misc]

    def _drop_states(self) -> None:
        """Drop kept inputs and states. Between rollouts, the last requests are still known here."""
        self._runner.drop_inputs()
        if self._recorder is not None:
            self._recorder.clear()


class AdaptiveGPUWorker(AdaptiveWorker, Worker):
    """One engine process on a GPU."""

    def determine_available_memory(self) -> int:
        """Return the memory for the KV cache, without the memory of catch-up and recorder.

        vLLM's profiling run skips no draft and records no states, so they take nothing there.
        """
        available = int(super().determine_available_memory())
        if self.cache_config.kv_cache_memory_bytes:
            return available  # the user's own figure
        speculative = self.vllm_config.speculative_config
        has_model = speculative is not None and speculative.method == "eagle3"
        settings = self.vllm_config.additional_config[CONFIG_KEY]
        taken = settings["drafter_state_bytes"] if has_model else 0
        if settings.get("records"):
            width = 4 * self.vllm_config.model_config.get_hidden_size()
            rows = self.vllm_config.scheduler_config.max_num_batched_tokens
            taken += rows * width * torch.bfloat16.itemsize
        return available - taken
