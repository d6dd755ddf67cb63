"""RL steps of a cluster in simulated time.

Modelled: engines, learner, rewards, weight sync, trainers, failures. Production code: the strategy
and the dispatcher (`rollout`), the coordinator with its leases and rounds, the forecast of the
tail. Not modelled: a drafter swap in the middle of a rollout (a better drafter helps from the next
rollout on).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tlt.contracts import OFF, Arm, Strategy
from tlt.errors import ConfigError
from tlt.harvest.contract import Evaluation, Trained, TrainerGone, Weights
from tlt.harvest.coordinator import Coordinator, CoordinatorSettings
from tlt.harvest.forecast import TailForecast
from tlt.harvest.leases import Holder
from tlt.simulate.clock import now_s
from tlt.simulate.rollout import Player, Rollout
from tlt.simulate.workload import Workload
from tlt.timing.model import Amount, Drafting, EngineModel, Share, Speed
from tlt.timing.profiles import TRAINER_TOKENS_PER_S

Record = dict[str, float]

MAX_STEP_S = 1e5
"""Longest part of an RL step that is simulated, a day: leases take work by simulated time."""


@dataclass(frozen=True, slots=True)
class Learner:
    """The times of an RL step besides the rollout."""

    tokens_per_s: Speed
    """Training tokens per second of all ranks together."""
    step_s: Amount = 0.0
    """Seconds of an update besides its tokens."""
    trained_share: Share = 1.0
    """Share of the samples that are trained on: groups with equal rewards are left out."""
    prompt_share: Share = 1.0
    """Share of the prompts' tokens that are computed: samples of a group may share a prompt."""
    reward_s: Amount = 0.0
    """Seconds from the last sample to the last reward."""
    sync_s: Amount = 0.0
    """Seconds of the weight sync."""
    other_s: Amount = 0.0


@dataclass(frozen=True, slots=True)
class Training:
    """How acceptance falls as the policy changes, and how training restores it."""

    drift: Amount = 0.0
    """Amount that every policy update adds to the power of acceptance rates."""
    tokens: Speed = 1e6
    """Training tokens that shrink the drafter's lag e-fold."""
    best_power: Amount = 1.0
    """Power of acceptance rates that training approaches."""
    tokens_per_s: Speed = TRAINER_TOKENS_PER_S
    """Training tokens per second of one trainer."""
    start_s: Amount = 20.0
    stop_s: Amount = 0.05
    """Seconds from the end of a lease to a free device: about one micro-batch."""
    evaluate_s: Amount = 0.5


@dataclass(frozen=True, slots=True)
class Cluster:
    engine: EngineModel
    drafting: Drafting
    num_engines: int
    learner: Learner
    training: Training
    engine_deaths_per_hour: float
    engine_start_s: float
    slots: int = 256
    """Requests that an engine runs at the same time."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run the workload: without speculation, with a frozen drafter, or with TLT."""

    name: str
    strategy: Callable[[], Strategy]
    harvest: CoordinatorSettings | None = None


# --- a drafter as it is known here ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Skill:
    """A drafter's weights: how good they were for the policy of some step."""

    power: float
    policy: int


