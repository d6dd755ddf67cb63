"""The switch takes the arguments that OpenRLHF and SkyRL hand to vLLM, by their released sources.

The wheels are downloaded and read; nothing of them is installed or run. prime-rl has no release.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tlt.vllm.args import arguments
from tlt.vllm.switch import wire

RELEASES = {"openrlhf": "0.11.2", "skyrl": "0.3.0"}
ENGINES = "openrlhf/trainer/ray/vllm_engine.py"
SERVERS = "skyrl/backends/skyrl_train/inference_servers"
OF_THE_ACTOR = {
    *("full_determinism", "bundle_indices", "num_gpus", "agent_func_path", "remote_rm_url"),
    "mm_pad_token_ids",
}
"""Arguments of OpenRLHF's actor that it does not hand to vLLM."""
GIVEN: dict[str, Any] = {"bool": True, "int": 1, "float": 0.5, "str": "x", "dict[str, Any]": {}}
"""Values for the arguments that the frameworks fill in, by vLLM's types."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    pins = [f"{name}=={version}" for name, version in RELEASES.items()]
    if subprocess.run([*pip, *pins], check=False).returncode:
        pytest.skip("no network, or the releases are gone")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py"):
                    _, _, inner = name.rpartition(".data/purelib/")
                    path = folder / inner
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(name))
    return folder


def keys_of(file: Path, name: str) -> set[str]:
    """Return the keys of a dict that a file assigns to a name, as a literal or by `dict(...)`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == name for t in node.targets):
            if isinstance(node.value, ast.Dict):
                return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
            if isinstance(node.value, ast.Call):
                return {word.arg for word in node.value.keywords if word.arg}
    raise AssertionError(f"{file.name} assigns no dict to {name}")


def wired(keys: set[str]) -> dict[str, Any]:
    """Return what the switch changes in an engine on a GPU that is given these arguments."""
    known = arguments()
    assert known is not None
    assert keys <= known.keys(), "vLLM does not have all of them"
    given = {key: GIVEN.get(known[key].removesuffix(" | None"), object()) for key in keys}
    found = wire("strategy.kind=adaptive", given, True, lambda: "generate")
    assert found is not None
    return dict(found.changes)


def test_openrlhf_hands_vllm_nothing_that_the_switch_refuses(sources: Path) -> None:
    keys = keys_of(sources / ENGINES, "actor_kwargs")
    assert keys >= {"worker_extension_cls", "enable_sleep_mode", *OF_THE_ACTOR} - {
        *("agent_func_path", "remote_rm_url", "mm_pad_token_ids")  # a later update adds them
    }
    changes = wired(keys - OF_THE_ACTOR)
    assert "worker_extension_cls" not in changes
    assert changes["worker_cls"].startswith("tlt.")


def test_skyrl_hands_vllm_nothing_that_the_switch_refuses(sources: Path) -> None:
    utils = sources / SERVERS / "utils.py"
    keys = keys_of(utils, "overrides")
    assert keys >= {"worker_extension_cls", "weight_transfer_config", "generation_config"}
    changes = wired(keys - {"served_model_name"})
    assert not {"worker_extension_cls", "weight_transfer_config"} & changes.keys()
    assert "setattr(args, key, value)" in utils.read_text(), "engine_init_kwargs override the rest"
