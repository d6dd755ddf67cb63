"""`tlt data`: problems of datasets as a run's file, and what it says without a network."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from called import tlt

from tlt.errors import ConfigError
from tlt.tasks import datasets
from tlt.tasks.datasets import Columns, after_hashes, boxed, write_problems

LOADER = datasets._loader
HUB: dict[tuple[str, str | None], list[dict[str, Any]]] = {
    ("openai/gsm8k", "main"): [
        {"question": "2 boxes of 500?", "answer": "2 * 500 = <<2*500=1000>>1000\n#### 1,000"},
        {"question": "no mark?", "answer": "it is 7"},
    ],
    ("owner/set", None): [{"q": "1 + 1?", "a": 2, "other": None}],
}
HUB |= {
    ("EleutherAI/hendrycks_math", subject): [
        {"problem": f"{subject}?", "solution": r"So $\boxed{\frac{1}{2}}$.", "level": "Level 1"}
    ]
    for subject in datasets.SUBJECTS
}


def load(dataset: str, config: str | None, split: str) -> list[dict[str, Any]]:
    if split not in ("train", "test"):
        raise ValueError(f"Unknown split \"{split}\". Should be one of ['train', 'test'].")
    return HUB[dataset, config]


@pytest.fixture(autouse=True)
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "_loader", lambda dataset: load)


def rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_gsm8k_has_bare_numbers(tmp_path: Path) -> None:
    code, output, errors = tlt("data", "gsm8k")
    assert code == 0, errors
    assert "1 problems, 1 left out without an answer" in output
    assert rows("data/gsm8k-train.jsonl") == [{"question": "2 boxes of 500?", "answer": "1000"}]


def test_math_has_boxes_of_its_subjects_up_to_the_limit() -> None:
    code, output, _ = tlt("data", "math", "--split", "test", "--limit", "3", "--json")
    assert code == 0
    assert json.loads(output) == {"path": "data/math-test.jsonl", "problems": 3, "left_out": 0}
    found = rows("data/math-test.jsonl")
    assert {row["answer"] for row in found} == {r"\frac{1}{2}"}
    assert found[0]["question"] == "algebra?"


def test_any_dataset_by_its_columns() -> None:
    code, _, errors = tlt("data", "jsonl", "owner/set", "--question", "q", "--answer", "a")
    assert code == 0, errors
    assert rows("data/set-train.jsonl") == [{"question": "1 + 1?", "answer": "2"}]


def test_a_table_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_loader", failing(Elsewhere("not asked for")))
    Path("a.csv").write_text("problem,answer\n1 + 1?,2\n")
    Path("a.jsonl").write_text('{"problem": "1 + 1?", "answer": 2}\n')
    for path in ("a.csv", "a.jsonl"):
        out = f"{path}.jsonl"
        code, _, errors = tlt("data", "jsonl", path, "--question", "problem", "--out", out)
        assert code == 0, errors
        assert rows(out) == [{"question": "1 + 1?", "answer": "2"}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gsm8k", "--split", "dev"], "'dev'"),
        (["gsm8k", "--out", "x.txt"], "e.g. x.jsonl"),
        (["gsm8k", "--out", "there.jsonl"], "there.jsonl"),
        (["jsonl", "owner/set"], "--question to one of: q, a, other"),
        (["jsonl", "none.csv"], "none.csv"),
        (["jsonl", "words"], "e.g. openai/gsm8k"),
        (["jsonl", "."], ".parquet"),
        (["jsonl", "bad.jsonl"], "bad.jsonl, line 1"),
        (["jsonl", "latin.csv"], "UTF-8"),
        (["jsonl", "owner/set", "--question", "q", "--answer", "other"], "answer"),
    ],
)
def test_mistakes_are_refused_with_a_way_out(arguments: list[str], words: str) -> None:
    Path("there.jsonl").write_text("")
    Path("bad.jsonl").write_text("{\n")
    Path("latin.csv").write_bytes("question,answer\nü,1\n".encode("latin-1"))
    code, _, errors = tlt("data", *arguments)
    assert code == 2
    assert words in " ".join(errors.split())
    assert not list(Path().glob("**/.*.jsonl"))


class Elsewhere(Exception):
    """What the library raises without a network."""


class DatasetNotFoundError(FileNotFoundError):
    """As the library calls it."""


def failing(error: Exception) -> Callable[[str], Callable[..., Any]]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return lambda dataset: fail


@pytest.mark.parametrize(
    ("offline", "error", "words"),
    [
        ("1", DatasetNotFoundError("not in cache"), "HF_HUB_OFFLINE"),
        ("", Elsewhere("Name or service not known"), "Name or service not known"),
        ("", DatasetNotFoundError("doesn't exist"), "openai/gsm8k"),
    ],
)
def test_without_a_network_the_message_teaches(
    offline: str, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets, "_loader", failing(error))
    code, _, errors = tlt("data", "gsm8k")
    assert code == 2
    text = " ".join(errors.split())
    assert words in text
    assert "hf download --repo-type dataset openai/gsm8k" in text or "hf auth login" in text
    assert not Path("data/gsm8k-train.jsonl").exists()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.tasks.datasets.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tlt-rl\[train\]'"):
        LOADER("openai/gsm8k")


def test_the_last_box_and_the_last_hashes_count() -> None:
    assert boxed(r"$\boxed{1}$ and then $\boxed{\frac{a}{b}}$.") == r"\frac{a}{b}"
    assert boxed(r"\fbox{ 3 }") == "3"
    assert boxed(r"\boxed{1") is None
    assert after_hashes("x #### 1 #### 12,345 ") == "12345"
    assert after_hashes("12") is None


def test_a_file_that_fails_halfway_is_not_left(tmp_path: Path) -> None:
    def broken() -> Any:
        yield {"question": "1?", "answer": "1"}
        raise ConfigError("the network ended")

    with pytest.raises(ConfigError, match="the network ended"):
        write_problems(broken(), Columns("question", "answer"), tmp_path / "a.jsonl")
    assert list(tmp_path.glob("*a.jsonl")) == []
