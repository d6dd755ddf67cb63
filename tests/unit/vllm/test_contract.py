"""Everything that the plug-in uses of vLLM exists in the CUDA wheels and in the installed vLLM.

The committed contracts hold the signatures of the CUDA wheels, which do not run on a machine
without a GPU. All sides are read as sources: nothing is imported, and no engine starts.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from contract.make import BASE, VERSIONS, committed, differences, path_of, read
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
    return committed(BASE)[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_contract_is_of_a_cuda_wheel(version: str) -> None:
    content = json.loads(path_of(version).read_text())
    assert content["vllm"] == version
    assert content["source"].startswith(f"vllm-{version}-"), f"not from the CUDA wheel: {RENEW}"


def test_the_contracts_are_of_the_versions_that_engines_on_gpus_support() -> None:
    pytest.importorskip("torch")
    from tlt.vllm.compat import version_supported

    tried = [f"0.{minor}.0" for minor in range(25, 45)]
    assert [v for v in tried if version_supported(v, on_cpu=False)] == list(VERSIONS)


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


def test_a_contract_is_the_base_and_what_differs() -> None:
    names, known = committed("0.31.0")
    missing = "vllm.v1.worker.gpu.spec_decode.ngram.speculator.NgramGPUSpeculator"
    assert missing in committed(BASE)[0]
    assert missing not in names
    assert [missing in fault for fault in known] == [True]
