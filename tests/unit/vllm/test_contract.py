"""Everything that the plug-in uses of vLLM exists in the CUDA wheel and in the installed vLLM.

The committed contract holds the signatures of the CUDA wheel, which does not run on a machine
without a GPU. All sides are read as sources: nothing is imported, and no engine starts.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from contract.make import CONTRACT, VERSION, differences, read
from contract.sources import Sources
from contract.uses import Found, uses

Read = tuple[dict[str, str], list[str]]
RENEW = "run `python tests/contract/make.py` and read the difference"


@pytest.fixture(scope="module")
def installed() -> Read:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return read(Path(spec.submodule_search_locations[0]).parent)


@pytest.fixture(scope="module")
def contract() -> dict[str, str]:
    content = json.loads(CONTRACT.read_text())
    assert content["vllm"] == VERSION
    assert content["source"].endswith(".whl"), f"not from the CUDA wheel: {RENEW}"
    names: dict[str, str] = content["names"]
    return names


def test_what_is_used_is_in_the_contract_with_its_signature_and_nothing_else(
    installed: Read, contract: dict[str, str]
) -> None:
    assert sorted(installed[0].items() ^ contract.items()) == [], RENEW


def test_our_calls_and_overrides_fit(installed: Read) -> None:
    assert installed[1] == []


def test_the_contract_holds_all_kinds_of_use(contract: dict[str, str]) -> None:
    """One name of each kind that the walk must find."""
    gpu_worker = "vllm.v1.worker.gpu_worker.Worker"
    assert contract[f"{gpu_worker}.sleep"] == "(self, level: int=1) -> None"  # overridden
    assert f"{gpu_worker}.start_draft_weight_update" in contract  # called on self, in a mixin
    patched = "vllm.v1.worker.gpu.spec_decode.eagle.utils._should_share"
    assert contract[patched].startswith("(eagle")
    assert "vllm.v1.core.sched.output.SchedulerOutput.num_spec_tokens_to_schedule" in contract
    assert "vllm.engine.arg_utils.EngineArgs.scheduler_cls" in contract  # a key of our arguments
    assert "$VLLM_CPU_ATTN_SPLIT_KV" in contract


SOURCE = """
class Base:
    def step(self, output, fast=False): ...
    def stop(self): ...
class Runner(Base):
    def __init__(self, config):
        self.batch: Batch = Batch()
class Batch:
    rows: int
def start(runner, *, level=1): ...
"""


def uses_of(folder: Path, ours: str) -> Found:
    """Return what our code, next to a vLLM of the source above, uses of it."""
    vllm, plugin = folder / "vllm", folder / "plugin"
    vllm.mkdir()
    plugin.mkdir()
    (vllm / "__init__.py").write_text("from vllm.engine import Runner")
    (vllm / "engine.py").write_text(SOURCE)
    (plugin / "ours.py").write_text(ours)
    return uses(plugin, Sources(folder))


RUNNER = "from vllm.engine import Runner\n"


@pytest.mark.parametrize(
    ("ours", "fault"),
    [
        ("from vllm.engine import missing", "imports vllm.engine.missing"),
        ("from vllm import engine\nengine.missing()", "uses vllm.engine.missing"),
        ("from vllm.engine import start\nstart(1, depth=2)", "calls start with ['depth']"),
        ("from vllm.engine import start\nstart(1, 2)", "calls start with 2 of 1"),
        ("from vllm.engine import start\nstart()", "calls start without ['runner']"),
        (RUNNER + "r = Runner(1)\nr.batch.columns", "uses 'columns'"),
        (RUNNER + "class R(Runner):\n  def step(self): ...", "step takes"),
        (RUNNER + "class R(Runner):\n  def go(self): super().run()", "uses 'run'"),
    ],
)
def test_what_does_not_fit_is_found(tmp_path: Path, ours: str, fault: str) -> None:
    [found] = uses_of(tmp_path, ours).faults
    assert fault in found


def test_each_difference_from_the_contract_is_named() -> None:
    found = differences({"a": "(x)", "b": "(y)", "d": "(z)"}, {"a": "(x)", "b": "(x)", "c": "(z)"})
    assert [line.split()[0] for line in found] == ["b", "c", "d"]
    assert differences({"a": "(x)"}, {"a": "(x)"}) == []
