"""The samples of RL steps and evaluations, from problems to rewards.

`Rollouts.generate` makes the requests, lets the pool generate them and scores every sample as it
ends. A sample's id names the sample and seeds it. A problem whose prompt leaves no room for a
response in the model's context is left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Sequence

from tlt.config.train import TrainConfig
from tlt.contracts import Sample, SampleRequest, SamplingSpec, Scored
from tlt.errors import ConfigError, EngineError
from tlt.harvest.contract import RunHarvest
from tlt.observe.live import Activity, Live
from tlt.observe.stopwatch import Stopwatch
from tlt.rollout.pool import RolloutPool
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.rewards import RewardPool
from tlt.tasks.tail import HeavyTail

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
        self._chat = chat
        self._pool = pool
        self._rewards = rewards
        self._harvest = harvest
        self._live = live
        self._max_prompt_tokens = max_prompt_tokens
        self.num_left_out = 0
        """Problems of the last call that were too long."""

    async def generate(
        self,
        step: int,
        problems: Sequence[Problem],
        policy_version: int,
        watch: Stopwatch,
        on_scored: Callable[[Scored], None],
    ) -> list[Scored]:
        """Return the samples of an RL step in order; call `on_scored` as each one is scored."""
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
        return await self._samples(
            f"{step}", problems, requests, policy_version, watch, stages, on_scored
        )

    async def evaluate(
        self, step: int, problems: Sequence[Problem], policy_version: int, watch: Stopwatch
    ) -> list[Scored]:
        """Return one sample of every held-out problem, under the policy of an RL step."""
        label, prompts = f"eval-{step}", self._prompts(problems)
        temperature = self._config.eval.temperature
        requests = make_requests(self._config, label, prompts, 1, temperature, None)
        stages = "eval", "eval"
        return await self._samples(label, problems, requests, policy_version, watch, stages)

    async def _samples(
        self,
        label: str,
        problems: Sequence[Problem],
        made: list[SampleRequest],
        policy_version: int,
        watch: Stopwatch,
        stages: tuple[str, str],
        on_scored: Callable[[Scored], None] = lambda scored: None,
    ) -> list[Scored]:
        """Generate and score; the two stages are the generation, and the wait for rewards."""
        index_of = {request.sample_id: index for index, request in enumerate(made)}
        requests = [r for r in made if len(r.prompt_token_ids) <= self._max_prompt_tokens]

        async def score(sample: Sample) -> Scored:
            if sample.policy_version != policy_version:
                raise EngineError(
                    f"sample {sample.sample_id} of {sample.engine} comes from another policy: "
                    f"version {sample.policy_version} instead of {policy_version}"
                )
            index = index_of[sample.sample_id]
            number, place = divmod(index, len(made) // len(problems))
            text = self._chat.text(sample.token_ids)
            reward = await self._rewards.score(problems[number], text)
            scored = Scored(number, place, made[index], sample, text, reward.value, reward.fault)
            on_scored(scored)
            return scored

        scoring = []
        self._live.doing(Activity.GENERATING, 0, len(requests), label)
        self._harvest.rollout_started(len(requests))
        async for sample in self._pool.generate(requests):
            scoring.append(asyncio.create_task(score(sample)))
            self._harvest.sample_finished()
            self._live.doing(Activity.GENERATING, len(scoring), len(requests), label)
        watch.lap(stages[0])
        scored, _ = await asyncio.gather(asyncio.gather(*scoring), self._harvest.rollout_ended())
        watch.lap(stages[1])
        return sorted(scored, key=lambda s: (s.problem_number, s.place))

    def _prompts(self, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
        """Return the prompts; report those that are too long, and refuse to have no other."""
        prompts = [self._chat.prompt(p.question, p.history) for p in problems]
        limit = self._max_prompt_tokens
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