class SimTrainer:
    """A trainer beside an engine, which computes nothing."""

    def __init__(self, run: Simulation, worker: str) -> None:
        self._run = run
        self._worker = worker
        self._training = run.cluster.training
        self._holder = Holder()
        self._skill = self._published = run.start
        self._ended = asyncio.Event()
        self._dead = False

    async def start(self) -> None:
        await asyncio.sleep(self._training.start_s)

    async def begin(self, lease: int, seconds: float) -> bool:
        self._check()
        self._ended.clear()
        return self._holder.begin(lease, seconds, now_s())

    async def end(self, lease: int) -> None:
        self._check()
        self._holder.end(lease)
        self._ended.set()

    async def take(
        self, base: Weights | None, published: Weights | None, policy: Weights | None
    ) -> None:
        self._check()
        if base is not None:
            self._skill = base.blob if base.version else self._run.start
        if published is not None:
            self._published = published.blob

    async def train(self, lease: int, seconds: float) -> Trained:
        self._check()
        started_s = now_s()
        if self._holder.holds(lease, started_s) and seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._ended.wait()
                await asyncio.sleep(self._training.stop_s)
            self._check()
        tokens = int((now_s() - started_s) * self._training.tokens_per_s)
        best = self._training.best_power
        behind = (self._run.power(self._skill) - best) * math.exp(-tokens / self._training.tokens)
        self._skill = Skill(best + behind, self._run.policy)
        return Trained(max(1, tokens // 512) if tokens else 0, tokens, 0.0, starved=False)

    async def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        self._check()
        if not self._holder.holds(lease, now_s()):
            return None
        await asyncio.sleep(min(self._training.evaluate_s, seconds))
        length, other = (self._run.length(skill) for skill in (self._skill, self._published))
        return Evaluation(length > 1.002 * other, length, other)

    async def merge(
        self, lease: int, others: list[tuple[Any, float]], own_weight: float, seconds: float
    ) -> bool:
        self._check()
        parts = [(self._skill, own_weight), *others]
        total = sum(weight for _, weight in parts) or 1.0
        power = sum(self._run.power(skill) * weight for skill, weight in parts) / total
        self._skill = Skill(power, self._run.policy)
        return True

    async def export(self) -> Any:
        self._check()
        return self._skill

    async def optimizer_state(self) -> None:
        self._check()

    async def release(self) -> None:
        self._check()

    async def kill(self) -> None:
        self._dead = True
        self._ended.set()

    def _check(self) -> None:
        if self._dead:
            raise TrainerGone(self._worker)


# --- the run --------------------------------------------------------------------------------------


class Simulation:
    """A run of one mode; `clock.run(simulation.run(num_steps))` plays it."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        mode: Mode,
        seed: int = 0,
        start_power: float = 1.0,
    ) -> None:
        self.cluster = cluster
        self.rng = np.random.default_rng(seed)
        self.start = Skill(start_power, 0)
        self.policy = 0
        """Policy updates so far."""
        self._workload = workload
        self._mode = mode
        self._seed = seed
        self._published = self.start
        self._version = 0
        self._player = Player(mode.strategy(), cluster.engine, seed)
        self._forecast = TailForecast()
        self._coordinator: Coordinator | None = None
        self._before: Record = {}
        self.engine_ends: Any = ()
        """Seconds after which each engine of the last rollout was done."""
        self.events = 0
        """Number of events that the coordinator received."""
        self.generating: set[str] = set()
        """Workers whose engines have the device."""

    def power(self, skill: Skill) -> float:
        """Return the power of a drafter's acceptance rates for the present policy."""
        return skill.power + self.cluster.training.drift * (self.policy - skill.policy)

    def length(self, skill: Skill) -> float:
        """Return a drafter's expected acceptance length at four draft tokens."""
        return self.cluster.drafting.at(self.power(skill)).tokens(Arm("eagle3", 4))

    async def run(self, num_steps: int) -> list[Record]:
        if self._mode.harvest is not None:
            self._coordinator = Coordinator(self._mode.harvest, self.make_trainer)
            for worker in self._workers():
                self._coordinator.join(worker)
            await asyncio.sleep(self.cluster.training.start_s)
        try:
            return [await self._step(step) for step in range(1, num_steps + 1)]
        finally:
            if self._coordinator is not None:
                await self._coordinator.shutdown()

    def make_trainer(self, worker: str) -> SimTrainer:
        return SimTrainer(self, worker)

    def _workers(self) -> list[str]:
        return [f"engine-{n}" for n in range(self.cluster.num_engines)]

    async def _step(self, step: int) -> Record:
        started_s = now_s()
        learner = self.cluster.learner
        lengths = self._workload.of_step(step, self._seed)
        engine_ends, sample_ends = self._rollout_ends(lengths)
        self.engine_ends = engine_ends
        tokens = lengths.sum() + len(lengths) * self._workload.prompt_tokens * learner.prompt_share
        update_s = float(learner.step_s + tokens * learner.trained_share / learner.tokens_per_s)
        rest_s = update_s + learner.sync_s + learner.other_s
        for what, seconds in (
            ("the rollout", float(engine_ends.max())),
            ("the wait for rewards", learner.reward_s),
            ("the update", rest_s),
        ):
            if not 0 <= seconds <= MAX_STEP_S:
                raise ConfigError(
                    f"{what} of an RL step would take {seconds:.3g} s, and at most "
                    f"{MAX_STEP_S:,.0f} are simulated; e.g. fewer tokens (workload), or faster "
                    "devices (cluster, learner)"
                )
        await self.rollout(engine_ends, np.sort(sample_ends))
        rollout_s = now_s() - started_s
        await asyncio.sleep(learner.reward_s)
        await asyncio.sleep(rest_s)
        self.policy += 1
        if self._coordinator is not None:
            self._coordinator.policy_changed(self.policy, None)
            while (version := await self._coordinator.next_version(0.0)) is not None:
                self._published, self._version = version.weights.blob, version.number
        busy_s = float(engine_ends.sum())
        return {
            "step": step,
            "time/step_s": now_s() - started_s,
            "time/rollout_s": rollout_s,
            "time/update_s": update_s,
            "rollout/idle_share": float(1 - busy_s / (self.cluster.num_engines * rollout_s)),
            "drafter_version": self._version,
            "harvest/held_out_length": self.length(self._published),
            **self._harvest_record(),
        }

    def _rollout_ends(self, lengths: Any) -> tuple[Any, Any]:
        """Return when every engine and every sample ends, in seconds since the rollout began."""
        cluster, workload = self.cluster, self._workload
        drafting = cluster.drafting.at(self.power(self._published))
        played = Rollout(lengths, cluster.num_engines, cluster.slots)
        context = workload.prompt_tokens + float(np.median(played.longest)) / 2
        pace = self._player.rollout(drafting, self._version, played.most, context)
        # Step times are linear in the context.
        counts = np.arange(played.most + 1)
        row_s = cluster.engine.step_s(OFF, counts, 0.0) * pace.ratios
        owner, end_s = played.play(
            row_s, cluster.engine.context * pace.ratios, workload.prompt_tokens
        )
        prompts = max(1.0, len(lengths) / cluster.num_engines / workload.group_size)
        prefill_s = prompts * workload.prompt_tokens / cluster.engine.prefill_tokens_per_s
        end_s = end_s + prefill_s + pace.trying_s
        engine_s = np.zeros(cluster.num_engines)
        np.maximum.at(engine_s, owner, end_s)
        lost_s = self._lost_s(engine_s)
        return engine_s + lost_s, end_s + lost_s[owner]

    def _lost_s(self, engine_s: Any) -> Any:
        """Return the delay of engines that die: their samples restart on another engine."""
        rate = self.cluster.engine_deaths_per_hour / 3600
        if not rate:
            return np.zeros(len(engine_s))
        dies_s = self.rng.exponential(1 / rate, len(engine_s))
        return np.where(dies_s < engine_s, dies_s + self.cluster.engine_start_s, 0.0)

    async def rollout(self, engine_ends: Any, sample_ends: Any) -> None:
        """Wait for the last sample, and report engines that finish earlier as idle."""
        started_s = now_s()
        end_s = float(engine_ends.max())
        if self._coordinator is None:
            await asyncio.sleep(end_s)
            return
        workers = self._workers()
        self.generating = set(workers)
        self._forecast.started(len(sample_ends), started_s)
        told = 0
        idle = [
            index for index in np.argsort(engine_ends, kind="stable") if engine_ends[index] < end_s
        ]
        for index in idle:
            at_s = float(engine_ends[index])
            if (wait_s := started_s + at_s - now_s()) > 0:
                await asyncio.sleep(wait_s)
            finished = int(np.searchsorted(sample_ends, at_s, side="right"))
            self._forecast.finished(finished - told, now_s())
            told = finished
            self.generating.discard(workers[index])
            self._coordinator.idle(workers[index], self._forecast.remaining_s(now_s()))
        await asyncio.sleep(max(0.0, started_s + end_s - now_s()))
        self._forecast.finished(len(sample_ends) - told, now_s())
        self._forecast.ended()
        self.events += 2 * len(idle)
        await asyncio.gather(*(self._coordinator.needed(workers[index]) for index in idle))
        self.generating = set(workers)  # or the learner has it

    def _harvest_record(self) -> Record:
        if self._coordinator is None:
            return {}
        now = self._coordinator.metrics()
        before, self._before = self._before, now
        names = ("coverable_s", "used_s", "published")
        return {f"harvest/{name}": now[name] - before.get(name, 0.0) for name in names}
