"""Damaged run folders: every command that reads a run names the file, what is wrong, a way out."""

import contextlib
import fcntl
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import made_up_folder

from tlt.cli.main import run

LIVE: dict[str, Any] = {
    **{"at_s": 0.0, "num_steps": 4, "what": "step 2", "done": 3, "total": 16, "since_s": 0},
    **{"remaining_s": None, "record": {"step": 1, "reward/mean": 0.5}},
    "workers": {"engine-0": {"state": "generating", "running": 8}},
}


def tlt(*arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and all that it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            run(list(arguments))
        except SystemExit as end:
            code = end.code
    return int(code or 0), said.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return made_up_folder(tmp_path / "run")


def line(number: int, text: str) -> Callable[[str], str]:
    """Replace a line."""

    def change(content: str) -> str:
        lines = content.splitlines(keepends=True)
        return "".join([*lines[: number - 1], text + "\n", *lines[number:]])

    return change


DAMAGE: list[tuple[str, str, Callable[[str], str], str]] = [
    ("a garbled line", "metrics.jsonl", line(2, "{"), r"metrics\.jsonl, line 2 is not .*; remove"),
    (
        "a text for a metric",
        "metrics.jsonl",
        line(3, '{"step": 3, "reward/mean": "high"}'),
        r"metrics\.jsonl, line 3: reward/mean is 'high', which no run writes; remove the line",
    ),
    ("no metrics", "metrics.jsonl", lambda t: "", r"run has not finished a step yet; try again"),
    (
        "lengths in words",
        "lengths.jsonl",
        line(1, '{"step": 1, "tokens": ["many"]}'),
        r"lengths\.jsonl, line 1: 'tokens' is no list .*; remove the line",
    ),
    (
        "a damaged event",
        "timeline.json",
        lambda t: t.replace('"ph":"B"', '"qh":"B"', 3),
        r"timeline\.json, line 2 is damaged; remove the file",
    ),
    (
        "a span that ends before it begins",
        "timeline.json",
        lambda t: re.sub(r'"ph":"E","ts":\d+', '"ph":"E","ts":5', t, count=1),
        r"timeline\.json, line 2 is damaged; remove the file",
    ),
    (
        "no names of rows",
        "timeline.json",
        lambda t: "[\n" + t.partition("\n")[2],
        r"timeline\.json, line 2 is damaged; remove the file",
    ),
    ("settings that are no TOML", "config.toml", lambda t: "[", r"config\.toml is not valid TOML"),
    (
        "a setting in words",
        "config.toml",
        lambda t: '[sampling]\ngroup_size = "many"',
        r"config\.toml: sampling\.group_size = 'many' should be .*; e\.g\. 8",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE]
)
def test_a_damaged_file_is_named(
    folder: Path, name: str, change: Callable[[str], str], message: str
) -> None:
    (folder / name).write_text(change((folder / name).read_text()))
    code, said = tlt("report", str(folder))
    assert code == 2
    assert re.search(rf"^error: .*{message}", said), said


@pytest.mark.parametrize("command", ["calibrate", "doctor --run"])
def test_every_reader_of_a_run_names_a_damaged_file(folder: Path, command: str) -> None:
    (folder / "metrics.jsonl").write_text("{\n{\n")
    code, said = tlt(*command.split(), str(folder))
    assert code == 2
    assert "metrics.jsonl, line 1" in said


def test_what_an_earlier_version_allowed_can_still_be_read(folder: Path) -> None:
    (folder / "config.toml").write_text("[reward]\nnum_workers = 5000\nold_key = 1\n")
    assert tlt("report", str(folder))[0] == 0


@pytest.mark.parametrize("name", ["[bold]", "r\\un", "[/x]"])
def test_names_of_folders_are_only_names(tmp_path: Path, name: str) -> None:
    named = made_up_folder(tmp_path / "made").rename(tmp_path / name.replace("/", "_"))
    odd = tmp_path / "[" / "]" if "/" in name else named
    if odd != named:
        odd.parent.mkdir()
        named.rename(odd)  # a path such as "[/]" is a closing tag of rich
    for arguments in (("report",), ("doctor", "--run"), ("watch", "--once")):
        code, said = tlt(*arguments, str(odd))
        assert code == 0, said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workers": 3}, "workers"),
        ({"total": float("nan")}, "total"),
        ({"record": {"step": "x"}}, r"record\.step"),
    ],
)
def test_a_damaged_live_view_is_named(folder: Path, changed: dict[str, Any], message: str) -> None:
    (folder / "live.json").write_text(json.dumps(LIVE | {"at_s": time.time()} | changed))
    code, said = tlt("watch", "--once", str(folder))
    assert code == 2
    assert re.search(rf"live\.json is damaged \({message}.*\); a run that lives", said), said


def test_a_live_view_without_any_record_is_shown(folder: Path) -> None:
    live = LIVE | {"at_s": time.time(), "record": {"reward/faults": 3}}
    (folder / "live.json").write_text(json.dumps(live))
    code, said = tlt("watch", "--once", str(folder))
    assert code == 0
    assert "no RL step is done yet" in said


def test_watching_a_run_that_was_killed_ends(folder: Path) -> None:
    code, said = tlt("watch", str(folder))
    assert code == 0
    assert "not in progress" in said


def test_watching_waits_for_a_run_that_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = (folder / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            lock.close()

    monkeypatch.setattr("tlt.cli.watch.time.sleep", sleep)
    code, said = tlt("watch", str(folder))
    assert (code, len(waits)) == (0, 3)
    assert "not in progress" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "n" * 300),
        ("report", "run", "--pictures", "file"),
        ("report", "run", "--out", "nowhere/page.html"),
        ("simulate", "num_steps=1", "--json", "--out", "file"),
    ],
)
def test_files_that_cannot_be_used_are_named(folder: Path, arguments: tuple[str, ...]) -> None:
    Path("file").write_text("")
    code, said = tlt(*arguments)
    assert code == 2
    named = r"^error: (n{300}/config\.toml|file|nowhere/page\.html): [A-Z].*; name another"
    assert re.search(named, said, re.MULTILINE), said
