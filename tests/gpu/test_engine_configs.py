"""vLLM makes of every GPU recipe the engine that TLT plans for, on each kind of GPU.

vLLM's own platform class decides, without a device (`stand_in`): runner, scheduler, graphs, drafts,
sleep and weight transfer. `make test-gate` takes one kind of GPU.
"""

from pathlib import Path
from typing import Any

import pytest

from gpu.engine_configs import RECIPES, doctor_backends, facts
from gpu.stand_in import GPUS, under

pytestmark = pytest.mark.vllm

SEPARATE = "qwen2_5_32b_math_4nodes"
"""The recipe whose engines share no GPU with the learner."""

Facts = dict[str, Any]
KINDS = [pytest.param(gpu, marks=pytest.mark.gate if gpu == "H100" else ()) for gpu in GPUS]


@pytest.fixture(scope="module", params=KINDS)
def decided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Return what vLLM decides about an engine of each recipe on one kind of GPU."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    found: Facts = under(request.param, facts, str(folder))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_engine_runs_our_classes_on_the_v2_runner(recipe: str, decided: Facts) -> None:
    found = decided[recipe]
    assert found["is_v2"] != found["is_refused"], "vLLM 0.31 has no n-grams on V2; see `worker`"
    assert found["is_async"]
    assert found["scheduler_fits"]
    assert (found["worker"], found["worker_fits"]) == ("AdaptiveGPUWorker", True)
    assert not found["patches_torch"]
    assert found["dtype"] == "torch.bfloat16"
    size, num_gpus = found["tensor_parallel"]
    assert size == num_gpus
    assert found["executor"] == ("mp" if num_gpus > 1 else "uni")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_graphs_and_draft_lengths_are_those_of_the_plan(recipe: str, decided: Facts) -> None:
    found = decided[recipe]
    assert found["graph_mode"] == ("PIECEWISE" if found["is_refused"] else "FULL_AND_PIECEWISE")
    captured, planned = found["graph_sizes"]
    assert captured == planned
    named, wanted = found["schedule"]
    assert [list(entry) for entry in named] == wanted
    assert found["is_dynamic"]
    assert found["drafts"] == wanted[-1][-1] == 7
    assert found["method"] == ("eagle3" if found["has_drafter"] else "ngram_gpu")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_engine_sleeps_and_takes_its_policy_as_placed(recipe: str, decided: Facts) -> None:
    found = decided[recipe]
    assert found["sleeps"] == (recipe != SEPARATE)
    assert found["preserved"] == ["draft.*"]
    backend = ("tlt_nccl", "NcclTransfer") if recipe == SEPARATE else ("tlt_ipc", "IpcTransfer")
    assert (found["backend"], found["receiver"]) == backend


@pytest.mark.parametrize("is_invariant", [True, False])
def test_the_engines_of_the_doctor_find_kernels(is_invariant: bool, tmp_path: Path) -> None:
    """Few attention backends compute float32, and few are batch-invariant."""
    found = under("A100", doctor_backends, str(tmp_path), is_invariant)
    assert all(is_v2 for _, is_v2 in found.values())
    float32 = {name: backend for name, (backend, _) in found.items() if name != "bfloat16"}
    assert set(float32.values()) == {"TRITON_ATTN"}
    assert found["bfloat16"][0] == "FLASH_ATTN"
