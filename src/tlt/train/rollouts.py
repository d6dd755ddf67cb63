"""The samples of RL steps and evaluations, from problems to rewards.

`Rollouts.generate` makes the requests, lets the pool generate them and scores every sample as it
ends. A sample's id names the sample and seeds it. A problem whose prompt leaves no room for a
response in the model's context is left out. Extra problems replace groups that are discarded, and
start as soon as such a group is complete (`dapo` says which).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tlt.config.train import TrainConfig
from tlt.contracts import Sample, SampleRequest, SamplingSpec, Scored
from tlt.errors import ConfigError, EngineError
from tlt.harvest.contract import RunHarvest
from tlt.observe.live import Activity, Live
from tlt.observe.stopwatch import Stopwatch
from tlt.rollout.pool import RolloutPool
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import HeldOut
from tlt.tasks.rewards import RewardFunction, RewardPool
from tlt.tasks.tail import HeavyTail
from tlt.train.dapo import Replacements, overlong_penalty

logger = logging.getLogger(__name__)


def make_requests(
    config: TrainConfig,
    label: str,
    prompts: Sequence[tuple[int, ...]],
    group_size: int,
    temperature: float,
    rl_step: int | None,
    lengths: Sequence[int] = (),
) -> list[SampleRequest]:
    """Return the requests, one group after the other; `lengths` forces the response lengths."""
    left = list(lengths)
    requests = []
    for number, prompt in enumerate(prompts):
        for place in range(group_size):
            sample_id = f"{label}/{number:05d}/{place:04d}"
            spec = SamplingSpec(
                max_tokens=left.pop() if lengths else config.sampling.max_tokens,
                temperature=temperature,
                seed=_seed(config.run.seed, sample_id),
                ignore_eos=bool(lengths),
            )
            requests.append(SampleRequest(sample_id, prompt, spec, rl_step=rl_step))
    return requests


def _seed(run_seed: int, sample_id: str) -> int:
    """Return 63 bits, which vLLM takes as a seed; so no two samples of a run share their noise."""
    text = f"{run_seed}/{sample_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Rollouts:
    """Generates and scores the samples of RL steps and evaluations."""

    def __init__(
        self,
        config: TrainConfig,
        chat: Chat,
        pool: RolloutPool,
        rewards: RewardPool,
        harvest: RunHarvest,
        live: Live,
        max_prompt_tokens: int,
    ) -> None:
        self._config = config
        self.chat = chat
        self.pool = pool
        self.rewards = rewards
        self.harvest = harvest
        self.live = live
        self.max_prompt_tokens = max_prompt_tokens
        self.num_left_out = 0
        """Problems of the last call that were too long."""

    async def generate(
        self,
        step: int,
        problems: Sequence[Problem],
        policy_version: int,
        watch: Stopwatch,
        on_scored: Callable[[Scored], bool],
    ) -> list[Scored]:
        """Return the samples of an RL step in order; call `on_scored` as each one is scored.

        The problems beyond `sampling.prompts_per_step` are extra. The next one starts when
        `on_scored` returns True: the sample's group is complete, and to be replaced.
        """
        sampling = self._config.sampling
        lengths = self._forced_lengths(step, len(problems) * sampling.group_size)
        requests = make_requests(
            self._config,
            f"{step}",
            self._prompts(problems),
            sampling.group_size,
            sampling.temperature,
            step,
            lengths,
        )
        stages = "rollout", "reward_wait"
        replacements = Replacements(sampling.prompts_per_step, len(problems))
        batch = _Batch(self, f"{step}", problems, requests, policy_version, replacements, on_scored)
        return await batch.samples(watch, stages)

    async def evaluate(
        self, step: int, chosen: HeldOut, policy_version: int, watch: Stopwatch
    ) -> list[Scored]:
        """Return the samples of a held-out set, under the policy of an RL step."""
        label = f"eval-{step}-{chosen.name}" if chosen.name else f"eval-{step}"
        problems, prompts = chosen.problems, self._prompts(chosen.problems)
        requests = make_requests(
            self._config, label, prompts, chosen.num_samples, chosen.temperature, None
        )
        replacements = Replacements(len(problems), len(problems))
        batch = _Batch(
            *(self, label, problems, requests, policy_version, replacements),
            on_scored=lambda scored: False,
            reward=chosen.reward,
        )
        return await batch.samples(watch, ("eval", "eval"))

    def penalty(self, sample: Sample) -> float:
        """Return what a sample to train on loses of its reward for its length."""
        config = self._config
        limit = config.sampling.max_tokens
        return overlong_penalty(len(sample.token_ids), limit, config.algorithm)

    def _prompts(self, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
        """Return the prompts; report those that are too long, and refuse to have no other."""
        prompts = [self.chat.prompt(p.question, p.history) for p in problems]
        limit = self.max_prompt_tokens
        sizes = zip(problems, map(len, prompts), strict=True)
        too_long = [(problem.problem_id, size) for problem, size in sizes if size > limit]
        self.num_left_out = len(too_long)
        if not too_long:
            return prompts
        names = ", ".join(f"{name} ({size} tokens)" for name, size in too_long[:5])
        what = (
            f"{len(too_long)} of {len(problems)} problems are too long: {names}; a prompt may have "
            f"{limit} tokens beside sampling.max_tokens = {self._config.sampling.max_tokens}"
        )
        if len(too_long) == len(problems):
            raise ConfigError(f"{what}. Raise engine.engine_args.max_model_len, or remove them")
        logger.warning("%s. They are left out", what)
        return prompts

    def _forced_lengths(self, step: int, count: int) -> Sequence[int]:
        sizes = self._config.debug.forced_lengths
        if sizes is None:
            return ()
        rng = random.Random(f"{self._config.run.seed}/lengths/{step}")
        return HeavyTail(sizes.median, sizes.p95, sizes.longest).spread(count, rng)


class _Batch:
    """The samples of an RL step or of an evaluation, while they are generated and scored."""

    def __init__(
        self,
        of: Rollouts,
        label: str,
        problems: Sequence[Problem],
        made: Sequence[SampleRequest],
        policy_version: int,
        replacements: Replacements,
        on_scored: Callable[[Scored], bool],
        reward: RewardFunction | None = None,
    ) -> None:
        self._of = of
        self._label = label
        self._problems = problems
        self._made = made
        """Requests of all problems, also of those that may not start."""
        self._group_size = len(made) // len(problems)
        self._index_of = {request.sample_id: index for index, request in enumerate(made)}
        self._policy_version = policy_version
        self._replacements = replacements
        self._on_scored = on_scored
        self._reward = reward
        """The reward of a held-out set; None for the run's own."""
        self._num_requests = 0
        self._scoring: list[asyncio.Task[Scored]] = []
        self._extra: list[asyncio.Task[None]] = []
        """Generations of extra problems."""

    async def samples(self, watch: Stopwatch, stages: tuple[str, str]) -> list[Scored]:
        """Generate and score; the two stages are the generation, and the wait for rewards."""
        requests = self._starting(range(self._replacements.num_started))
        self._of.live.doing(Activity.GENERATING, 0, len(requests), self._label)
        self._of.harvest.rollout_started(len(requests))
        try:
            await self._generate(requests)
            while pending := self._pending():
                await asyncio.gather(*pending)
            await asyncio.gather(*self._extra)  # raises what ended one
            watch.lap(stages[0])
            scoring = asyncio.gather(*self._scoring)
            scored, _ = await asyncio.gather(scoring, self._of.harvest.rollout_ended())
        finally:
            for task in self._extra:
                task.cancel()
            await asyncio.gather(*self._extra, return_exceptions=True)
        watch.lap(stages[1])
        return sorted(scored, key=lambda s: (s.problem_number, s.place))

    def _pending(self) -> list[asyncio.Task[Any]]:
        """Return what must end before the generation has ended: a score may start more of it."""
        deciding = self._scoring if self._replacements.are_left else []
        return [task for task in (*self._extra, *deciding) if not task.done()]

    def _starting(self, numbers: Iterable[int]) -> list[SampleRequest]:
        """Return the requests of these problems; extra ones replace those that are too long."""
        requests: list[SampleRequest] = []
        while numbers:
            for number in numbers:
                group = self._made[number * self._group_size : (number + 1) * self._group_size]
                if len(group[0].prompt_token_ids) <= self._of.max_prompt_tokens:
                    requests += group
                else:
                    self._replacements.observe(number)
            numbers = self._replacements.decide()
        self._num_requests += len(requests)
        return requests

    async def _generate(self, requests: Sequence[SampleRequest]) -> None:
        async for sample in self._of.pool.generate(requests):
            self._scoring.append(asyncio.create_task(self._score(sample)))
            self._of.harvest.sample_finished()
            done = len(self._scoring)
            self._of.live.doing(Activity.GENERATING, done, self._num_requests, self._label)

    async def _score(self, sample: Sample) -> Scored:
        if sample.policy_version != self._policy_version:
            raise EngineError(
                f"sample {sample.sample_id} of {sample.engine} comes from another policy: "
                f"version {sample.policy_version} instead of {self._policy_version}"
            )
        index = self._index_of[sample.sample_id]
        number, place = divmod(index, self._group_size)
        request, text = self._made[index], self._of.chat.text(sample.token_ids)
        reward = await self._of.rewards.score(self._problems[number], text, self._reward)
        value = reward.value
        if request.rl_step is not None and reward.fault is None:
            value -= self._of.penalty(sample)
        scored = Scored(number, place, request, sample, text, value, reward.fault)
        if self._on_scored(scored):
            self._replacements.observe(number)
            if requests := self._starting(self._replacements.decide()):
                self._of.harvest.rollout_grew(len(requests))
                self._extra.append(asyncio.create_task(self._generate(requests)))
        return scored
