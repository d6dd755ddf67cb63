"""Folders in shared memory: who may use them, who removes them, and what is planted there."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tlt.errors import ConfigError
from tlt.node.shared import (
    RUN_ID,
    SharedFolder,
    begin_run,
    open_file,
    remove_abandoned,
    run_environment,
    user_folder,
)

IMPORTS = """
import sys
from pathlib import Path
from tlt.node.shared import SharedFolder, remove_abandoned
"""
HOLD = f"""{IMPORTS}
folder = SharedFolder.make("weights", Path(sys.argv[1]))
print(folder.path, flush=True)
sys.stdin.read()
"""
CLEAN = f"{IMPORTS}print(remove_abandoned(Path(sys.argv[1])))"


@contextmanager
def holder(memory: Path, *prefix: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Start a process that holds a folder until it is killed, or its standard input closes."""
    command = [*prefix, sys.executable, "-c", HOLD, str(memory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process


def names(memory: Path) -> set[str]:
    return {path.name for path in user_folder(memory).iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_private_and_named_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_ID, "")  # restored afterwards
    assert begin_run("runs/first") != begin_run("runs/first")
    run = begin_run(str(tmp_path / "my run"))
    assert run.startswith("my-run-")
    assert run_environment() == {RUN_ID: run}
    user_folder(tmp_path).mkdir(mode=0o755)
    folder = SharedFolder.make("weights", tmp_path)
    assert folder.path.parent == user_folder(tmp_path) == tmp_path / f"tlt-{os.geteuid()}"
    assert folder.path.name.startswith(f"{run}-weights-")
    assert mode(folder.path) == mode(user_folder(tmp_path)) == 0o700
    folder.remove()
    assert names(tmp_path) == set()


def test_a_folder_stays_while_anybody_holds_it(tmp_path: Path) -> None:
    writer = SharedFolder.make("weights", tmp_path)
    adopter = SharedFolder.join(writer.path, must_exist=True)
    path = writer.path
    del writer
    assert remove_abandoned(tmp_path) == 0
    assert path.exists()
    del adopter
    assert remove_abandoned(tmp_path) == 1
    assert not path.exists()


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as (path, process):
        assert remove_abandoned(tmp_path) == 0
        process.kill()
    assert path.exists()
    SharedFolder.make("samples", tmp_path).remove()  # whoever makes a folder removes abandoned ones
    assert not path.exists()


def own_pid_namespace() -> list[str]:
    """Return the command that starts another one in a pid namespace of its own."""
    for way in (["--pid", "--fork"], ["--user", "--map-current-user", "--pid", "--fork"]):
        try:
            subprocess.run(["unshare", *way, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return ["unshare", *way]
    pytest.skip("this machine allows no pid namespaces")


def test_containers_do_not_remove_what_the_other_one_uses(tmp_path: Path) -> None:
    """Two pid namespaces that share memory: neither sees the other's process ids."""
    contained = own_pid_namespace()
    mine = SharedFolder.make("weights", tmp_path)
    with holder(tmp_path, *contained) as (theirs, _):
        assert remove_abandoned(tmp_path) == 0
        clean = [*contained, sys.executable, "-c", CLEAN, str(tmp_path)]
        assert subprocess.run(clean, check=True, capture_output=True, text=True).stdout == "0\n"
        assert names(tmp_path) == {mine.path.name, theirs.name}
    assert remove_abandoned(tmp_path) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_two_users_have_two_folders(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    memory.chmod(0o1777)
    theirs = memory / "tlt-12345" / "first-weights"
    theirs.mkdir(parents=True)
    for path in (theirs.parent, theirs):
        os.chown(path, 12345, 12345)
    mine = SharedFolder.make("weights", memory)
    assert remove_abandoned(memory) == 0
    assert theirs.exists()
    assert mine.path.exists()
    with pytest.raises(ConfigError, match="12345"):
        SharedFolder.join(theirs)
    mine.remove()
    user_folder(memory).rmdir()
    theirs.parent.rename(user_folder(memory))  # prepared by another user
    with pytest.raises(ConfigError, match="12345"):
        SharedFolder.make("weights", memory)


# --- what somebody planted ------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Files that nothing here may touch."""
    folder = tmp_path / "outside" / "inner"
    folder.mkdir(parents=True)
    (folder / "00000001-000001-000002-t-0.sample").write_text("keep")
    (folder / ".hidden").write_text("keep")
    return folder


def untouched(outside: Path) -> bool:
    return sorted(path.read_text() for path in outside.iterdir()) == ["keep", "keep"]


def test_a_link_in_place_of_the_users_folder_is_refused(tmp_path: Path, outside: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    user_folder(memory).symlink_to(outside.parent)
    with pytest.raises(ConfigError):
        remove_abandoned(memory)
    for name, must_exist in (("first-samples", False), ("inner", True)):
        with pytest.raises(ConfigError):
            SharedFolder.join(user_folder(memory) / name, must_exist)
    assert untouched(outside)
    assert [path.name for path in outside.parent.iterdir()] == ["inner"]


def test_links_beside_folders_are_never_followed(tmp_path: Path, outside: Path) -> None:
    folder = SharedFolder.make("samples", tmp_path)
    (user_folder(tmp_path) / "planted").symlink_to(outside)
    (folder.path / "planted").symlink_to(outside)
    with pytest.raises(ConfigError):
        SharedFolder.join(user_folder(tmp_path) / "planted")
    del folder
    assert remove_abandoned(tmp_path) == 1
    assert untouched(outside)


def test_a_file_that_is_a_link_is_not_opened(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "weights").symlink_to(outside / ".hidden")
    for how in ("rb", "ab", "xb"):
        with pytest.raises(OSError):
            open_file(tmp_path / "weights", how)
    assert untouched(outside)


def test_a_folder_that_all_users_can_change_holds_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"chmod \+t"):
        SharedFolder.join(tmp_path / "open" / "samples")
