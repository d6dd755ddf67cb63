"""One vLLM engine and the thread that steps it.

The engine core runs inside this process: no hop between the strategy of each step and its
scheduler, and killing the process ends the engine, whole. All of vLLM and torch is touched by one
thread, the loop, which alone is bound to the engine's cores. Others reach it in two ways: the
queue of requests, under a lock, and commands, which the loop runs between two steps.

Invariants: a request is either queued here (and can be withdrawn), in flight in vLLM, or finished;
each submitted request ends as exactly one `Sample`, unless withdrawn. The policy's weights change
only while nothing is in flight, so that every sample comes from one policy.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from tlt.config.rollout import EngineConfig
from tlt.contracts import (
    WHOLE,
    EngineStats,
    Sample,
    SampleRequest,
    SamplingSpec,
    StepReport,
)
from tlt.errors import ConfigError, EngineError, EngineTainted, EngineUnsafe
from tlt.hardware import thread_environment
from tlt.node.cores import claim_cores
from tlt.rollout.guard import check_length, check_sampling
from tlt.rollout.vllm.args import drafters, engine_args, max_draft_tokens
from tlt.spans import Span
from tlt.strategy.spec import StrategySpec, build_strategy, complete_strategy

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROCESS_ENVIRONMENT = thread_environment() | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TQDM_DISABLE": "1",
}
"""What a process needs in its environment before vLLM is imported; the user's values win."""


