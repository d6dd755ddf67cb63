"""Runs that share a node: two containers, and two users. A run that is killed disturbs no other."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from commands import GCD, command, records, started, wait_for_steps
from speed import limit
from tlt.node.shared import remove_abandoned

NAME = "isolated"
"""The name of `run.out` of all runs here: their folders in shared memory begin with it."""
SETTINGS = (
    f"run.out=runs/{NAME} sampling.prompts_per_step=8 sampling.group_size=4 eval.every_steps=0 "
    "checkpoint.every_steps=100 pool.num_engines=1 tlt.enabled=true tlt.min_lease_s=0.1 "
    "tlt.session_s=0.5 tlt.lr=3e-3"
)
OTHER_USER = 12345

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


@dataclass(frozen=True)
class Place:
    """Where runs are started: the command around `tlt`, their user and their folder."""

    name: str
    around: Sequence[str]
    user: int
    home: Path

    @property
    def run(self) -> Path:
        return self.home / "runs" / NAME

    @property
    def log(self) -> Path:
        return self.home / "log"

    def started(self, num_steps: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        settings = f"{SETTINGS} run.num_steps={num_steps} debug.core_group={self.name}"
        words = [*self.around, *command(f"train {GCD} {settings}")]
        names = {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}
        return started(words, self.home, self.log, **names)

    def runs_in_memory(self) -> set[str]:
        """Return the ids of runs of this place's user that have folders in shared memory."""
        folders = Path(f"/dev/shm/tlt-{self.user}").glob(f"{NAME}-*")
        return {path.name.removeprefix(f"{NAME}-").split("-")[0] for path in folders}


CONTAINER = [
    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", '"$@"; exit $?', "sh"),  # as in a container with a small init
]
"""A pid namespace, which dies with the process that made it."""
AS_OTHER = [
    *("setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
"""A user who may read all files, such as Python, and write nobody's."""


def new_place(name: str, policy: Path, tmp_path: Path, around: Sequence[str], user: int) -> Place:
    """Make a folder with the policy's models, on a disk that only this place sees."""
    try:
        subprocess.run([*around, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine does not allow {around[0]}: {error}")
    home = tmp_path / name
    home.mkdir()
    (home / "models").symlink_to(policy / "models")
    os.chown(home, user, user)
    return Place(name, around, user, home)


def driver(process: subprocess.Popen[bytes]) -> psutil.Process:
    """Return the process of `tlt train`, which may be a child of the command around it."""
    outer = psutil.Process(process.pid)
    return next(
        p for p in [outer, *outer.children(recursive=True)] if p.cmdline()[1:3] == ["-m", "tlt"]
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users or containers")
@pytest.mark.parametrize(
    ("mine", "others", "user"),
    [(CONTAINER, CONTAINER, 0), ([], AS_OTHER, OTHER_USER)],
    ids=["containers", "users"],
)
def test_a_run_beside_others_is_undisturbed(
    mine: list[str], others: list[str], user: int, policy: Path, tmp_path: Path
) -> None:
    one = new_place("one", policy, tmp_path, mine, 0)
    other = new_place("other", policy, tmp_path, others, user)
    with one.started(num_steps=10_000) as process:
        wait_for_steps(1, one.run, process)
        held = one.runs_in_memory()
        assert len(held) == 1
        with other.started(num_steps=10_000) as killed:
            wait_for_steps(1, other.run, killed)
            left = other.runs_in_memory() - held
            assert len(left) == 1
            for victim in psutil.Process(killed.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
        (other.home / "runs").rename(other.home / "killed")
        before = len(records(one.run))
        with other.started(num_steps=2) as whole:  # removes what the killed one left
            assert whole.wait(timeout=limit(400)) == 0, other.log.read_text()[-3000:]
        assert not left & other.runs_in_memory()
        assert held <= one.runs_in_memory()
        wait_for_steps(max(before, 2) + 2, one.run, process)
        driver(process).send_signal(signal.SIGTERM)
        assert process.wait(timeout=limit(60)) == 143, one.log.read_text()[-3000:]
    found = [records(place.run) for place in (one, other)]
    assert [record["step"] for record in found[0]] == list(range(1, len(found[0]) + 1))
    assert not any(r["rollout/engine_restarts"] + r["learner/restarts"] for r in found[0])
    for name in ("reward/mean", "learner/grad_norm", "learner/gap_mean"):
        assert [r[name] for r in found[0][:2]] == [r[name] for r in found[1]], name
    remove_abandoned()
    assert not one.runs_in_memory(), "a process of an ended run holds shared memory"
