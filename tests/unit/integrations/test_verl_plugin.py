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


def test_the_trainer_is_registered_when_verl_has_its_trainers(tmp_path: Path) -> None:
    for package in ("verl", "verl/trainer", "verl/trainer/ppo", "verl/trainer/ppo/v1"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "verl/trainer/ppo/v1/__init__.py").write_text('names = ["sync"]\n')
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
