"""Problems from datasets of the Hugging Face Hub or from tables, as the .jsonl file of a run.

The library `datasets` (extra `train`) downloads from the Hub, or finds what it downloaded before. A
file on this machine needs no library.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tlt.config.tasks import TaskConfig
from tlt.errors import ConfigError
from tlt.tasks.file import read_problems

Row = Mapping[str, Any]
Extract = Literal["all", "boxed", "hashes"]
"""Which part of a column is the answer: everything, the last \\boxed{}, or the text after ####."""

GSM8K = "openai/gsm8k"
MATH = "EleutherAI/hendrycks_math"
SUBJECTS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra"),
    *("number_theory", "prealgebra", "precalculus"),
)
TABLES = (".jsonl", ".parquet", ".csv")


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a row has its question and its answer."""

    question: str
    answer: str
    extract: Extract = "all"


@dataclass(frozen=True, slots=True)
class Written:
    """What a file of problems holds."""

    path: Path
    num_problems: int
    num_skipped: int
    """Rows without an answer that can be compared."""


# --- rows -----------------------------------------------------------------------------------------


def from_hub(dataset: str, configs: Iterable[str | None], split: str) -> Iterator[Row]:
    """Yield the rows of a dataset's configs, one after the other."""
    load = _loader(dataset)
    for config in configs:
        try:
            rows = load(dataset, config, split=split)
        except Exception as error:  # any error of the network, the Hub or the library
            raise ConfigError(_why(dataset, config, split, error)) from error
        yield from rows


def _loader(dataset: str) -> Callable[..., Iterable[Row]]:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{dataset} comes through the library datasets, which is not installed; run: "
            "pip install 'tlt-rl[train]', or give a file on this machine to `tlt data jsonl`"
        )
    from datasets import load_dataset

    return load_dataset


def _why(dataset: str, config: str | None, split: str, error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if isinstance(error, ValueError) and "split" in str(error).lower():
        return f"{dataset} has no split {split!r} ({said}); e.g. --split train"
    if isinstance(error, ValueError) and "config" in str(error).lower():
        return f"{dataset}: config {config!r} does not fit ({said}); name one with --config"
    if type(error).__name__ == "DatasetNotFoundError" and not _is_offline():
        return (
            f"the Hub shows no dataset {dataset} ({said}); check the spelling, or run `hf auth "
            "login` for a private one"
        )
    elsewhere = (
        f"run the same command where there is a network and copy the file, or run `hf download "
        f"--repo-type dataset {dataset}` there and give a file of it to `tlt data jsonl`"
    )
    if _is_offline():
        return (
            f"HF_HUB_OFFLINE is set, and {dataset} is not in the Hub's cache; "
            f"unset HF_HUB_OFFLINE, or {elsewhere}"
        )
    return f"{dataset} cannot be loaded ({said}); {elsewhere}"


def _is_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def from_file(path: Path, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a table on this machine, with both columns."""
    if path.suffix.lower() == ".csv":
        yield from _from_csv(path)
        return
    config = TaskConfig(path=str(path), question_key=columns.question, answer_key=columns.answer)
    try:
        problems = read_problems(config)
    except ConfigError as error:
        text = str(error).replace("task.path: ", "").replace("task.question_key", "--question")
        raise ConfigError(text.replace("task.answer_key", "--answer")) from error
    for problem in problems:
        if problem.history:
            raise ConfigError(
                f"{path}: {columns.question} of {problem.problem_id} is several messages, and a "
                f"question here is one; give the file itself to a run, as task.path = '{path}'"
            )
        yield {columns.question: problem.question, columns.answer: problem.answer}


def _from_csv(path: Path) -> Iterator[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from csv.DictReader(file)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not CSV in UTF-8 ({error}); save it as one") from error


# --- problems -------------------------------------------------------------------------------------


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{} of a solution; None if there is none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place].strip()
    return None


def after_hashes(text: str) -> str | None:
    """Return what follows the last ####, as GSM8K marks answers, without commas in numbers."""
    _, found, answer = text.rpartition("####")
    return answer.strip().replace(",", "") if found else None


EXTRACTS: dict[Extract, Callable[[str], str | None]] = {
    "all": lambda text: text.strip(),
    "boxed": boxed,
    "hashes": after_hashes,
}


def write_problems(
    rows: Iterable[Row], columns: Columns, out: Path, limit: int | None = None
) -> Written:
    """Write question and answer of every row as one line of JSON, and check the file."""
    if out.exists():
        raise ConfigError(f"--out {out} exists; remove it, or name another file")
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out} should end in .jsonl; e.g. {out.with_suffix('.jsonl')}")
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = out.with_name(f".{out.name}")
    count = skipped = 0
    try:
        with hidden.open("w", encoding="utf-8") as file:
            for row in rows:
                if limit is not None and count == limit:
                    break
                found = _problem(row, columns)
                if found is None:
                    skipped += 1
                    continue
                file.write(json.dumps(found, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise ConfigError(
                f"no row has an answer in {columns.answer!r} that --extract {columns.extract} "
                "finds; try --extract all, or name another column with --answer"
            )
        hidden.rename(out)
    finally:
        hidden.unlink(missing_ok=True)
    read_problems(TaskConfig(path=str(out)))
    return Written(out, count, skipped)


def _problem(row: Row, columns: Columns) -> dict[str, str] | None:
    for option, name in (("--question", columns.question), ("--answer", columns.answer)):
        if name not in row:
            names = ", ".join(str(key) for key in row) or "(none)"
            raise ConfigError(f"no column {name!r}; set {option} to one of: {names}")
    question, answer = row[columns.question], row[columns.answer]
    if not isinstance(question, str) or not question.strip() or answer is None:
        return None
    found = EXTRACTS[columns.extract](str(answer))
    return {"question": question, "answer": found} if found else None
