"""The entry point for verl: TLT's trainer comes after verl's trainers, and not before."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import tlt.integrations.verl_plugin

import verl
assert not {"torch", "ray", "verl.trainer"} & sys.modules.keys(), "the entry point must be light"

class Import:
    def import_module(name):
        assert name == "tlt.integrations.verl"
        sys.modules["verl.trainer.ppo.v1"].names.append("tlt")

tlt.integrations.verl_plugin.importlib = Import
import verl.trainer.ppo.v1
assert verl.trainer.ppo.v1.names == ["sync", "tlt"], verl.trainer.ppo.v1.names
"""


FAULT = """
import tlt.integrations.verl_plugin

class Import:
    def import_module(name):
        raise ImportError("no such thing")

tlt.integrations.verl_plugin.importlib = Import
import verl.trainer.ppo.v1
assert verl.trainer.ppo.v1.names == ["sync"]
"""


def ran(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program beside a package that looks like verl."""
    for package in ("verl", "verl/trainer", "verl/trainer/ppo", "verl/trainer/ppo/v1"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / "verl/trainer/ppo/v1/__init__.py").write_text('names = ["sync"]\n')
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )


def test_the_trainer_is_registered_when_verl_has_its_trainers(tmp_path: Path) -> None:
    done = ran(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr


def test_verl_starts_although_the_trainer_fails(tmp_path: Path) -> None:
    done = ran(FAULT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "verl does without the trainer 'tlt'" in done.stderr
