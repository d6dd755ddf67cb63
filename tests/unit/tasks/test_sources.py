"""Sources of problems: tasks and files, their order, and what they refuse."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("reasoning_gym")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet as parquet
from problem_files import write_rows

from tlt.config.tasks import SizesConfig, TaskConfig
from tlt.errors import ConfigError
from tlt.tasks.file import read_problems
from tlt.tasks.gym import score
from tlt.tasks.source import FileSource, GymSource, open_source

ROW = {"question": "2 + 2?", "answer": "4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def rows_file(folder: Path, num_rows: int) -> str:
    path = folder / f"{num_rows}.jsonl"
    return write_rows(path, [{"question": f"{n}?", "answer": n} for n in range(num_rows)])


def test_tasks_have_random_access() -> None:
    config = TaskConfig(name="chain_sum", sizes=SizesConfig(median=2.5, p95=5, longest=9))
    source, again = GymSource(config, seed=1), GymSource(config, seed=1)
    third = source.batch(3, 4)
    assert [again.batch(step, 4) for step in (3, 2)] == [third, source.batch(2, 4)]
    seen = [*third, *source.batch(2, 4), *source.held_out(4), *GymSource(config, 2).batch(3, 4)]
    assert len({problem.question for problem in seen}) == len(seen)
    assert len({problem.problem_id for problem in seen}) == len(seen)


@pytest.mark.parametrize("name", ["basic_arithmetic", "graph_color", "sokoban", "word_ladder"])
def test_any_task_can_be_had_and_its_problems_travel(name: str) -> None:
    """Problems must reach the processes that score them."""
    for problem in GymSource(TaskConfig(name=name), seed=0).batch(0, 2):
        assert isinstance(problem.answer, str)
        there = pickle.loads(pickle.dumps(problem))
        assert there == problem
        assert there.entry == problem.entry
        assert score(there, "no tags") == 0.0
        if problem.answer:
            assert score(there, f"<answer>{problem.answer}</answer>") == 1.0


def test_parameters_reach_the_task() -> None:
    config = TaskConfig(name="chain_sum", parameters={"min_terms": 7, "max_terms": 7})
    for problem in GymSource(config, seed=0).batch(0, 5):
        assert len(problem.entry["metadata"]["expression"].split()) == 13


@pytest.mark.parametrize("key", ["name", "path"])
def test_the_instruction_ends_every_question(key: str, folder: Path) -> None:
    value = "chain_sum" if key == "name" else rows_file(folder, 9)
    config = TaskConfig.model_validate({key: value})
    plain = open_source(config, 0, 3)
    told = open_source(config.model_copy(update={"instruction": "Use tags."}), 0, 3)
    for before, after in [
        *zip(plain.batch(0, 3), told.batch(0, 3), strict=True),
        *zip(plain.held_out(3), told.held_out(3), strict=True),
    ]:
        assert after.question == f"{before.question}\nUse tags."


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, r"task\.name or task\.path"),
        ({"name": "gcd", "path": "x.jsonl"}, r"task\.name or task\.path"),
        ({"path": "x.jsonl", "sizes": {}}, r"task\.sizes"),
        ({"path": "x.jsonl", "parameters": {"a": 1}}, r"task\.parameters"),
        ({"name": "chian_sum"}, r"task\.name: .*e\.g\. chain_sum"),
        ({"name": "basic_arithmetic", "sizes": {}}, r"task\.sizes: .*chain_sum, gcd"),
        ({"name": "gcd", "sizes": {"median": 9, "p95": 3}}, r"task\.sizes: .* median <= p95"),
        ({"name": "gcd", "parameters": {"max_valu": 3}}, r"task\.parameters: .*e\.g\. max_value"),
        ({"name": "gcd", "sizes": {}, "parameters": {"max_numbers": 3}}, r"task\.parameters"),
        ({"name": "gcd", "parameters": {"max_value": "x"}}, r"task\.parameters"),
    ],
)
def test_tasks_that_cannot_be_had_are_refused(task: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(TaskConfig.model_validate(task), seed=0, num_held_out=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_epochs_cover_each_row_once_and_no_batch_repeats_one(data: Any, folder: Path) -> None:
    num_train = data.draw(st.integers(1, 12))
    num_held_out = data.draw(st.integers(0, 4))
    count = data.draw(st.integers(1, num_train))
    config = TaskConfig(path=rows_file(folder, num_train + num_held_out))
    source = FileSource(config, data.draw(st.integers(0, 9)), num_held_out)
    num_epochs = 5
    batches = [source.batch(step, count) for step in range(num_epochs * num_train // count + 1)]
    for batch in batches:
        assert len({problem.problem_id for problem in batch}) == count
    ids = [problem.problem_id for batch in batches for problem in batch]
    epochs = [set(ids[n * num_train : (n + 1) * num_train]) for n in range(num_epochs)]
    held_out = {problem.problem_id for problem in source.held_out(num_held_out)}
    everything = {problem.problem_id for problem in read_problems(config)}
    assert all(epoch == everything - held_out for epoch in epochs)
    step = data.draw(st.integers(0, len(batches) - 1))
    assert source.batch(step, count) == batches[step]


def test_extra_problems_are_not_in_the_batch_and_follow_from_step_and_seed(folder: Path) -> None:
    file = TaskConfig(path=rows_file(folder, 20))
    for make in (
        lambda seed: GymSource(TaskConfig(name="chain_sum"), seed),
        lambda seed: FileSource(file, seed, 3),
    ):
        source, again, other = make(1), make(1), make(2)
        extra = source.extra(3, 6, 11)
        seen = [*source.batch(3, 6), *extra, *source.held_out(3)]
        assert len({problem.problem_id for problem in seen}) == 20
        assert again.extra(3, 6, 11) == extra
        assert extra not in (source.extra(4, 6, 11), other.extra(3, 6, 11))
        assert source.extra(3, 6, 0) == []


def test_file_batches_follow_from_step_and_seed(folder: Path) -> None:
    config = TaskConfig(path=rows_file(folder, 50))
    first, second = FileSource(config, 0, 5), FileSource(config, 0, 5)
    late, early = first.batch(40, 7), first.batch(2, 7)
    assert (second.batch(2, 7), second.batch(40, 7)) == (early, late)
    assert FileSource(config, 1, 5).batch(2, 7) != early
    assert [problem.question for problem in first.held_out(5)] == [f"{n}?" for n in range(45, 50)]
    epochs = [[p.problem_id for p in first.batch(step, 45)] for step in (0, 1)]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("num_held_out", "count", "asked", "message"),
    [
        (2, 3, 0, r"sampling\.prompts_per_step: .* at most 2"),
        (4, 1, 4, r"eval\.num_problems"),
        (1, 1, 2, r"eval\.num_problems: .* at most 1"),
    ],
)
def test_files_that_are_too_small_are_refused(
    folder: Path, num_held_out: int, count: int, asked: int, message: str
) -> None:
    config = TaskConfig(path=rows_file(folder, 4))

    def use() -> None:
        source = open_source(config, 0, num_held_out)
        source.batch(0, count)
        source.held_out(asked)

    with pytest.raises(ConfigError, match=message):
        use()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_are_read_in_order(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine{suffix}"
    rows = [
        {"ask": "ä?", "right": 4, "name": 7, "more": [1]},
        {"ask": "ä?", "right": 5, "name": 8, "more": []},
    ]
    config = TaskConfig(path=write_rows(path, rows), question_key="ask", answer_key="right")
    got = read_problems(config)
    assert [(p.problem_id, p.question, p.answer) for p in got] == [
        ("mine/1", "ä?", "4"),
        ("mine/2", "ä?", "5"),
    ]
    named = read_problems(config.model_copy(update={"id_key": "name"}))
    assert [problem.problem_id for problem in named] == ["7", "8"]


def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"question": "?", "answer": 0.5}).encode())
    assert read_problems(TaskConfig(path=str(path)))[0].answer == "0.5"
    path.write_text("\n" + json.dumps(ROW) + "\r\n\n \n")
    (problem,) = read_problems(TaskConfig(path=str(path)))
    assert problem.problem_id == "mine/1"


def line(**columns: Any) -> bytes:
    return json.dumps({**ROW, **columns}).encode() + b"\n"


def table(*rows: dict[str, Any]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
    return sink.getvalue().to_pybytes()


GOOD = line()
GOOD_TABLE = table(ROW, ROW)

REFUSED: list[tuple[str, bytes | None, dict[str, str], str]] = [
    ("none.jsonl", None, {}, r"task\.path: .*none\.jsonl"),
    ("folder", None, {}, r"task\.path: .*folder"),
    ("a.csv", GOOD, {}, r"a\.csv .*give a \.jsonl or \.parquet"),
    ("a.jsonl", b"\n\n", {}, r"a\.jsonl has no problems"),
    ("a.jsonl", GOOD + b'{"question": "\xe4"}\n', {}, r"a\.jsonl, line 2 .*UTF-8"),
    ("a.jsonl", GOOD + b"\n{'question'}\n", {}, r"a\.jsonl, line 3"),
    ("a.jsonl", b"[" * 100_000, {}, r"a\.jsonl, line 1"),
    ("a.jsonl", GOOD + b"[1, 2]\n", {}, r"a\.jsonl, line 2"),
    ("a.jsonl", b'{"problem": "?"}\n', {}, r"task\.question_key to one of: problem"),
    ("a.jsonl", GOOD, {"answer_key": "right"}, r"task\.answer_key to one of"),
    ("a.jsonl", GOOD, {"id_key": "id"}, r"task\.id_key to one of"),
    ("a.jsonl", line(question=5), {}, r"line 1: question"),
    ("a.jsonl", GOOD + line(question=" "), {}, r"line 2: question"),
    ("a.jsonl", line(question="\ud800"), {}, r"line 1: question is not valid Unicode"),
    ("a.jsonl", line(answer=None), {}, r"line 1: answer"),
    ("a.jsonl", line(answer=True), {}, r"line 1: answer"),
    ("a.jsonl", line(answer=float("nan")), {}, r"line 1: answer"),
    ("a.jsonl", line(answer=10**500), {}, r"line 1: answer"),
    ("a.jsonl", line(id=1) + line(id="1"), {"id_key": "id"}, r"line 2: id '1' .* line 1"),
    ("a.jsonl", line(id=None), {"id_key": "id"}, r"line 1: id"),
    ("a.parquet", GOOD, {}, r"a\.parquet"),
    ("a.parquet", GOOD_TABLE[:-20], {}, r"a\.parquet"),
    ("a.parquet", b"PAR1" + bytes(40) + GOOD_TABLE[44:], {}, r"a\.parquet"),
    ("a.parquet", table(ROW, {"question": "?"}), {}, r"row 2: answer"),
    ("a.parquet", GOOD_TABLE, {"question_key": "q"}, r"task\.question_key to one of: question"),
]


@pytest.mark.parametrize(
    ("name", "content", "keys", "message"), REFUSED, ids=[case[3] for case in REFUSED]
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, name: str, content: bytes | None, keys: dict[str, str], message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=message):
        read_problems(TaskConfig.model_validate({"path": str(path), **keys}))


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    names = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    parquet.write_table(names.empty_table(), path)
    with pytest.raises(ConfigError, match=r"empty\.parquet has no problems"):
        read_problems(TaskConfig(path=str(path)))
