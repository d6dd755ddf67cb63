"""verl's own GRPO trainer with TLT in it, in the environment of `make setup-verl`.

The tests of verl's sources need verl alone, without the packages that it depends on.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

found = importlib.util.find_spec("verl")
if found is None or found.origin is None:
    pytest.skip("verl is not installed", allow_module_level=True)

VERL = Path(found.origin).parent
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "verl_grpo.py"
NUM_STEPS = 10

sys.path[:0] = [str(ROOT / "benchmarks")]
verl_steps = importlib.import_module("verl_steps")


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.two_cores
@pytest.mark.timeout(3600)
def test_idle_replicas_train_a_drafter(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("transfer_queue")
    from tlt.drafter.checkpoint import load_drafter

    out = tmp_path / "run"
    more = (f"trainer.save_freq={NUM_STEPS}", f"trainer.rollout_data_dir={out}/rollouts")
    steps = verl_steps.run(model, out, NUM_STEPS, *verl_steps.QUICK, *more)
    assert len(steps) == NUM_STEPS
    assert sum(step["harvest/used_s"] for step in steps) > 0
    assert steps[-1]["tlt/drafter_version"] >= 1, "no better drafter reached the replicas"
    samples = []
    for number in range(1, NUM_STEPS + 1):
        lines = (out / "rollouts" / f"{number}.jsonl").read_text().splitlines()
        assert len(lines) == verl_steps.SAMPLES_PER_STEP
        samples += [json.loads(line)["uid"] for line in lines]
    assert len(set(samples)) == len(samples), "every sample once"
    trained = load_drafter(out / f"global_step_{NUM_STEPS}" / "drafter")
    first = load_drafter(out / "drafter-start")
    assert not trained.fc.weight.equal(first.fc.weight)


# --- with all of verl's packages ------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tlt.models import tiny

    return tiny.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def drafter(model: Path) -> Path:
    from tlt.integrations.training import new_drafter

    return Path(new_drafter(str(model), str(model.with_name("drafter"))))


def part_of_verl(name: str, model: Path, trainer: str, folder: Path, **environment: str) -> Any:
    """Run a part of verl with the example's settings, in a process of its own."""
    pytest.importorskip("transfer_queue")
    pytest.importorskip("datasets")
    spec = importlib.util.spec_from_file_location("verl_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    words = [*example.settings_of_verl(str(model), 1, folder, trainer), *verl_steps.ON_CPU]
    return program(name, words, folder, **environment)


def program(name: str, words: list[str], folder: Path, **environment: str) -> Any:
    """Return the result of a program of `verl_programs`."""
    (folder / "settings.json").write_text(json.dumps(words))
    done = subprocess.run(
        [sys.executable, str(HERE / "verl_programs.py"), name, str(folder / "settings.json")],
        capture_output=True,
        text=True,
        env=verl_steps.on_cpu() | environment,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_verl_loads_the_entry_point_and_builds_the_trainer(
    model: Path, drafter: Path, tmp_path: Path
) -> None:
    found = part_of_verl("trainer", model, "tlt", tmp_path, TLT_CONFIG=f"drafter={drafter}")
    assert found["class"] == "PPOTrainerTLT"
    assert found["buffer"] == "ReplayBuffer", "the one of the synchronous trainer"
    assert found["engine_kwargs"]["worker_extension_cls"].endswith(".WorkerExtension")
    assert found["engine_kwargs"]["distributed_executor_backend"] == "uni"


def test_verls_replicas_start_with_tlt(model: Path, drafter: Path, tmp_path: Path) -> None:
    found = part_of_verl("replica", model, "sync", tmp_path, TLT_CONFIG=f"drafter={drafter}")
    assert "AdaptiveScheduler" in found["scheduler"]
    assert "AdaptiveCPUWorker" in found["worker"]
    assert found["extension"].startswith("verl."), "the extension of verl stays"
    assert found["method"] == "eagle3"
    assert (found["load_format"], found["draft_load_format"]) == ("dummy", "auto")
    assert found["logprobs_mode"] == "processed_logprobs"


def test_verls_replicas_are_its_own_without_the_variable(model: Path, tmp_path: Path) -> None:
    found = part_of_verl("replica", model, "sync", tmp_path, TLT_CONFIG="")
    assert "Adaptive" not in found["scheduler"] + found["worker"]
    assert not found["tlt"]
    assert found["method"] is None


def test_the_worker_extension_tells_of_policies_and_keeps_their_embedding_and_head(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transfer_queue")
    found = program("extension", [str(tmp_path / "tlt-policy" / "policy.safetensors")], tmp_path)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert found["heard"] == [embedding, head, "other", "policy changed"]
    assert found["again"]
    assert found["embed_and_head"] == {embedding: [0.0, 0.0], head: [1.0, 1.0]}


# --- what TLT relies on, in verl's sources --------------------------------------------------------


def methods(file: str, name: str) -> dict[str, str]:
    """Return the source of every method of a class."""
    text = (VERL / file).read_text()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    (found,) = [node for node in classes if node.name == name]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {f.name: ast.unparse(f) for f in found.body if isinstance(f, functions)}


def test_the_worker_extension_fits_tlts_worker() -> None:
    """vLLM refuses an extension with an attribute that the worker has."""
    theirs = methods("workers/rollout/vllm_rollout/utils.py", "vLLMColocateWorkerExtension")
    assert theirs["_update_weights"].startswith("def _update_weights(self, weights:")
    assert "self._update_weights(weights, " in theirs["update_weights_from_ipc"]
    ours = ROOT / "src/tlt/integrations/verl_worker.py"
    (extension,) = [n for n in ast.parse(ours.read_text()).body if isinstance(n, ast.ClassDef)]
    added = {node.name for node in extension.body if isinstance(node, ast.FunctionDef)}
    added |= {ast.unparse(n.target) for n in extension.body if isinstance(n, ast.AnnAssign)}
    assert {"tlt_share_embed_and_head", "_embed_and_head"} <= added
    from tlt.vllm.cpu_worker import AdaptiveCPUWorker

    names = {name for name in {*theirs, *added} if not name.startswith("__")}
    assert not {name for name in names if hasattr(AdaptiveCPUWorker, name)}


def test_vllm_lacks_what_the_asynchronous_trainers_ask_for() -> None:
    """The page says so; when this fails, its limit can go."""
    server = methods("workers/rollout/vllm_rollout/vllm_async_server.py", "vLLMHttpServer")
    assert "wait_for_inflight_requests=False" in server["abort_all_requests"]
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    engine = (Path(vllm.origin).parent / "v1/engine/async_llm.py").read_text()
    assert "wait_for_inflight_requests" not in engine
