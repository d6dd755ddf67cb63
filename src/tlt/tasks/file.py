"""Read problems from a user's .jsonl or .parquet file, one per row.

All rows are checked before a run starts. An error message names the file and the row at fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tlt.config.load import shown
from tlt.config.tasks import TaskConfig
from tlt.errors import ConfigError
from tlt.tasks.gym import Message, Problem

LARGEST = 1e100
"""Numbers below this have a printed form to compare an answer with."""
BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
COLUMNS = {
    "question": ("question", "problem", "prompt", "input", "messages"),
    "answer": ("answer", "final_answer", "target", "output"),
}
"""Names of the columns of a file, the most usual first."""
ROLES = ("system", "user", "assistant")
"""Authors of messages."""
MESSAGES = '[{"role": "user", "content": "What is 2 + 2?"}]'

Row = tuple[str, Mapping[str, Any]]
"""The row's place in the file ("line 3", "row 3"), and its columns."""


def read_problems(config: TaskConfig) -> list[Problem]:
    """Return the problems of `task.path` in the order of the file."""
    assert config.path is not None
    path = Path(config.path)
    try:
        if not path.is_file() or path.suffix.lower() not in READERS:
            wrong = "is not a file of problems" if path.exists() else "does not exist"
            raise ConfigError(f"task.path: {path} {wrong}; give a .jsonl or .parquet file")
        made = _problems(path, READERS[path.suffix.lower()](path, config), config)
    except OSError as error:
        raise ConfigError(
            f"task.path: {path} cannot be read ({error.strerror or error}); give a .jsonl or "
            ".parquet file"
        ) from error
    if not made:
        raise ConfigError(f"task.path: {path} has no problems; give one problem per row")
    return made


def _problems(path: Path, rows: Iterable[Row], config: TaskConfig) -> list[Problem]:
    made = []
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(rows, start=1):
        place = f"{path}, {where}"
        problem_id = f"{path.stem}/{number}"
        if config.id_key is not None:
            problem_id = _text(_column(row, "id_key", config.id_key, place), config.id_key, place)
        if problem_id in seen:
            raise ConfigError(
                f"{place}: {config.id_key} {problem_id!r} is also the id of {seen[problem_id]}; "
                "give each row its own, or leave out task.id_key"
            )
        seen[problem_id] = where
        question = _column(row, "question_key", config.question_key, place)
        *history, question = _messages(question, config.question_key, place)
        made.append(
            Problem(
                problem_id=problem_id,
                question=question["content"],
                answer=_text(
                    _column(row, "answer_key", config.answer_key, place), config.answer_key, place
                ),
                entry=dict(row),
                history=tuple(history),
            )
        )
    return made


def _messages(question: Any, name: str, place: str) -> list[Message]:
    """Return the messages of a question, which is a text or a list of messages."""
    if isinstance(question, str):
        return [{"role": "user", "content": _text(question, name, place)}]
    if not isinstance(question, list) or not question:
        raise ConfigError(
            f"{place}: {name} is {shown(question)}, neither a text nor a list of messages; "
            f'e.g. "What is 2 + 2?" or {MESSAGES}'
        )
    messages = []
    for number, message in enumerate(question, start=1):
        what = f"{name}, message {number}"
        found = message if isinstance(message, dict) else {}
        # Tables fill the keys of other messages with None.
        keys = {key for key, value in found.items() if value is not None}
        if keys != {"role", "content"} or found["role"] not in ROLES:
            raise ConfigError(
                f"{place}: {what} is {shown(message)}, not just a role ({', '.join(ROLES)}) and "
                f"its content; e.g. {MESSAGES}"
            )
        content = _text(found["content"], what, place)
        messages.append({"role": found["role"], "content": content})
    roles = [message["role"] for message in messages]
    if roles[-1] != "user" or "system" in roles[1:]:
        raise ConfigError(
            f"{place}: the messages of {name} are from {', '.join(roles)}; the last one must be "
            f"from user, and only the first one may be from system, e.g. {MESSAGES}"
        )
    return messages


def _column(row: Mapping[str, Any], key: str, name: str, place: str) -> Any:
    if name not in row:
        raise ConfigError(
            f"{place}: no column {name!r}; set task.{key} to one of: {', '.join(row) or '(none)'}"
        )
    return row[name]


def _text(value: Any, name: str, place: str) -> str:
    """Return the value as text; a number becomes its printed form."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f'{place}: {name} is {shown(value)}, not a text with content; e.g. "4"')
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which no tokenizer accepts
        raise ConfigError(
            f"{place}: {name} is not valid Unicode ({error}); write the character itself"
        ) from error
    return value


def _jsonl_rows(path: Path, config: TaskConfig) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path}, line {number}"
            example = f'e.g. {{"{config.question_key}": "2 + 2?", "{config.answer_key}": "4"}}'
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{place} is not UTF-8: {error.reason}; save the file as UTF-8"
                ) from error
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place} is not JSON: {error}; {example}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{place} is {shown(row)}, not an object; {example}")
            yield f"line {number}", row


def _parquet_rows(path: Path, config: TaskConfig) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"task.path: reading {path} needs pyarrow, which is not installed; run: "
            "pip install 'tlt-rl[train]'"
        ) from error

    try:
        with parquet.ParquetFile(path) as file:
            rows = file.read().to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(
            f"task.path: cannot read {path} as parquet: {error}; write it again, or as .jsonl"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def task_of(data: str, option: str = "--data") -> dict[str, Any]:
    """Return the `task` and `reward` sections for a file of problems or a task's name.

    Errors name the option that gave it.
    """
    path = Path(data)
    if path.suffix.lower() not in READERS:
        if path.exists() or "/" in data:
            raise ConfigError(
                f"{option} {data} is not a file of problems; give a .jsonl or .parquet file, which "
                "`tlt data` writes, or the name of a reasoning-gym task such as gcd"
            )
        return {"task": {"name": data}, "reward": {"function": "exact"}}
    task: dict[str, Any] = {"path": data}
    names = columns(path)
    for key, usual in COLUMNS.items():
        name = next((each for each in usual if each in names), None)
        if name is None and names:
            raise ConfigError(
                f"{option} {data} has no column of the {key}, only {', '.join(sorted(names))}; "
                f"rename one to {key!r}, or run `tlt data jsonl {data} --{key} COLUMN`"
            )
        task[f"{key}_key"] = name or key
    return {"task": task | {"instruction": BOXED}, "reward": {"function": "math"}}


def columns(path: Path) -> list[str]:
    """Return the columns of a file's first row; empty if the check of the run must say why not."""
    try:
        _, row = next(READERS[path.suffix.lower()](path, TaskConfig()))
    except (ConfigError, OSError, StopIteration):
        return []
    return list(row)


READERS = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
