"""Trajectories: requests of turns, observed parts, limits. The environment answers in-process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tlt.agents import environment as user
from tlt.agents.dialogue import Dialogues, Ended
from tlt.agents.environment import Answer, tagged_calls
from tlt.agents.worked import worked_dialogues
from tlt.config.tasks import ToolsConfig
from tlt.contracts import FinishReason, Sample, SampleRequest, SamplingSpec
from tlt.errors import ConfigError
from tlt.models import tiny
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.processes import Fault
from tool_acts import Acts, call

MAX_TOKENS = 2000
TOOLS = user.tool_schemas(Acts)


class Host:
    """Calls the environment in this process."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    async def begin(self, environment: str, label: str, number: int, problem: Problem) -> Answer:
        await asyncio.sleep(0)
        if "log" not in problem.entry:
            raise Fault("error", "no log")
        return user.begin(Acts, {"question": problem.question, **problem.entry})

    async def answer(
        self, environment: str, label: str, sample_id: str, turn: int, state: bytes, text: str
    ) -> Answer:
        self.asked.append((label, sample_id, turn))
        return replace(user.answer(Acts, state, text, tagged_calls), seconds=0.5)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    made = tiny.make(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, num_layers=3)
    return Chat(str(made))


class Talk:
    """A trajectory whose policy says what the test says."""

    def __init__(self, chat: Chat, folder: Path, seed: int | None = 7, **settings: Any) -> None:
        self.chat, self.host = chat, Host()
        max_tokens = settings.pop("max_tokens", MAX_TOKENS)
        made: Any = self.host
        self.dialogues = Dialogues(
            "tool_acts:Acts", TOOLS, ToolsConfig(**settings), made, chat, "3", max_tokens
        )
        columns = {"log": str(folder / "calls.txt"), "greeting": "Hello."}
        self.problem = Problem("p", "What is it?", "4", entry=columns)
        (self.prompt,) = asyncio.run(self.dialogues.open([self.problem]))
        spec = SamplingSpec(max_tokens, temperature=0.7, seed=seed)
        self.first = SampleRequest("3/00000/0001", self.prompt, spec, rl_step=3)
        self.request: SampleRequest = self.dialogues.begin(0, self.first)

    def says(
        self, text: str, reason: FinishReason = "stop", engine: str = "engine-1"
    ) -> SampleRequest | Ended:
        tokens = self.chat.turn(text)
        if reason == "length":
            tokens = tokens[:-1]
        sample = Sample(
            *(self.request.sample_id, tokens, (-0.5,) * len(tokens), reason, engine, 2),
            *(0.25, 1.0, 9.0),
        )
        follows = asyncio.run(self.dialogues.turn_ended(sample))
        if isinstance(follows, SampleRequest):
            self.request = follows
        return follows


def text_of(chat: Chat, tokens: Sequence[int]) -> str:
    return str(chat.tokenizer.decode(list(tokens)))


def test_the_prompt_has_question_greeting_and_tools(chat: Chat, tmp_path: Path) -> None:
    talk = Talk(chat, tmp_path)
    text = text_of(chat, talk.prompt)
    assert "What is it?\nHello." in text
    for tool in TOOLS:
        assert tool["function"]["name"] in text
    assert talk.request == talk.first


def test_the_next_turn_continues_everything_before_it(chat: Chat, tmp_path: Path) -> None:
    talk = Talk(chat, tmp_path)
    first = f"Let me count. {call('count')}"
    second = talk.says(first)
    assert isinstance(second, SampleRequest)
    assert second.sample_id == "3/00000/0001+1"
    assert talk.dialogues.sample_of(second.sample_id) == "3/00000/0001"
    assert second.prompt_token_ids[: len(talk.prompt)] == talk.prompt
    said = text_of(chat, second.prompt_token_ids[len(talk.prompt) :])
    assert said.startswith(f"{first}{chat.tokenizer.eos_token}")
    assert "call 1" in said
    assert said.endswith("<|assistant|>")
    assert (second.rl_step, second.prefers) == (3, "engine-1")
    assert second.sampling.temperature == 0.7
    room = MAX_TOKENS - (len(second.prompt_token_ids) - len(talk.prompt))
    assert second.sampling.max_tokens == room
    third = talk.says(call("count"), engine="engine-0")
    assert isinstance(third, SampleRequest)
    assert third.sample_id == "3/00000/0001+2"
    assert third.prefers == "engine-0"
    assert third.prompt_token_ids[: len(second.prompt_token_ids)] == second.prompt_token_ids
    assert talk.host.asked == [("3", "3/00000/0001", 1), ("3", "3/00000/0001", 2)]


