"""The samples of RL steps and evaluations, from problems to rewards.

`Rollouts.generate` makes the requests, lets the pool generate them and scores every sample as it
ends. With an environment, a turn that ends may be followed by the next one (`tlt.agents`). A
sample's id names the sample and seeds it. A problem whose prompt leaves no room for a
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

from tlt.agents.dialogue import Dialogues, Ended
from tlt.agents.host import ToolHost
from tlt.agents.scoring import state_reward
from tlt.config.train import TrainConfig
from tlt.contracts import ONE_TURN, Sample, SampleRequest, SamplingSpec, Scored
from tlt.errors import ConfigError, EngineError
from tlt.harvest.contract import RunHarvest
from tlt.observe.live import Activity, Live
from tlt.observe.stopwatch import Stopwatch
from tlt.rollout.pool import RolloutPool
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import HeldOut
from tlt.tasks.rewards import Reward, RewardFunction, RewardPool
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
        tools: ToolHost | None = None,
        tool_schemas: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`tools` calls the environment, if the run has one; the schemas describe its tools."""
        self._config = config
        self.chat = chat
        self.pool = pool
        self.rewards = rewards
        self.harvest = harvest
        self.live = live
        self.max_prompt_tokens = max_prompt_tokens
        self._tools = tools
        self._tool_schemas = tool_schemas
        self.by_environment = config.reward.function == "auto"
        """Whether a reward of the environment counts, if it has one."""
        self.state_reward = None if tools is None else state_reward(config)
        """The reward that reads the environment itself, if the run has one."""
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
        dialogues = self._dialogues(f"{step}")
        lengths = self._forced_lengths(step, len(problems) * sampling.group_size)
        requests = make_requests(
            self._config,
            f"{step}",
            await self._prompts(problems, dialogues),
            sampling.group_size,
            sampling.temperature,
            step,
            lengths,
        )
        stages = "rollout", "reward_wait"
        replacements = Replacements(sampling.prompts_per_step, len(problems))
        batch = _Batch(
            *(self, f"{step}", problems, requests, policy_version, replacements),
            on_scored=on_scored,
            dialogues=dialogues,
        )
        return await batch.samples(watch, stages)

    async def evaluate(
        self, step: int, chosen: HeldOut, policy_version: int, watch: Stopwatch
    ) -> list[Scored]:
        """Return the samples of a held-out set, under the policy of an RL step."""
        label = f"eval-{step}-{chosen.name}" if chosen.name else f"eval-{step}"
        dialogues = None if chosen.name else self._dialogues(label)
        problems, prompts = chosen.problems, await self._prompts(chosen.problems, dialogues)
        requests = make_requests(
            self._config, label, prompts, chosen.num_samples, chosen.temperature, None
        )
        replacements = Replacements(len(problems), len(problems))
        batch = _Batch(
            *(self, label, problems, requests, policy_version, replacements),
            on_scored=lambda scored: False,
            reward=chosen.reward,
            dialogues=dialogues,
        )
        return await batch.samples(watch, ("eval", "eval"))

    def penalty(self, sample: Sample) -> float:
        """Return the length penalty of a sample to train on."""
        config = self._config
        limit = config.sampling.max_tokens
        return overlong_penalty(len(sample.token_ids), limit, config.algorithm)

    def _dialogues(self, label: str) -> Dialogues | None:
        """Return the trajectories of a rollout; None in a run without an environment."""
        config = self._config
        if self._tools is None or config.task.environment is None:
            return None
        return Dialogues(
            *(config.task.environment, self._tool_schemas, config.tools, self._tools, self.chat),
            *(label, config.sampling.max_tokens),
        )

    async def _prompts(
        self, problems: Sequence[Problem], dialogues: Dialogues | None
    ) -> list[tuple[int, ...]]:
        """Return the prompts; report the ones that are too long, and refuse to run without any."""
        if dialogues is None:
            prompts = [self.chat.prompt(p.question, p.history) for p in problems]
        else:
            prompts = await dialogues.open(problems)
        if not any(prompts):
            raise EngineError(
                f"{self._config.task.environment} took none of {len(problems)} problems: its reset "
                "failed or hung each time; see run.log"
            )
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
        dialogues: Dialogues | None = None,
    ) -> None:
        self._of = of
        self._label = label
        self._problems = problems
        self._made = made
        """Requests of all problems, also of problems that may not start."""
        self._group_size = len(made) // len(problems)
        self._index_of = {request.sample_id: index for index, request in enumerate(made)}
        self._policy_version = policy_version
        self._replacements = replacements
        self._on_scored = on_scored
        self._reward = reward
        """The reward of a held-out set; None for the run's own."""
        self._dialogues = dialogues
        self._num_requests = 0
        self._scoring: list[asyncio.Task[Scored]] = []
        self._extra: list[asyncio.Task[None]] = []
        """Generations of extra problems, and of later turns."""

    async def samples(self, watch: Stopwatch, stages: tuple[str, str]) -> list[Scored]:
        """Generate and score; the two stages are the generation, and the wait for rewards."""
        requests = self._starting(range(self._replacements.num_started))
        self._of.live.doing(Activity.GENERATING, 0, len(requests), self._label)
        self._of.harvest.rollout_started(len(requests))
        try:
            await self._generate(requests)
            while pending := self._pending():
                await asyncio.gather(*pending)
            await asyncio.gather(*self._extra)  # raises a task's error
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
        """Return the tasks that the generation waits for: a score may start more requests."""
        deciding = self._scoring if self._replacements.are_left else []
        return [task for task in (*self._extra, *deciding) if not task.done()]

    def _starting(self, numbers: Iterable[int]) -> list[SampleRequest]:
        """Return the requests of these problems; extra ones replace problems that are too long."""
        requests: list[SampleRequest] = []
        while numbers:
            for number in numbers:
                group = self._made[number * self._group_size : (number + 1) * self._group_size]
                if 0 < len(group[0].prompt_token_ids) <= self._of.max_prompt_tokens:
                    requests += self._first_turns(number, group)
                else:
                    self._replacements.observe(number)
            numbers = self._replacements.decide()
        self._num_requests += len(requests)
        return requests

    def _first_turns(self, number: int, group: Sequence[SampleRequest]) -> Sequence[SampleRequest]:
        if self._dialogues is None:
            return group
        return [self._dialogues.begin(number, request) for request in group]

    async def _generate(self, requests: Sequence[SampleRequest]) -> None:
        are_turns = self._dialogues is not None
        async for sample in self._of.pool.generate(requests, are_turns):
            if sample.policy_version != self._policy_version:
                raise EngineError(
                    f"sample {sample.sample_id} of {sample.engine} comes from another policy: "
                    f"version {sample.policy_version} instead of {self._policy_version}"
                )
            if self._dialogues is None:
                self._ended(sample)
            else:
                self._extra.append(asyncio.create_task(self._turn_ended(self._dialogues, sample)))

    async def _turn_ended(self, dialogues: Dialogues, turn: Sample) -> None:
        """Let the environment answer a turn, and generate the next one."""
        follows: SampleRequest | Ended | None = None
        try:
            follows = await dialogues.turn_ended(turn)
        finally:
            self._of.pool.idle.turn_answered(turn, follows=isinstance(follows, SampleRequest))
        if isinstance(follows, Ended):
            self._ended(follows.sample, follows)
        else:
            await self._generate([follows])

    def _ended(self, sample: Sample, trajectory: Ended | None = None) -> None:
        self._scoring.append(asyncio.create_task(self._score(sample, trajectory)))
        self._of.harvest.sample_finished()
        done = len(self._scoring)
        self._of.live.doing(Activity.GENERATING, done, self._num_requests, self._label)

    async def _score(self, sample: Sample, trajectory: Ended | None) -> Scored:
        index = self._index_of[sample.sample_id]
        number, place = divmod(index, self._group_size)
        request, text = self._made[index], self._of.chat.text(sample.token_ids)
        turns = ONE_TURN if trajectory is None else trajectory.turns
        reward = await self._reward_of(number, text, trajectory)
        value = reward.value
        if request.rl_step is not None and reward.fault is None:
            value -= self._of.penalty(sample)
        scored = Scored(number, place, request, sample, text, value, reward.fault, turns)
        if self._on_scored(scored):
            self._replacements.observe(number)
            if requests := self._starting(self._replacements.decide()):
                self._of.harvest.rollout_grew(len(requests))
                self._extra.append(asyncio.create_task(self._generate(requests)))
        return scored

    async def _reward_of(self, number: int, text: str, trajectory: Ended | None) -> Reward:
        """Return the reward of a text, or its environment's reward."""
        problem, rewards = self._problems[number], self._of.rewards
        if trajectory is None:
            return await rewards.score(problem, text, self._reward)
        if self._of.state_reward is not None:
            function = self._of.state_reward(trajectory.state)
            return await rewards.score(problem, trajectory.last_text, function)
        if self._of.by_environment and trajectory.reward is not None:
            return rewards.checked(problem, trajectory.reward, "no number")
        return await rewards.score(problem, trajectory.last_text, self._reward)
