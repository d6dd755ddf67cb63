"""The script for Slurm, with stand-ins for Slurm, Ray and TLT."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tlt.config.load import load_config
from tlt.config.train import TrainConfig

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "cluster" / "slurm.sh"
RECIPE = ROOT / "configs" / "qwen3_32b_math_4nodes.toml"

STAND_INS = {
    # Runs the command here, as one task on some other node would.
    "srun": 'echo "srun $*" >> log\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "ray": 'echo "ray $* [$(wc -c < "$RAY_AUTH_TOKEN_PATH")]" >> log\ntouch joined-$$\n',
    "tlt": """
echo "tlt $* at $RAY_ADDRESS" >> log
if [[ $* == *long* ]]; then
    trap 'echo "tlt ended in time" >> log; exit 143' TERM
    touch running
    while true; do sleep 0.05; done
fi
""",
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which Slurm, Ray and TLT are stand-ins that write to `log`."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}")
        (programs / name).chmod(0o755)
    (programs / "activate").write_text("")
    # Two nodes in all: the head, and one `ray start` for all the others.
    (tmp_path / "ray.py").write_text(
        "from pathlib import Path\n"
        "def init(): pass\n"
        "def nodes(): return [{'Alive': True} for _ in Path().glob('joined-*')]\n"
    )
    return {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
        "HOME": str(tmp_path),
        "TLT_VENV": str(tmp_path / "venv"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "2",
    }


def start(cluster: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        cwd=cluster["HOME"],
        env=cluster,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_slurm_starts_ray_and_then_the_run(cluster: dict[str, str]) -> None:
    job = start(cluster, "run.toml", "--resume")
    printed, _ = job.communicate(timeout=120)
    assert job.returncode == 0, printed
    log = (Path(cluster["HOME"]) / "log").read_text().splitlines()
    head = os.uname().nodename
    rays = [line for line in log if line.startswith("ray ")]
    assert rays[0].startswith("ray start --head --block --port=6379")
    assert rays[1].startswith(f"ray start --block --address={head}:6379")
    assert all(line.endswith("[64]") for line in rays)  # the token is there before Ray is
    assert f"--exclude={head}" in [line for line in log if line.startswith("srun")][1]
    assert log[-1].startswith("tlt train run.toml --resume run.checkpoint_on_term=true")
    assert log[-1].endswith(f"at {head}:6379")
    load_config(TrainConfig, RECIPE, [word for word in log[-1].split() if "=" in word])
    assert not list(Path(cluster["HOME"]).glob(".tlt-ray-token*"))


def test_a_signal_of_slurm_reaches_the_run(cluster: dict[str, str]) -> None:
    job = start(cluster, "long.toml")
    running = Path(cluster["HOME"]) / "running"
    deadline = time.monotonic() + 120
    while not running.exists():
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 143
    assert "tlt ended in time" in (Path(cluster["HOME"]) / "log").read_text()