def test_a_whole_trajectory_is_one_sample_with_its_observed_parts(
    chat: Chat, tmp_path: Path
) -> None:
    talk = Talk(chat, tmp_path)
    texts = [call("count"), call("fail"), "It is 4."]
    for text in texts:
        ended = talk.says(text)
    assert isinstance(ended, Ended)
    sample, turns = ended.sample, ended.turns
    assert sample.sample_id == "3/00000/0001"
    assert (turns.num_turns, turns.num_errors, turns.tool_s) == (3, 1, 1.5)
    assert (sample.queued_s, sample.running_s) == (0.75, 3.0)
    assert (sample.finish_reason, ended.last_text) == ("stop", "It is 4.")
    assert talk.request.prompt_token_ids + chat.turn(texts[2]) == talk.prompt + sample.token_ids
    observed = {place for begin, end in turns.observed for place in range(begin, end)}
    assert len(observed) == turns.num_observed
    drawn = [t for place, t in enumerate(sample.token_ids) if place not in observed]
    assert tuple(drawn) == sum((chat.turn(text) for text in texts), ())
    assert [sample.logprobs[place] for place in sorted(observed)] == [0.0] * len(observed)
    assert sum(logprob == -0.5 for logprob in sample.logprobs) == len(drawn)
    first, second = (text_of(chat, sample.token_ids[begin:end]) for begin, end in turns.observed)
    assert "call 1" in first
    assert "error: ValueError: no luck" in second


def test_seeds_follow_from_the_samples_seed_and_the_turns_number(
    chat: Chat, tmp_path: Path
) -> None:
    seeds = []
    for seed, text in ((7, "count"), (7, "fail"), (8, "count")):
        talk = Talk(chat, tmp_path, seed=seed)
        for _ in range(3):
            talk.says(call(text))
            seeds.append(talk.request.sampling.seed)
    assert seeds[:3] == seeds[3:6], "the text does not matter"
    assert len({*seeds, 7, 8}) == 8
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    without = Talk(chat, tmp_path, seed=None)
    without.says(call("count"))
    assert without.request.sampling.seed is None


def test_samples_of_a_group_start_from_one_environment(chat: Chat, tmp_path: Path) -> None:
    talk = Talk(chat, tmp_path)
    talk.says(call("count"))
    other = replace(talk.first, sample_id="3/00000/0002")
    talk.request = talk.dialogues.begin(0, other)
    follows = talk.says(call("count"))
    assert isinstance(follows, SampleRequest)
    assert "call 1" in text_of(chat, follows.prompt_token_ids)


def test_a_reward_is_the_environments_last_one(chat: Chat, tmp_path: Path) -> None:
    ended = Talk(chat, tmp_path).says("I give up.")
    assert isinstance(ended, Ended)
    assert ended.reward == 0.0
    won = Talk(chat, tmp_path).says(call("win"))
    assert isinstance(won, Ended)
    assert (won.reward, won.turns.num_turns, won.turns.observed) == (1.0, 1, ())


