"""vLLM's half of an engine: the core that `tlt.rollout.loop` steps.

The core runs inside this process: no hop lies between the strategy of an engine step and vLLM's
scheduler, and killing the process ends the whole engine. Only one thread touches vLLM and torch;
that thread alone is bound to the engine's cores. `start` imports vLLM, not this module.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import time
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.contracts import DRAFTERS, WHOLE, Finished, Recheck, SampleRequest, SamplingSpec, Text
from tlt.errors import EngineError, WeightMismatch
from tlt.hardware import thread_environment
from tlt.node.cores import claim_cores
from tlt.spans import Span
from tlt.timing.node import Node
from tlt.vllm.args import BEGUN, CONFIG_KEY, engine_args, max_draft_tokens
from tlt.vllm.environment import RUNNER_VARIABLE, rounds_by_batch, uses_v2

logger = logging.getLogger(__name__)

PROCESS_ENVIRONMENT = thread_environment() | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TQDM_DISABLE": "1",
}
"""Environment that a process needs before it imports vLLM; the user's values win."""
NOTHING = Text((), (), 0)
"""The beginning of a response that starts at its first token."""


class VllmCore:
    """A vLLM engine core without a loop. The constructor refuses bad settings."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._args = engine_args(config)
        self._args["seed"] = stream_seed(self._args.get("seed"), name)
        self.max_draft_tokens = max_draft_tokens(config)
        """Longest draft that this engine can verify; 0 for an engine that never drafts."""
        lookups = self._args["additional_config"][CONFIG_KEY]
        self.drafters = {
            name
            for name, drafter in DRAFTERS.items()
            if (lookups[name] if drafter.module else config.drafter) is not None
        }
        """Drafters that this engine was started with."""
        self._requests: dict[str, tuple[SampleRequest, str]] = {}
        """Each request in flight, and vLLM's name for it."""
        self._places: dict[str, int] = {}
        """Tokens of each response that are begun, or that `gained` has returned."""
        self._cores: tuple[int, ...] = ()
        self.node: Node | None = None
        """The emulated node, once started; None without emulation."""
        self._asleep: set[str] = set()
        """The parts of the device's memory that are given away, by vLLM's tags of sleep."""
        self._has_policy = True
        """Whether the policy is complete: neither dropped by sleep nor loaded in part."""
        self.captured_samples = 0
        self.dropped_samples = 0
        self.policy_mismatches = 0
        self.fingerprint_s = 0.0

    # --- start and stop -----------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Bind this thread to its cores, start vLLM, and return the report of the first worker."""
        self._prepare_process()
        gc.disable()  # importing makes no garbage, and collecting takes seconds
        import torch
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from tlt.vllm.scheduler import active_controller

        gc.freeze()
        gc.enable()
        if self._config.num_gpus == 0:
            torch.set_num_threads(self._config.num_cores)
        self.llm = LLMEngine.from_engine_args(EngineArgs(**self._args))
        scheduler = self.llm.engine_core.engine_core.scheduler
        self.controller = active_controller(scheduler)
        self.node = scheduler.node
        if self._config.capture is not None:
            self.llm.collective_rpc("tlt_capture", args=(self._config.capture,))
        return self.report()

    def _prepare_process(self) -> None:
        if self._config.num_gpus == 0:
            self._cores = cores = claim_cores(self._config.num_cores, self._core_group())
            os.sched_setaffinity(0, cores)  # this thread, and the OpenMP threads it will start
            # vLLM 0.32 cannot load what it compiled ahead of time for a CPU, and compiles again at
            # every start. It does find torch.compile's own cache on disk.
            os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
            num_workers = int(self._args["tensor_parallel_size"])
            os.environ["OMP_NUM_THREADS"] = str(len(cores) // num_workers)
            if num_workers > 1:
                # vLLM would want a NUMA node for each worker.
                shares = [cores[rank::num_workers] for rank in range(num_workers)]
                bind = "|".join(",".join(map(str, share)) for share in shares)
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bind)
        for key, value in PROCESS_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        if not uses_v2(self._config):
            os.environ[RUNNER_VARIABLE] = "0"

    def _core_group(self) -> str:
        """Return the group that this engine shares no core with; emulated, engines share them."""
        if self._config.emulate is None:
            return self._config.core_group
        at_once = max(1, len(os.sched_getaffinity(0)) // self._config.num_cores)
        number = int(self._name.split(".")[0].rpartition("-")[2])  # of engine-3, or engine-3.1
        return f"{self._config.core_group}-{number // at_once}"

    def report(self) -> dict[str, Any]:
        """Ask every worker about itself, and return the report of the first one.

        Refuse an engine whose plug-in is not active. Log an error if it samples wrongly with
        drafts.
        """
        reports = self.llm.collective_rpc("tlt_report", args=(self.max_draft_tokens > 0,))
        for report in reports:
            self._check_worker(report)
        faults = sorted({fault for report in reports for fault in report["faults"]})
        if faults:
            logger.error("%s samples wrongly with drafts: %s", self._name, "; ".join(faults))
        return reports[0] | {
            "faults": faults,
            "rounds_by_batch": rounds_by_batch(self._config.num_gpus),
            "slots": int(self.llm.vllm_config.scheduler_config.max_num_seqs),
            "max_model_len": int(self.llm.model_config.max_model_len),
            "cores": self._cores,
        }

    def _check_worker(self, report: dict[str, Any]) -> None:
        from tlt.vllm.compat import skips, supported_versions, version_supported

        wrong = [] if skips("sharing") else list(report["drafter_faults"])
        if not skips("fingerprint"):
            wrong += [f"{name} is not the policy's" for name in report["policy_faults"]]
        if wrong:
            raise WeightMismatch(f"{self._name} is not what it should be: {wrong[0]}")
        if not report["compared_tensors"]:
            logger.warning(
                "%s compares its policy only with its state after loading: its tensors "
                "have other names than the checkpoint's",
                self._name,
            )
        if not report["plugin"]:
            raise EngineError(
                "vLLM did not load TLT's plug-in; unset VLLM_PLUGINS or add 'tlt' to it, and "
                "reinstall TLT to register its entry point"
            )
        on_cpu = self._config.num_gpus == 0
        if not version_supported(report["vllm"], on_cpu):
            raise EngineError(
                f"vLLM {report['vllm']} is not supported; pip install "
                f"'{supported_versions(on_cpu)}'"
            )

    @property
    def sleeps(self) -> bool:
        """Whether memory of the device is given away."""
        return bool(self._asleep)

    def stop(self) -> None:
        """Shut vLLM down."""
        self.llm.engine_core.shutdown()

    # --- samples ------------------------------------------------------------------------------

    def admit(self, request: SampleRequest) -> None:
        """Hand a request to vLLM."""
        if not self._has_policy:
            raise WeightMismatch(f"{self._name} has no policy since it slept; load one first")
        from vllm.inputs.engine import tokens_input

        begun = request.begun.token_ids if request.begun else ()
        vllm_id = self.llm.add_request(
            request.sample_id,
            tokens_input([*request.prompt_token_ids, *begun]),
            sampling_params(request.sampling, num_begun=len(begun)),
        )
        self._requests[request.sample_id] = (request, vllm_id)
        self._places[request.sample_id] = len(begun)

    def step(self) -> list[Finished]:
        """Run one engine step, and return the requests that it finished."""
        finished = []
        for output in self.llm.step():
            if not output.finished or output.request_id not in self._requests:
                continue
            request, vllm_id = self._requests.pop(output.request_id)
            self._places.pop(request.sample_id)
            completion = output.outputs[0]
            logprobs = completion.logprobs.logprobs if request.sampling.logprobs else ()
            begun = request.begun or NOTHING
            end = Finished(
                sample_id=request.sample_id,
                token_ids=(*begun.token_ids, *completion.token_ids),
                logprobs=(*begun.logprobs, *logprobs),
                finish_reason=completion.finish_reason,
                finished_at_s=time.time(),
            )
            if self._config.capture is not None:
                self._keep_states(vllm_id, request, end)
            finished.append(end)
        return finished

    def gained(self) -> list[tuple[str, int, tuple[int, ...], tuple[float, ...]]]:
        """Return the tokens that running requests have drawn since the last call.

        Samples that another engine could not continue are left out: it must draw the same noise,
        and settings such as stop texts need the whole response.
        """
        from tlt.vllm import compat

        if self._args.get("logits_processors"):
            return []  # they distinguish prompt and response
        texts = []
        for sample_id, (request, vllm_id) in self._requests.items():
            sampling = request.sampling
            if sampling.extra or (sampling.seed is None and sampling.temperature > 0):
                continue
            place = self._places[sample_id]
            first = place - len((request.begun or NOTHING).token_ids)
            drawn, logprobs = compat.running_text(self.llm, vllm_id, first)
            if drawn:
                self._places[sample_id] = place + len(drawn)
                texts.append((sample_id, place, drawn, logprobs))
        return texts

    def begin_recheck(self, recheck: Recheck) -> None:
        """Hand a recheck to vLLM. Nothing is drafted or counted until `end_recheck`."""
        self.controller.uncounted = True
        self.admit(recheck.request)
        _, vllm_id = self._requests[recheck.request.sample_id]
        num_prompt_tokens = len(recheck.request.prompt_token_ids)
        self.llm.collective_rpc(
            "tlt_begin_recheck", args=(vllm_id, num_prompt_tokens, recheck.token_ids)
        )

    def end_recheck(self, recheck: Recheck) -> Mapping[int, float]:
        """Forget a recheck, and abort it if it still runs; return the margins of its draws."""
        unfinished = self._requests.pop(recheck.request.sample_id, None)
        self._places.pop(recheck.request.sample_id, None)
        if unfinished is not None:
            self.llm.abort_request([unfinished[1]], internal=True)
        self.controller.uncounted = False
        # V2 may draw on any one of the workers.
        missed = self.llm.collective_rpc("tlt_end_recheck")
        return {place: short for worker in missed for place, short in worker.items()}

    def _keep_states(self, vllm_id: str, request: SampleRequest, end: Finished) -> None:
        """Store the hidden states of a whole sample for the drafter's training; drop others."""
        is_wanted = end.finish_reason in WHOLE and request.rl_step is not None
        sample = request.sample_id if is_wanted else None
        text = [*request.prompt_token_ids, *end.token_ids]
        kept = self.llm.collective_rpc(
            "tlt_keep_states", args=(vllm_id, sample, request.rl_step or 0, text)
        )
        self.captured_samples, self.dropped_samples = kept[0]

    # --- weights and memory -------------------------------------------------------------------

    def load_policy(self, manifest: dict[str, Any]) -> float:
        """Load policy weights, drop all cached prefixes, and return the seconds it took."""
        started_s = self.controller.now_s()
        self.wake_weights()
        with self._taking("sync_s"):
            self._load(manifest, draft=False)
        return self._policy_loaded(started_s)

    def _policy_loaded(self, started_s: float) -> float:
        # Cached prefixes hold keys and values of the old policy.
        if not self.llm.reset_prefix_cache():
            raise WeightMismatch(
                f"{self._name} keeps cached prefixes of the last policy: vLLM did not drop them"
            )
        self._has_policy = True
        return self._loaded(started_s)

    # A policy from GPU to GPU (`send`) comes in several calls.

    def connect_policy(self, init_info: dict[str, Any]) -> None:
        """Connect with the learner, instead of an earlier one."""
        self.llm.collective_rpc("shutdown_weight_transfer_engine")
        self.llm.collective_rpc("init_weight_transfer_engine", args=(init_info,))

    def start_policy(self, shapes: list[tuple[str, list[int]]]) -> None:
        """Begin to load a policy whose tensors have these names and shapes."""
        self._started_s = self.controller.now_s()
        self.wake_weights()
        self.llm.collective_rpc("tlt_start_policy", args=(shapes,))
        self._has_policy = False

    def receive_policy(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Load one chunk of a policy."""
        try:
            self.llm.collective_rpc("update_weights", args=(update_info,))
        except Exception as error:
            raise WeightMismatch(f"{self._name}: a policy was loaded in part: {error!r}") from error

    def finish_policy(self, seed: int, fingerprints: dict[str, Any]) -> float:
        """Compare the loaded policy with the learner's, and return the seconds since the start."""
        try:
            reports = self.llm.collective_rpc("tlt_finish_policy", args=(seed, fingerprints))
        except Exception as error:
            raise WeightMismatch(f"{self._name}: a policy was loaded in part: {error!r}") from error
        self._judge(reports, draft=False)
        return self._policy_loaded(self._started_s)

    def load_drafter(self, manifest: dict[str, Any], version: int) -> float:
        """Load drafter weights, and return the seconds it took."""
        started_s = self.controller.now_s()
        with self._taking("swap_s"):
            self._load(manifest, draft=True)
        self.controller.drafter_version = version
        return self._loaded(started_s)

    def _load(self, manifest: dict[str, Any], draft: bool) -> None:
        """Load weights into all workers, which then compare their policy with the learner's."""
        self.llm.collective_rpc("tlt_check_weights", args=(manifest, draft))
        try:
            reports = self.llm.collective_rpc("tlt_update_weights", args=(manifest, draft))
        except Exception as error:
            raise WeightMismatch(
                f"{self._name}: new weights were loaded in part: {error!r}"
            ) from error
        self._judge(reports, draft)

    def _judge(self, reports: list[dict[str, Any]], draft: bool) -> None:
        """Refuse to continue with a policy that is not the learner's."""
        self.fingerprint_s += max(report["seconds"] for report in reports)
        differed = sorted({name for report in reports for name in report["differed"]})
        if not differed:
            return
        self.policy_mismatches += 1
        what = "a drafter swap" if draft else "a policy update"
        text = f"after {what} its policy was not the learner's in {', '.join(differed[:3])}"
        if any(report["still"] for report in reports):
            raise WeightMismatch(f"{self._name}: {text}, and still is not after loading it again")
        logger.error("%s: %s; loaded again, no sample was affected", self._name, text)

    def _loaded(self, started_s: float) -> float:
        now_s = self.controller.now_s()
        self.controller.spans.add(Span("swapping", started_s, now_s))
        return now_s - started_s

    def forget(self) -> None:
        """Drop all cached prefixes and the history that n-grams are looked up in."""
        if not self.llm.reset_prefix_cache():
            raise EngineError(f"{self._name} did not forget: samples are under way")
        self.llm.collective_rpc("tlt_forget_history")

    def sleep(self, keep_policy: bool) -> None:
        """Free the device's memory. The policy moves to the host or, if not kept, is lost.

        vLLM keeps the drafter in both cases (`sleep_preserve_parameter_names`).
        """
        if "weights" not in self._asleep:
            with self._taking("sleep_s", *(["offload_s"] if keep_policy else [])):
                if self._config.num_gpus:
                    self.llm.sleep(level=1 if keep_policy else 2)
            self._has_policy = self._has_policy and keep_policy
            self._asleep = {"weights", "kv_cache"}

    def wake_weights(self) -> None:
        """Take the memory of the weights back, for an update; the KV cache stays asleep."""
        if "weights" in self._asleep:
            self._wake_up("weights", "sleep_s", *(["offload_s"] if self._has_policy else []))

    def wake(self) -> None:
        """Take all of the device's memory back, after a policy update if the policy was lost."""
        if not self._has_policy:
            raise WeightMismatch(f"{self._name} wakes without a policy: none was loaded")
        self.wake_weights()
        if "kv_cache" in self._asleep:
            self._wake_up("kv_cache", "sleep_s")

    def _wake_up(self, tag: str, *parts: str) -> None:
        with self._taking(*parts):
            if self._config.num_gpus:
                self.llm.wake_up(tags=[tag])
        self._asleep.discard(tag)

    def _taking(self, *parts: str) -> AbstractContextManager[None]:
        """Let work take as long as these parts on the emulated node."""
        if self.node is None:
            return nullcontext()
        return self.node.commands.takes(sum(getattr(self.node, part) for part in parts))


def stream_seed(seed: int | None, name: str) -> int:
    """Return the seed of one engine's random numbers.

    vLLM gives every engine the same seed. Engines that generate samples of the same group would
    then draw the same responses.
    """
    return secrets.randbits(31) if seed is None else (seed ^ zlib.crc32(name.encode())) >> 1


def sampling_params(sampling: SamplingSpec, num_begun: int = 0) -> Any:
    """Return vLLM's sampling parameters: token ids in and out, only the finished response.

    `num_begun` tokens of the response are at the end of the prompt.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_tokens - num_begun,
        "extra_args": {BEGUN: num_begun} if num_begun else None,
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
