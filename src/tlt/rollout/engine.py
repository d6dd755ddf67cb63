"""One vLLM engine: the loop (`loop`) over vLLM's core (`vllm.core`), and the calls of the pool.

`client.Engine` lists the commands that `RolloutEngine` carries out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.contracts import DRAFTERS, OFF, EngineStats, Recheck, SampleRequest, StepReport, Text
from tlt.errors import ConfigError, EngineUnsafe
from tlt.rollout.loop import EngineLoop
from tlt.rollout.recheck import Verdict
from tlt.spans import Span
from tlt.strategy.spec import build_strategy
from tlt.vllm.args import strategy_spec
from tlt.vllm.core import VllmCore
from tlt.vllm.lossless_checks import check_length, check_sampling

MIXED = "a policy update now would mix two policies in one sample"


class RolloutEngine(EngineLoop):
    """A vLLM engine in this process. Construct it, then `start` it."""

    def __init__(self, config: EngineConfig, name: str = "engine-0") -> None:
        self.config = config
        self.safe_to_sample = True
        """Whether the engine passed its self-test of sampling under speculation."""
        self.core = VllmCore(config, name)  # refuses bad settings before anything starts
        self._max_model_len = 0
        self._is_keyed = False
        super().__init__(name, self.core, config.stall_timeout_s)

    def start(self) -> dict[str, Any]:
        """Start vLLM, verify the plug-in, and return the report of the first worker."""
        return self._note(super().start())

    def report(self) -> dict[str, Any]:
        """Ask every worker about itself again, as at the start; return the first one's report."""
        return self._note(self.between_steps(self.core.report))

    def _note(self, report: dict[str, Any]) -> dict[str, Any]:
        self.safe_to_sample = not report["faults"]
        self._max_model_len = report["max_model_len"]
        self._is_keyed = report["keyed"]
        return report

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue all requests or, when the engine refuses one of them, none."""
        self._check(requests)
        super().submit(requests)

    def _check(self, requests: Sequence[SampleRequest]) -> None:
        """Refuse requests that would be sampled wrongly, or that do not fit."""
        longest = self.core.max_draft_tokens
        for request in requests:
            check_sampling(request.sampling, speculating=longest > 0)
            check_length(request, self._max_model_len, longest)
            if longest > 0 and request.sampling.temperature > 0 and not self.safe_to_sample:
                raise EngineUnsafe(
                    f"{self.name} failed its self-test: with drafts it would sample from the wrong "
                    "distribution. Set temperature = 0, start it without drafter, or see "
                    "`tlt doctor`"
                )

    def take_texts(self) -> list[tuple[str, int, Text]]:
        """Return what running requests have gained; only keyed sampling can continue it."""
        return super().take_texts() if self._is_keyed else []

    def recheck(self, recheck: Recheck) -> Verdict | None:
        """Generate a sample again without drafts; only with keyed sampling it must be the same."""
        return super().recheck(recheck) if self._is_keyed else None

    # --- memory -------------------------------------------------------------------------------

    @property
    def _shares_memory(self) -> bool:
        """Whether the engine's device has memory to give, or an emulated one takes its time."""
        return self.config.num_gpus > 0 or self.config.emulate is not None

    def sleep(self, keep_policy: bool = True) -> None:
        """Give the device's memory to a learner that shares it.

        A policy that is not kept must be loaded again before the engine wakes. Refused while
        samples are unfinished. A CPU engine frees nothing.
        """
        if self._shares_memory:
            self.between_rollouts(
                lambda: self.core.sleep(keep_policy), "an engine sleeps only between rollouts"
            )

    def wake_weights(self) -> None:
        """Take the memory of the weights back, before a weight sync."""
        if self._shares_memory:
            self.between_steps(self.core.wake_weights)

    def wake(self) -> None:
        """Take all memory back, before a drafter swap or new samples, and after a weight sync."""
        if self._shares_memory:
            self.between_steps(self.core.wake)

    def reset_prefix_cache(self) -> None:
        """Forget all earlier prompts and samples, to start a measurement from nothing."""
        self.between_steps(self.core.forget)

    # --- strategy and weights -----------------------------------------------------------------

    def set_strategy(self, spec: dict[str, Any]) -> None:
        """Choose arms by another strategy from the next engine step on."""
        strategy = build_strategy(strategy_spec(self.config, spec))
        longest = self.core.max_draft_tokens
        for arm in strategy.arms():
            if arm.num_draft_tokens > longest:
                raise ConfigError(
                    f"arm {arm} drafts more than the {longest} tokens this engine was started for; "
                    f"set engine.max_draft_tokens = {arm.num_draft_tokens}"
                )
            if arm != OFF and arm.drafter not in self.core.drafters:
                drafter = DRAFTERS[arm.drafter]
                also = ", and engine_args.async_scheduling = false" if drafter.module else ""
                raise ConfigError(
                    f"arm {arm}: this engine was started without the drafter {arm.drafter!r}; e.g. "
                    f"engine.{drafter.setting} = {drafter.example}{also}"
                )
        self.between_steps(lambda: self.core.controller.set_strategy(strategy))

    def update_policy(self, manifest: dict[str, Any], version: int) -> float:
        """Load new policy weights, and return the seconds it took.

        Refused while samples are unfinished.
        """

        return self._new_policy(lambda: self.core.load_policy(manifest), version)

    def _new_policy(self, load: Callable[[], float], version: int) -> float:
        def update() -> float:
            seconds = load()
            self.policy_version = version
            return seconds

        return self.between_rollouts(update, MIXED)

    # A policy from GPU to GPU comes in several calls, which the learner makes (`vllm.send`).

    def connect_policy(self, init_info: dict[str, Any]) -> None:
        """Connect with a learner that sends policies from GPU to GPU."""
        self.between_rollouts(lambda: self.core.connect_policy(init_info), MIXED)

    def start_policy(self, shapes: list[tuple[str, list[int]]]) -> None:
        """Begin to load a policy; the engine generates nothing before `finish_policy`."""
        self.between_rollouts(lambda: self.core.start_policy(shapes), MIXED)

    def receive_policy(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Load one chunk of a policy."""
        self.between_rollouts(lambda: self.core.receive_policy(update_info), MIXED)

    def finish_policy(self, version: int, seed: int, fingerprints: dict[str, Any]) -> float:
        """Compare the loaded policy with the learner's, and return the seconds it took."""
        return self._new_policy(lambda: self.core.finish_policy(seed, fingerprints), version)

    def update_drafter(self, manifest: dict[str, Any], version: int) -> float:
        """Load new drafter weights between two engine steps, and return the seconds it took.

        Requests keep running. An engine that sleeps has no memory for it: the pool hands it the
        present drafter when it has woken.
        """
        if self.config.drafter is None:
            raise ConfigError("this engine was started without engine.drafter")
        return self.between_steps(
            lambda: 0.0 if self.core.sleeps else self.core.load_drafter(manifest, version)
        )

    # --- measurements -------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the counters since the start."""
        core = self.core
        return EngineStats(
            engine=self.name,
            **asdict(core.controller.totals),
            running=self.num_running,
            queued=self.num_queued,
            policy_version=self.policy_version,
            drafter_version=core.controller.drafter_version,
            captured_samples=core.captured_samples,
            dropped_samples=core.dropped_samples,
            policy_mismatches=core.policy_mismatches,
            fingerprint_s=core.fingerprint_s,
            late=core.node.pace.late if core.node else 0,
            late_s=core.node.pace.late_s if core.node else 0.0,
            commands_late_s=core.node.commands.late_s if core.node else 0.0,
        )

    def take_trace(self) -> list[StepReport]:
        """Return a report of each engine step since the last call."""
        return self.between_steps(self.core.controller.take_trace)

    def take_spans(self, max_spans: int) -> list[Span]:
        """Return where the time since the last call went, by the wall clock."""
        controller = self.core.controller

        def take() -> list[Span]:
            shift_s = time.time() - controller.now_s()
            return [span.shifted(shift_s) for span in controller.spans.take(max_spans)]

        return self.between_steps(take)

    def devices(self) -> tuple[str, list[str]]:
        """Return this engine's name and the GPUs of its process, for ranks that share them."""
        return self.name, [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
