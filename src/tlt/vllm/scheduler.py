"""Schedulers that let a strategy choose the arm of every engine step.

vLLM drafts one number of tokens per engine step, `SchedulerOutput.num_spec_tokens_to_schedule`,
which may change from step to step. Both schedulers here set it to the strategy's choice just before
vLLM's own bookkeeping reads it, and put the drafter's name beside it. The scheduler output travels
to every worker, so all tensor-parallel ranks agree. With it go the texts of requests that ended,
which lookups learn from (`runner.Lookup`).

`scheduler_cls` is not a public interface of vLLM: the supported versions are pinned, and
`active_controller` fails if vLLM did not take our scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tlt.contracts import DRAFTERS
from tlt.errors import EngineError
from tlt.strategy.controller import DraftController, StepRecord
from tlt.strategy.spec import build_strategy
from tlt.timing.node import Node
from tlt.vllm import wiring
from tlt.vllm.args import CONFIG_KEY

WHOLE = {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}


def _share_whole_prompts(coordinator: Any) -> None:
    """Let requests share all blocks that they have in common, also in an engine with a drafter.

    vLLM recomputes the last of them for the draft model, whose keys and values at a position
    depend on the token after it. Samples of a group have that token in common, too. Where another
    prompt continues differently, one stale entry may cost acceptance and nothing else.
    """
    if isinstance(coordinator, UnitaryKVCacheCoordinator):
        getattr(coordinator, "eagle_group_ids", set()).clear()


class _Adaptive:
    """The part that both schedulers share, mixed in before vLLM's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config[CONFIG_KEY]  # type: ignore[attr-defined]
        self.controller = DraftController(build_strategy(settings["strategy"]), time.perf_counter)
        self.node = Node.of(settings.get("emulate"))
        """The emulated node, which decides how long engine steps take; None emulates nothing."""
        # Engine steps end in the order in which they were scheduled.
        self._records: deque[StepRecord] = deque()
        self._is_embedded = settings.get("embedded", False)
        self._sends_texts = any(settings.get(name) is not None for name in DRAFTERS)
        self._ended: dict[str, tuple[int, list[int]]] = {}
        """Length of the prompt, and text, of each request that ended since the last engine step."""
        if settings["runner"] == "v1":
            _share_whole_prompts(self.kv_cache_manager.coordinator)  # type: ignore[attr-defined]
        speculative = self.vllm_config.speculative_config  # type: ignore[attr-defined]
        has_drafter = speculative is not None and speculative.method == "eagle3"
        self._sends_whole = self._is_embedded and has_drafter
        self._whole: dict[str, list[int]] = {}
        """Text of each whole sample that ended since the last engine step, in an engine of another
        program: its workers store hidden states themselves."""

    def take_last_whole(self) -> dict[str, list[int]]:
        """Return the samples that ended last, once no engine step is left to send them with."""
        if self.has_unfinished_requests():  # type: ignore[attr-defined]
            return {}
        whole, self._whole = self._whole, {}
        return whole

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.controller.schedule_started()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if scheduler_output.num_scheduled_tokens:
            requests = self.requests  # type: ignore[attr-defined]
            num_prefills = num_prefill_tokens = 0
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                request = requests[request_id]
                # A preempted request reads its response again, and then decodes.
                read = max(request.num_prompt_tokens, request.num_tokens - 1)
                if request.num_computed_tokens < read:
                    num_prefills += 1
                    num_prefill_tokens += num_tokens
            record = self.controller.step_scheduled(
                num_decodes=len(scheduler_output.num_scheduled_tokens) - num_prefills,
                num_prefills=num_prefills,
                num_waiting=len(self.waiting),  # type: ignore[attr-defined]
                num_prefill_tokens=num_prefill_tokens,
            )
            if self.num_spec_tokens:  # type: ignore[attr-defined]
                scheduler_output.num_spec_tokens_to_schedule = record.proposed.num_draft_tokens
                scheduler_output.tlt_drafter = record.proposed.drafter
            self._records.append(record)
        if self._ended:
            scheduler_output.tlt_ended, self._ended = self._ended, {}
        if self._whole:
            scheduler_output.tlt_whole, self._whole = self._whole, {}
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def _wait(self, node: Node, record: StepRecord, scheduled: Mapping[str, int]) -> None:
        """Let an engine step take as long as on the emulated node."""
        requests = self.requests  # type: ignore[attr-defined]
        seconds = node.step_s(
            record.verified,
            record.proposed,
            record.context.num_decodes,
            sum(requests[name].num_computed_tokens for name in scheduled if name in requests),
            record.num_prefill_tokens,
        )
        node.pace.wait(self.controller.started_s(record), seconds)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sends_texts:
            text = list(request.all_token_ids)
            self._ended[request.request_id] = (request.num_prompt_tokens, text)
        if self._sends_whole and request.status in WHOLE:
            self._whole[request.request_id] = list(request.all_token_ids)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self.node is not None and scheduler_output.num_scheduled_tokens:
            self._wait(self.node, self._records[0], scheduler_output.num_scheduled_tokens)
        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if scheduler_output.num_scheduled_tokens:
            record = self._records.popleft()
            sampled = model_runner_output.sampled_token_ids
            index = model_runner_output.req_id_to_index
            drafts = []
            for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
                row = index.get(request_id)
                if row is not None and sampled and sampled[row]:
                    drafts.append((len(tokens), len(sampled[row]) - 1))
            report = self.controller.step_finished(record, drafts, sum(map(len, sampled)))
            if not self.has_unfinished_requests():  # type: ignore[attr-defined]
                self.controller.went_idle()
            if self._is_embedded:
                wiring.attach(outputs.values(), report)
        return outputs


class AdaptiveScheduler(_Adaptive, Scheduler):
    """The scheduler for synchronous scheduling."""


class AdaptiveAsyncScheduler(_Adaptive, AsyncScheduler):
    """The scheduler for asynchronous scheduling, vLLM's default on GPUs."""


def active_controller(scheduler: object) -> DraftController:
    """Return the controller of an engine's scheduler; fail if the scheduler is not ours."""
    if not isinstance(scheduler, _Adaptive):
        raise EngineError(
            f"vLLM runs {type(scheduler).__name__} instead of TLT's scheduler; "
            "remove scheduler_cls from engine_args"
        )
    return scheduler.controller
