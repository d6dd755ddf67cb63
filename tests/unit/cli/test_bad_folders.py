"""Damaged run folders: every command that reads a run names the file, what is wrong, a way out."""

import fcntl
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from called import tlt
from made_up import made_up_folder

LIVE: dict[str, Any] = {
    **{"at_s": 0.0, "num_steps": 4, "what": "step 2", "done": 3, "total": 16, "since_s": 0},
    **{"remaining_s": None, "record": {"step": 1, "reward/mean": 0.5}},
    "workers": {"engine-0": {"state": "generating", "running": 8}},
}


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


DAMAGE: list[tuple[str, Callable[[str], str], str]] = [
    ("metrics.jsonl", line(2, "{"), "line 2"),
    ("metrics.jsonl", line(3, '{"step": 3, "reward/mean": "high"}'), "line 3: reward/mean"),
    ("metrics.jsonl", lambda t: "", "try again"),
    ("lengths.jsonl", line(1, '{"step": 1, "tokens": ["many"]}'), "line 1: 'tokens'"),
    ("timeline.json", lambda t: t.replace('"ph":"B"', '"qh":"B"', 3), "line 2"),
    ("timeline.json", lambda t: re.sub('"E","ts":[0-9]+', '"E","ts":5', t, count=1), "line 2"),
    ("timeline.json", lambda t: "[\n" + t.partition("\n")[2], "line 2"),
    ("config.toml", lambda t: "[", "config.toml"),
    ("config.toml", lambda t: '[sampling]\ngroup_size = "many"', "sampling.group_size = 'many'"),
]


@pytest.mark.parametrize(("name", "change", "says"), DAMAGE)
def test_a_damaged_file_is_named(
    folder: Path, name: str, change: Callable[[str], str], says: str
) -> None:
    (folder / name).write_text(change((folder / name).read_text()))
    code, _, errors = tlt("report", str(folder))
    assert code == 2
    assert says in errors
    assert ";" in errors, "a way out"


@pytest.mark.parametrize("command", ["simulate calibrate", "doctor --run"])
def test_every_reader_of_a_run_names_a_damaged_file(folder: Path, command: str) -> None:
    (folder / "metrics.jsonl").write_text("{\n{\n")
    code, _, errors = tlt(*command.split(), str(folder))
    assert code == 2
    assert "metrics.jsonl, line 1" in errors


def test_what_an_earlier_version_allowed_can_still_be_read(folder: Path) -> None:
    (folder / "config.toml").write_text("[reward]\nnum_workers = 5000\nold_key = 1\n")
    assert tlt("report", str(folder))[0] == 0


def test_names_of_folders_are_only_names(folder: Path) -> None:
    """A path such as "[/]" is a closing tag of rich."""
    odd = folder.parent / "[" / "]"
    odd.parent.mkdir()
    folder.rename(odd)
    for arguments in (("report",), ("doctor", "--run"), ("watch", "--once")):
        code, _, errors = tlt(*arguments, str(odd))
        assert code == 0, errors


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"total": float("nan")}, "total"), ({"record": {"step": "x"}}, "record.step")],
)
def test_a_damaged_live_view_is_named(folder: Path, changed: dict[str, Any], named: str) -> None:
    (folder / "live.json").write_text(json.dumps(LIVE | {"at_s": time.time()} | changed))
    code, _, errors = tlt("watch", "--once", str(folder))
    assert code == 2
    assert f"live.json is damaged ({named}" in errors


def test_a_live_view_without_any_record_is_shown(folder: Path) -> None:
    live = LIVE | {"at_s": time.time(), "record": {"reward/faults": 3}}
    (folder / "live.json").write_text(json.dumps(live))
    code, output, _ = tlt("watch", "--once", str(folder))
    assert code == 0
    assert "no RL step is done yet" in output


def test_watching_waits_for_a_run_that_starts_and_ends_with_it(
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
    code, output, _ = tlt("watch", str(folder))
    assert (code, len(waits)) == (0, 3)
    assert "not in progress" in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("report", "n" * 300), "n/config.toml"),
        (("report", "run", "--pictures", "file"), "file"),
        (("report", "run", "--out", "nowhere/page.html"), "nowhere/page.html"),
        (("simulate", "num_steps=1", "--json", "--out", "file"), "file"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    folder: Path, arguments: tuple[str, ...], named: str
) -> None:
    Path("file").write_text("")
    code, _, errors = tlt(*arguments)
    assert code == 2
    assert f"{named}: " in errors