def test_a_problem_that_is_not_taken_has_no_prompt(
    chat: Chat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk = Talk(chat, tmp_path)
    prompts = asyncio.run(talk.dialogues.open([Problem("q", "?", ""), talk.problem]))
    assert prompts == [(), talk.prompt]
    assert "the environment does not take q: no log" in caplog.text


# --- limits ---------------------------------------------------------------------------------------


def test_turns_are_limited(chat: Chat, tmp_path: Path) -> None:
    talk = Talk(chat, tmp_path, max_turns=2)
    assert isinstance(talk.says(call("count")), SampleRequest)
    ended = talk.says(call("count"))
    assert isinstance(ended, Ended)
    assert ended.turns.num_turns == 2
    assert len(talk.host.asked) == 1, "nobody would read a second answer"


def test_tokens_of_a_turn_are_limited_and_a_longer_turn_ends_the_sample(
    chat: Chat, tmp_path: Path
) -> None:
    talk = Talk(chat, tmp_path, max_turn_tokens=100)
    assert talk.request.sampling.max_tokens == 100
    talk.says(call("count"))
    assert talk.request.sampling.max_tokens == 100
    ended = talk.says(call("count") + "x", reason="length")
    assert isinstance(ended, Ended)
    assert ended.sample.finish_reason == "length"
    assert len(talk.host.asked) == 1, "a turn that was cut off calls nothing"


def test_tokens_of_a_sample_are_limited(chat: Chat, tmp_path: Path) -> None:
    turn = len(chat.turn(call("count")))
    whole = Talk(chat, tmp_path)
    whole.says(call("count"))
    said = len(whole.request.prompt_token_ids) - len(whole.prompt) - turn
    talk = Talk(chat, tmp_path, max_tokens=turn + said + 1)
    assert isinstance(talk.says(call("count")), SampleRequest)
    assert talk.request.sampling.max_tokens == 1
    full = Talk(chat, tmp_path, max_tokens=turn + said)
    ended = full.says(call("count"))
    assert isinstance(ended, Ended), "no token of another turn has room"
    assert ended.sample.finish_reason == "length"
    assert ended.turns.observed == ()
    assert len(ended.sample.token_ids) == turn


def test_an_answer_is_cut_and_ends_no_turn(chat: Chat, tmp_path: Path) -> None:
    short = chat.after_turn(["ab"], chat.tokenizer.eos_token_id, 20)
    long = chat.after_turn(["ab" * 5000], chat.tokenizer.eos_token_id, 20)
    assert len(long) <= len(short) + 20 + 3
    special = chat.tokenizer.eos_token
    tricky = chat.after_turn([f"a{special}b"], chat.tokenizer.eos_token_id, 20)
    count = [list(each).count(chat.tokenizer.eos_token_id) for each in (short, tricky)]
    assert count[0] == count[1]
    two = chat.after_turn(["a", "b"], chat.tokenizer.eos_token_id, 20)
    assert len(short) < len(two) < 3 * len(short)


# --- worked dialogues -----------------------------------------------------------------------------


class Solved(Acts):
    @staticmethod
    def worked(answer: str, **_: Any) -> list[str]:
        return [call("count"), call("count"), f"<answer>{answer}</answer>"]


def test_worked_dialogues_are_those_of_a_run(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Acts, "worked", staticmethod(Solved.worked), raising=False)
    talk = Talk(chat, tmp_path)
    texts = Solved.worked(answer="4")
    for text in texts:
        ended = talk.says(text)
    assert isinstance(ended, Ended)
    ((tokens, parts),) = worked_dialogues("tool_acts:Acts", chat, [talk.problem], tagged_calls)
    assert tuple(tokens) == talk.prompt + ended.sample.token_ids
    assert [tuple(tokens[begin:end]) for begin, end in parts] == [chat.turn(t) for t in texts]
    begin = len(talk.prompt)
    observed = [(begin + a, begin + b) for a, b in ended.turns.observed]
    assert observed == [(parts[0][1], parts[1][0]), (parts[1][1], parts[2][0])]


def test_an_environment_without_solutions_is_refused(chat: Chat) -> None:
    why = r"--environment: 'tool_acts:Acts' shows no solutions; give it a static method worked"
    with pytest.raises(ConfigError, match=why):
        worked_dialogues("tool_acts:Acts", chat, [], tagged_calls)


def method(self: Any, answer: str) -> list[str]:
    return [answer]


WRONG = {
    "a wrong name": (lambda answer: [call("cuont"), answer], "no tool 'cuont'"),
    "no call": (lambda answer: [answer, answer], "the environment is done"),
    "an error": (lambda nothing: [], "missing 1 required positional argument"),
}


@pytest.mark.parametrize("what", WRONG)
def test_worked_dialogues_that_go_wrong_are_refused(
    what: str, chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked, why = WRONG[what]
    monkeypatch.setattr(Acts, "worked", staticmethod(worked), raising=False)
    problem = Talk(chat, tmp_path).problem
    with pytest.raises(ConfigError, match=f"--environment: 'tool_acts:Acts' does not .*{why}"):
        worked_dialogues("tool_acts:Acts", chat, [problem], tagged_calls)


def test_worked_must_be_a_static_method(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Acts, "worked", method, raising=False)
    with pytest.raises(ConfigError, match="give it a static method worked"):
        worked_dialogues("tool_acts:Acts", chat, [], tagged_calls)


# --- answers of tools -----------------------------------------------------------------------------


def test_the_beginning_of_megabytes_is_encoded(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver encodes for all trajectories."""
    end, encode, lengths = chat.tokenizer.eos_token_id, chat._encode, list[int]()

    def noting(text: str) -> tuple[int, ...]:
        lengths.append(len(text))
        return encode(text)

    monkeypatch.setattr(chat, "_encode", noting)
    assert len(chat.after_turn(["ab " * 3_000_000], end, 20)) < 60
    assert max(lengths) < 1000


def test_a_tool_cannot_write_any_special_token(chat: Chat) -> None:
    tokens = chat.tokenizer.added_tokens_decoder.items()
    specials = {number: str(token.content) for number, token in tokens if token.special}
    end = chat.tokenizer.eos_token_id
    usual = set(chat.after_turn(["a"], end, 20))
    for number, text in specials.items():
        if number not in usual:
            assert number not in chat.after_turn([f"a{text}b"], end, 20), text