class RolloutEngine:
    """A running engine. Construct, then `start`."""

    def __init__(self, config: EngineConfig, name: str = "engine-0") -> None:
        self.config = config
        self.name = name
        self._args = engine_args(config)  # refuses bad settings before anything starts
        self._args["seed"] = stream_seed(self._args.get("seed"), name)
        self._max_draft_tokens = max_draft_tokens(config)
        self._lock = threading.Condition()
        self._queue: deque[tuple[SampleRequest, float]] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._finished: list[Sample] = []
        self._in_flight: dict[str, tuple[SampleRequest, float, float]] = {}
        self._vllm_ids: dict[str, str] = {}
        """What vLLM calls the requests in flight."""
        self._paused = False
        self._stopping = False
        self._turn_started_s = time.monotonic()
        self._error: BaseException | None = None
        self._versions = {"policy": 0, "drafter": 0}
        self._safe_to_sample = True
        self._asleep = False
        self._captured_samples = 0
        self._policy_mismatches = 0
        self._fingerprint_s = 0.0
        self._cores: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, name=f"tlt-{name}", daemon=True)
        self._ready: Future[dict[str, Any]] = Future()

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Start vLLM and verify the plug-in; what every worker reports about itself."""
        self._thread.start()
        return self._ready.result()

    def shutdown(self) -> None:
        """Finish the current step and stop. Queued and running requests are dropped."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # --- samples ------------------------------------------------------------------------------

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests; all or, when one is refused, none."""
        for request in requests:
            self._check(request)
        now = time.time()
        with self._lock:
            self._raise_if_dead()
            self._queue.extend((request, now) for request in requests)
            self._lock.notify_all()

    def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        """Take back requests that have not started; the ids that were still queued."""
        wanted = set(sample_ids)
        with self._lock:
            taken = [r.sample_id for r, _ in self._queue if r.sample_id in wanted]
            gone = set(taken)
            self._queue = deque(item for item in self._queue if item[0].sample_id not in gone)
        return taken

    def take_finished(self, timeout_s: float) -> list[Sample]:
        """Samples that ended since the last call; waits for the first one."""
        with self._lock:
            self._lock.wait_for(lambda: self._finished or self._error or self._stopping, timeout_s)
            if not self._finished:
                self._raise_if_dead()
                self._raise_if_stalled()
            samples, self._finished = self._finished, []
            return samples

    def pause(self) -> None:
        """Stop stepping; requests stay where they are."""
        with self._lock:
            self._paused = True
        self._command(lambda: None)  # returns once the current step is over

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            self._lock.notify_all()

    def sleep(self) -> None:
        """Give the device's memory to a learner that shares it; drafter and policy go to the host.

        Nothing may be in flight. On CPU engines vLLM has nothing to give.
        """

        def go_to_sleep() -> None:
            if self._in_flight or self._queue:
                raise EngineError("samples are under way: an engine sleeps only between rollouts")
            if not self._asleep:
                self._llm.sleep(level=1)
            self._asleep = True

        if self.config.num_gpus:
            self._command(go_to_sleep)

    def wake(self) -> None:
        """Take the memory back, before weights are updated or samples generated."""

        def wake_up() -> None:
            if self._asleep:
                self._llm.wake_up()
            self._asleep = False

        if self.config.num_gpus:
            self._command(wake_up)

    # --- settings and weights -----------------------------------------------------------------

    def set_strategy(self, spec: StrategySpec) -> None:
        """Choose arms by another strategy from the next step on."""
        strategy = build_strategy(complete_strategy(spec, drafters(self.config)))
        for arm in strategy.arms():
            if arm.num_draft_tokens > self._max_draft_tokens:
                raise ConfigError(
                    f"arm {arm} drafts more than the {self._max_draft_tokens} tokens this engine "
                    f"was started for; set engine.max_draft_tokens = {arm.num_draft_tokens}"
                )
            if arm.drafter == "eagle3" and self.config.drafter is None:
                raise ConfigError(f"arm {arm}: this engine was started without engine.drafter")
            if arm.drafter == "ngram" and self._args["additional_config"]["tlt"]["ngram"] is None:
                raise ConfigError(
                    f"arm {arm}: this engine was started without n-grams; set engine.ngram, and "
                    "engine_args.async_scheduling = false"
                )
        self._command(lambda: self._controller.set_strategy(strategy))

    def update_policy(self, manifest: dict[str, Any], version: int) -> float:
        """Load new policy weights; seconds it took. Nothing may be in flight."""

        def update() -> float:
            if self._in_flight or self._queue:
                raise EngineError(
                    f"{len(self._in_flight)} samples are running and {len(self._queue)} queued: "
                    "a policy update now would mix two policies in one sample"
                )
            started_s = self._controller.now_s()
            self._load(manifest, draft=False)
            # Cached prefixes hold keys and values of the old policy.
            if not self._llm.reset_prefix_cache():
                raise EngineTainted(
                    f"{self.name} keeps cached prefixes of the last policy: vLLM did not drop them"
                )
            self._versions["policy"] = version
            return self._swapped(started_s)

        return self._command(update)

    def update_drafter(self, manifest: dict[str, Any], version: int) -> float:
        """Load new drafter weights between two steps; seconds it took. Requests keep running."""
        if self.config.drafter is None:
            raise ConfigError("this engine was started without engine.drafter")

        def update() -> float:
            started_s = self._controller.now_s()
            self._load(manifest, draft=True)
            self._versions["drafter"] = version
            self._controller.drafter_version = version
            return self._swapped(started_s)

        return self._command(update)

    def _load(self, manifest: dict[str, Any], draft: bool) -> None:
        """Weights into all workers, which then compare their policy with the learner's."""
        self._llm.collective_rpc("tlt_check_weights", args=(manifest, draft))
        try:
            reports = self._llm.collective_rpc("tlt_update_weights", args=(manifest, draft))
        except Exception as error:
            raise EngineTainted(
                f"{self.name}: new weights were loaded in part: {error!r}"
            ) from error
        self._fingerprint_s += max(report["seconds"] for report in reports)
        differed = sorted({name for report in reports for name in report["differed"]})
        if not differed:
            return
        self._policy_mismatches += 1
        what = "a drafter swap" if draft else "a policy update"
        text = f"after {what} its policy was not the learner's in {', '.join(differed[:3])}"
        if any(report["still"] for report in reports):
            raise EngineTainted(f"{self.name}: {text}, nor after loading it again")
        logger.error("%s: %s; loaded again, no sample was affected", self.name, text)

    def _swapped(self, started_s: float) -> float:
        now_s = self._controller.now_s()
        self._controller.spans.add(Span("swapping", started_s, now_s))
        return now_s - started_s

    def stats(self) -> EngineStats:
        return EngineStats(
            engine=self.name,
            **asdict(self._controller.totals),
            running=len(self._in_flight),
            queued=len(self._queue),
            policy_version=self._versions["policy"],
            drafter_version=self._versions["drafter"],
            captured_samples=self._captured_samples,
            policy_mismatches=self._policy_mismatches,
            fingerprint_s=self._fingerprint_s,
        )

    def report(self) -> dict[str, Any]:
        """Ask every worker about itself again, as at the start; what the first one says."""
        return self._command(self._report)

    def take_trace(self) -> list[StepReport]:
        """What each step since the last call did."""
        return self._command(lambda: self._controller.take_trace())

    def take_spans(self, max_spans: int) -> list[Span]:
        """Where the time since the last call went, in the time of the wall clock."""

        def take() -> list[Span]:
            shift_s = time.time() - self._controller.now_s()
            return [span.shifted(shift_s) for span in self._controller.spans.take(max_spans)]

        return self._command(take)

    def reset_prefix_cache(self) -> None:
        """Forget prompts and samples seen so far, so that what follows is measured from nothing."""

        def forget() -> None:
            if not self._llm.reset_prefix_cache():
                raise EngineError(f"{self.name} did not forget: samples are under way")
            self._llm.collective_rpc("tlt_forget_history")

        self._command(forget)

    def devices(self) -> tuple[str, list[str]]:
        """This engine's name, and the GPUs its process sees, for ranks that share them."""
        return self.name, [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]

    # --- the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            report = self._start_vllm()
        except BaseException as error:
            self._fail(error)
            self._ready.set_exception(error)
            return
        self._ready.set_result(report)
        try:
            while self._turn():
                pass
        except BaseException as error:
            logger.exception("%s: the engine loop ended", self.name)
            self._fail(error)
        self._stop_vllm()

    def _start_vllm(self) -> dict[str, Any]:
        if self.config.num_gpus == 0:
            self._cores = cores = claim_cores(self.config.num_cores, self.config.core_group)
            os.sched_setaffinity(0, cores)  # this thread, and the OpenMP threads it will start
            os.environ["OMP_NUM_THREADS"] = str(len(cores))
        for key, value in PROCESS_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        if self._args["additional_config"]["tlt"]["ngram"] is not None:
            # Our proposer, which looks n-grams up, plugs into this model runner only.
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        import torch
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from tlt.rollout.vllm.scheduler import active_controller

        if self.config.num_gpus == 0:
            torch.set_num_threads(self.config.num_cores)
        self._llm = LLMEngine.from_engine_args(EngineArgs(**self._args))
        scheduler = self._llm.engine_core.engine_core.scheduler
        self._controller = active_controller(scheduler)
        self._slots = int(self._llm.vllm_config.scheduler_config.max_num_seqs)
        self._max_model_len = int(self._llm.model_config.max_model_len)
        if self.config.capture is not None:
            self._llm.collective_rpc("tlt_capture", args=(self.config.capture,))
        return self._report()

    def _report(self) -> dict[str, Any]:
        """Refuse an engine whose plug-in is not active, and note one that cannot sample."""
        from tlt.rollout.vllm.compat import skips, version_supported

        speculating = self._max_draft_tokens > 0
        reports = self._llm.collective_rpc("tlt_report", args=(speculating,))
        faults = sorted({fault for report in reports for fault in report["faults"]})
        for report in reports:
            wrong = [] if skips("sharing") else list(report["drafter_faults"])
            if not skips("fingerprint"):
                wrong += [f"{name} is not the policy's" for name in report["policy_faults"]]
            if wrong:
                raise EngineTainted(f"{self.name} is not what it should be: {wrong[0]}")
            if not report["compared_tensors"]:
                logger.warning(
                    "%s compares its policy only with what it was when it was loaded: its tensors "
                    "are not known by the names of the checkpoint",
                    self.name,
                )
            if not report["plugin"]:
                raise EngineError(
                    "vLLM did not load TLT's plug-in; unset VLLM_PLUGINS or add 'tlt' to it, and "
                    "reinstall TLT so that its entry point is registered"
                )
            if not version_supported(report["vllm"]):
                raise EngineError(f"vLLM {report['vllm']} is not supported; install vllm==0.32.*")
        self._safe_to_sample = not faults
        if faults:
            logger.error("%s samples wrongly with drafts: %s", self.name, "; ".join(faults))
        return reports[0] | {
            "faults": faults,
            "slots": self._slots,
            "max_model_len": self._max_model_len,
            "cores": self._cores,
        }

    def _turn(self) -> bool:
        """Commands, admissions, one step. False when the engine is to stop."""
        with self._lock:
            self._lock.wait_for(self._has_something_to_do)
            if self._stopping:
                return False
            self._turn_started_s = time.monotonic()
            commands = list(self._commands)
            self._commands.clear()
            admitted = []
            if not self._paused:
                free = self._slots - len(self._in_flight)
                admitted = [self._queue.popleft() for _ in range(min(free, len(self._queue)))]
                # Still under the lock: a withdrawal must never see a request twice or not at all.
                for request, arrived in admitted:
                    self._in_flight[request.sample_id] = (request, arrived, time.time())
        for place, (function, future) in enumerate(commands):
            try:
                future.set_result(function())
            except EngineTainted as error:
                self._fail(error)  # before anybody hears of it and submits more
                for _, left in commands[place:]:
                    left.set_exception(error)
                raise  # not one step more
            except Exception as error:
                future.set_exception(error)
        for request, _ in admitted:
            self._admit(request)
        if self._in_flight and not self._paused:
            self._collect(self._llm.step())
        return True

    def _has_something_to_do(self) -> bool:
        working = (self._queue or self._in_flight) and not self._paused
        return bool(working or self._commands or self._stopping)

    def _admit(self, request: SampleRequest) -> None:
        from vllm.inputs.engine import tokens_input

        self._vllm_ids[request.sample_id] = self._llm.add_request(
            request.sample_id,
            tokens_input(list(request.prompt_token_ids)),
            sampling_params(request.sampling),
        )

    def _collect(self, outputs: Sequence[Any]) -> None:
        samples = []
        for output in outputs:
            if not output.finished or output.request_id not in self._in_flight:
                continue
            request, arrived, started = self._in_flight.pop(output.request_id)
            completion = output.outputs[0]
            now = time.time()
            logprobs = completion.logprobs.logprobs if request.sampling.logprobs else ()
            vllm_id = self._vllm_ids.pop(request.sample_id)
            reason = completion.finish_reason
            if reason not in WHOLE:
                logger.error("%s: sample %s ended by %s", self.name, request.sample_id, reason)
            if self.config.capture is not None:
                self._keep_states(vllm_id, request, completion.token_ids, reason in WHOLE)
            samples.append(
                Sample(
                    sample_id=request.sample_id,
                    token_ids=tuple(completion.token_ids),
                    logprobs=tuple(logprobs),
                    finish_reason=reason,
                    engine=self.name,
                    policy_version=self._versions["policy"],
                    queued_s=started - arrived,
                    running_s=now - started,
                    finished_at_s=now,
                )
            )
        if samples:
            with self._lock:
                self._finished.extend(samples)
                self._lock.notify_all()

    def _keep_states(
        self, vllm_id: str, request: SampleRequest, token_ids: Sequence[int], whole: bool
    ) -> None:
        """What the engine computed over a whole sample, for the drafter to learn from."""
        text = [*request.prompt_token_ids, *token_ids]
        sample = request.sample_id if whole and request.rl_step is not None else None
        kept = self._llm.collective_rpc(
            "tlt_keep_states", args=(vllm_id, sample, request.rl_step or 0, text)
        )
        self._captured_samples = kept[0]

    # --- helpers ------------------------------------------------------------------------------

    def _check(self, request: SampleRequest) -> None:
        speculating = self._max_draft_tokens > 0
        check_sampling(request.sampling, speculating)
        check_length(request, self._max_model_len, self._max_draft_tokens)
        if speculating and request.sampling.temperature > 0 and not self._safe_to_sample:
            raise EngineUnsafe(
                f"{self.name} failed its self-test: with drafts it would sample from the wrong "
                f"distribution. Set temperature = 0, start it without drafter, or see `tlt doctor`"
            )

    def _command(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        with self._lock:
            self._raise_if_dead()
            self._commands.append((function, future))
            self._lock.notify_all()
        return future.result()

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineError(f"{self.name} has failed: {self._error!r}") from self._error
        if self._stopping:
            raise EngineError(f"{self.name} is shut down")

    def _raise_if_stalled(self) -> None:
        stalled_s = time.monotonic() - self._turn_started_s
        if self._in_flight and not self._paused and stalled_s > self.config.stall_timeout_s:
            raise EngineError(f"{self.name} has been in one step for {stalled_s:.0f} s")

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            for _, future in self._commands:
                future.set_exception(EngineError(f"{self.name} has failed: {error!r}"))
            self._commands.clear()
            self._lock.notify_all()

    def _stop_vllm(self) -> None:
        try:
            self._llm.engine_core.shutdown()
        except Exception:
            logger.exception("%s: vLLM did not shut down cleanly", self.name)


def stream_seed(seed: int | None, name: str) -> int:
    """The seed of one engine's random numbers.

    vLLM gives every engine the same seed. Engines that are handed samples of the same groups would
    then draw the same responses twice.
    """
    return secrets.randbits(31) if seed is None else (seed ^ zlib.crc32(name.encode())) >> 1


def sampling_params(sampling: SamplingSpec) -> Any:
    """vLLM's sampling parameters: token ids in, token ids out, only the finished response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0 if sampling.logprobs else None,
        "flat_logprobs": sampling.logprobs,
        "detokenize": bool(sampling.extra.get("stop")),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(**(arguments | sampling.extra))
