"""The entry point for verl: TLT's trainer comes after verl's trainers, and not before."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import tlt.integrations.verl_plugin

import verl
assert not {{"torch", "ray", "verl.trainer"}} & sys.modules.keys(), "the entry point must be light"

class Import:
    def import_module(name):
        assert name == "tlt.integrations.verl"
        {then}

tlt.integrations.verl_plugin.importlib = Import
import verl.trainer.ppo.v1
print(verl.trainer.ppo.v1.names)
"""


@pytest.mark.parametrize(
    ("then", "names", "said"),
    [
        ('sys.modules["verl.trainer.ppo.v1"].names.append("tlt")', ["sync", "tlt"], ""),
        ('raise ImportError("no such thing")', ["sync"], "verl starts without the trainer 'tlt'"),
    ],
)
def test_the_trainer_is_registered_when_verl_has_its_trainers(
    tmp_path: Path, then: str, names: list[str], said: str
) -> None:
    """Beside a package that looks like verl, which starts although TLT's trainer fails."""
    package = tmp_path / "verl" / "trainer" / "ppo" / "v1"
    package.mkdir(parents=True)
    for folder in (tmp_path / "verl", tmp_path / "verl/trainer", package.parent):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text('names = ["sync"]\n')
    command = [sys.executable, "-c", PROGRAM.format(then=then)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(names), done.stderr
    assert said in done.stderr
