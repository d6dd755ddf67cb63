"""Trajectories: the turns of policy and environment as one text.

Each turn of the policy is a request like any other, whose prompt is everything before it: question,
earlier turns, answers of tools. Its seed follows from the sample's and from the number of the turn,
so a trajectory is a function of seed, policy and answers, with any drafts and on any engine. At its
end the turns and answers become one sample, in which the answers are marked: the learner learns
nothing from their tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tlt.agents.host import ToolHost
from tlt.config.tasks import ToolsConfig
from tlt.contracts import Sample, SampleRequest, Turns
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.processes import Fault

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Trajectory:
    """An unfinished sample: the first turn's request, and the turns and answers since."""

    request: SampleRequest
    state: bytes
    reward: float | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    observed: list[tuple[int, int]] = field(default_factory=list)
    num_turns: int = 0
    num_errors: int = 0
    tool_s: float = 0.0
    queued_s: float = 0.0
    running_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A whole trajectory."""

    sample: Sample
    turns: Turns
    last_text: str
    """The text of the policy's last turn."""
    reward: float | None
    """The environment's reward; None if it has none."""
    state: bytes
    """The environment at the end."""


class Dialogues:
    """The trajectories of a rollout: `open` the problems, `begin` each sample, `turn_ended`."""

    def __init__(
        self,
        environment: str,
        tools: Sequence[dict[str, Any]],
        config: ToolsConfig,
        host: ToolHost,
        chat: Chat,
        label: str,
        max_tokens: int,
    ) -> None:
        self._environment = environment
        self._tools = tools
        self._config = config
        self._host = host
        self._chat = chat
        self._label = label
        self._max_tokens = max_tokens
        self._opened: dict[int, tuple[bytes, float | None]] = {}
        """Environment and reward of each problem before the first turn."""
        self._running: dict[str, _Trajectory] = {}

    async def open(self, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
        """Return the prompts; an empty one for a problem that the environment does not take."""
        return await asyncio.gather(*(self._open(n, each) for n, each in enumerate(problems)))

    async def _open(self, number: int, problem: Problem) -> tuple[int, ...]:
        try:
            said = await self._host.begin(self._environment, self._label, number, problem)
        except Fault as fault:
            logger.warning("the environment does not take %s: %s", problem.problem_id, fault)
            return ()
        self._opened[number] = said.state, said.reward
        question = "\n".join([problem.question, *said.messages])
        return self._chat.prompt(question, problem.history, self._tools)

    def begin(self, number: int, request: SampleRequest) -> SampleRequest:
        """Return the request of the first turn of a sample of this problem."""
        self._running[request.sample_id] = _Trajectory(request, *self._opened[number])
        return self._turn(self._running[request.sample_id])

    def sample_of(self, sample_id: str) -> str:
        """Return the id of the sample that a turn belongs to."""
        return sample_id.partition("+")[0]

    async def turn_ended(self, turn: Sample) -> SampleRequest | Ended:
        """Return the request of the next turn, or the whole trajectory if there is none."""
        mine = self._running[self.sample_of(turn.sample_id)]
        ended = turn.finish_reason == "stop"
        mine.token_ids += turn.token_ids
        mine.logprobs += turn.logprobs
        mine.queued_s += turn.queued_s
        mine.running_s += turn.running_s
        mine.num_turns += 1
        if not ended or mine.num_turns == self._config.max_turns:
            return self._ended(mine, turn)
        answer = await self._host.answer(
            *(self._environment, self._label, mine.request.sample_id, mine.num_turns),
            *(mine.state, self._chat.turn_text(turn.token_ids)),
        )
        mine.state = answer.state
        mine.reward = mine.reward if answer.reward is None else answer.reward
        mine.num_errors += answer.num_errors
        mine.tool_s += answer.seconds
        if answer.done:
            return self._ended(mine, turn)
        limit = self._config.max_answer_tokens
        said = self._chat.after_turn(answer.messages, turn.token_ids[-1], limit)
        if len(mine.token_ids) + len(said) >= self._max_tokens:
            return self._ended(mine, replace(turn, finish_reason="length"))
        mine.observed.append((len(mine.token_ids), len(mine.token_ids) + len(said)))
        mine.token_ids += said
        mine.logprobs += [0.0] * (len(said) if mine.logprobs else 0)
        return self._turn(mine, turn.engine)

    def _turn(self, mine: _Trajectory, prefers: str | None = None) -> SampleRequest:
        """Return the request of the next turn."""
        first, number = mine.request, mine.num_turns
        room = self._max_tokens - len(mine.token_ids)
        size = min(room, self._config.max_turn_tokens or room)
        sampling = replace(first.sampling, max_tokens=size)
        if number == 0:
            return replace(first, sampling=sampling)
        seed = first.sampling.seed
        return replace(
            first,
            sample_id=f"{first.sample_id}+{number}",
            prompt_token_ids=(*first.prompt_token_ids, *mine.token_ids),
            sampling=replace(sampling, seed=None if seed is None else _turn_seed(seed, number)),
            prefers=prefers,
        )

    def _ended(self, mine: _Trajectory, last: Sample) -> Ended:
        whole = replace(
            last,
            sample_id=mine.request.sample_id,
            token_ids=tuple(mine.token_ids),
            logprobs=tuple(mine.logprobs),
            queued_s=mine.queued_s,
            running_s=mine.running_s,
        )
        text = self._chat.text(last.token_ids)
        turns = Turns(tuple(mine.observed), mine.num_turns, mine.num_errors, mine.tool_s)
        del self._running[mine.request.sample_id]
        return Ended(whole, turns, text, mine.reward, mine.state)


def _turn_seed(seed: int, number: int) -> int:
    """Return 63 bits for the noise of a turn."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
