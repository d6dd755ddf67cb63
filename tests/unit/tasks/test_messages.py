"""System prompts, questions of several messages, and columns that rewards read."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")
pytest.importorskip("transformers")
pytest.importorskip("pebble")
pytest.importorskip("pyarrow")

from problem_files import write_rows

from tlt.config.tasks import TaskConfig
from tlt.errors import ConfigError
from tlt.models import tiny
from tlt.tasks.chat import Chat
from tlt.tasks.datasets import Columns, from_file
from tlt.tasks.file import read_problems, task_of
from tlt.tasks.rewards import RewardPool, reward_function
from tlt.tasks.source import open_source


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TALK = [said("user", "Hi."), said("assistant", "Hello."), said("user", "2 + 2?")]
ROWS = [
    {"messages": TALK, "answer": 4, "level": {"grade": 3}},
    {"messages": [said("system", "Be kind."), said("user", "2 + 3?")], "answer": 5, "level": None},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, num_layers=3)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_and_the_system_prompt_become_one_prompt(
    tmp_path: Path, model: Path, suffix: str
) -> None:
    path = write_rows(tmp_path / f"talks{suffix}", ROWS)
    assert task_of(path)["task"]["question_key"] == "messages"
    config = TaskConfig(
        path=path, question_key="messages", instruction="Think.", system_prompt="Be brief."
    )
    source = open_source(config, 0, 1)
    first, second = *source.batch(1, 1), *source.held_out(1)
    assert first.history == (said("system", "Be brief."), *TALK[:-1])
    assert (first.question, first.answer) == ("2 + 2?\nThink.", "4")
    assert (first.entry["level"], second.entry["level"]) == ({"grade": 3}, None)
    assert second.history == (said("system", "Be kind."),), "the row's own comes first"
    chat = Chat(str(model))
    text = chat.tokenizer.decode(list(chat.prompt(first.question, first.history)))
    assert text == (
        "<|system|>Be brief.<|end|><|user|>Hi.<|end|><|assistant|>Hello.<|end|>"
        "<|user|>2 + 2?\nThink.<|end|><|assistant|>"
    )


def test_a_task_by_name_gets_the_system_prompt() -> None:
    config = TaskConfig(name="chain_sum", system_prompt="Be brief.")
    (problem,) = open_source(config, 0, 0).batch(1, 1)
    assert problem.history == (said("system", "Be brief."),)


async def test_a_reward_reads_all_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def score(problem, text):\n    return problem.entry['level']['grade']\n"
    (tmp_path / "reward_of_columns.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    path = write_rows(tmp_path / "talks.parquet", ROWS)
    problems = read_problems(TaskConfig(path=path, question_key="messages"))
    function = reward_function("reward_of_columns:score", True)
    with closing(RewardPool(function, num_workers=1, timeout_s=30.0)) as pool:
        assert (await pool.score(problems[0], "4")).value == 3.0
        assert (await pool.score(problems[1], "5")).fault == "error"


REFUSED: list[tuple[Any, str]] = [
    (5, r"line 1: messages is 5, neither a text nor a list of messages; e\.g\. "),
    ([], r"neither a text nor a list"),
    (["2 + 2?"], r"message 1 is '2 \+ 2\?'"),
    ([said("tool", "4")], r"message 1 .* \(system, user, assistant\)"),
    ([TALK[0] | {"tool_calls": [1]}], r"message 1 is .* not just a role"),
    ([{"role": "user"}], r"message 1 is "),
    ([said("user", [{"type": "text", "text": "?"}])], r"message 1 is \[.*not a text"),
    ([said("user", " ")], r"messages, message 1 is ' '"),
    (TALK[:2], r"from user, assistant; the last one must be from user"),
    ([TALK[0], said("system", "Be kind."), TALK[2]], r"only the first one may be from system"),
]


@pytest.mark.parametrize(("messages", "why"), REFUSED, ids=[case[1] for case in REFUSED])
def test_messages_that_cannot_be_asked_are_refused(tmp_path: Path, messages: Any, why: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages, "answer": 4}])
    with pytest.raises(ConfigError, match=why):
        read_problems(TaskConfig(path=path, question_key="messages"))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "leaves out"),
        ("{{ raise_exception('no system role') }}", "messages of system, user .*no system role"),
    ],
)
def test_a_template_without_system_messages_is_told_apart(
    model: Path, template: str, why: str
) -> None:
    chat = Chat(str(model), "policy.model")
    chat.tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=rf"policy\.model .*{why}.*task\.instruction"):
        chat.prompt("2 + 2?", [said("system", "Be brief.")])


ROLES = "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
ALTERNATE = (
    "{% if loop.index0 and m.role == loop.previtem.role %}{{ raise_exception('no') }}{% endif %}"
)
REFUSES = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "rest"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<tool>4<tool>5"),
        (f"{ROLES}{ALTERNATE}{{% endfor %}}", "<user>4\n5"),
        (f"{REFUSES}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% endfor %}}", "<user>4\n5"),
    ],
    ids=["shows", "leaves out", "refuses"],
)
def test_answers_of_tools_reach_the_policy_by_any_template(
    model: Path, template: str, rest: str
) -> None:
    """Some templates leave messages of tools out: the policy would read nothing."""
    chat = Chat(str(model), "policy.model")
    chat.tokenizer.chat_template = template
    tokens = chat.after_turn(["4", "5"], chat.tokenizer.eos_token_id, 8)
    assert chat.tokenizer.decode(list(tokens)) == rest


def test_a_copy_of_single_questions_refuses_several_messages(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    write_rows(path, ROWS)
    with pytest.raises(ConfigError, match=r"talks/1 is several messages.*task\.path = "):
        list(from_file(path, Columns("messages", "answer")))
