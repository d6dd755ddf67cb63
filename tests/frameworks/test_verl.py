"""verl's own GRPO trainer with TLT in it, in the environment of `make setup-verl`."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

verl = pytest.importorskip("verl")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "verl_grpo.py"
NUM_STEPS = 10
SAMPLES_PER_STEP = 16
CPU = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine is registered for this name only
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ROLLOUT = "actor_rollout_ref.rollout"
ON_CPU = [
    *("trainer.device=cpu", "trainer.n_gpus_per_node=2"),
    *("+ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=16"),
    "+ray_kwargs.ray_init.include_dashboard=false",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    *("actor_rollout_ref.model.use_remove_padding=false", "data.filter_overlong_prompts=false"),
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    *("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.use_torch_compile=false"),
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    *(f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.max_num_seqs=16"),
    *(f"{ROLLOUT}.free_cache_engine=false", f"+{ROLLOUT}.enable_sleep_mode=false"),
    *(f"{ROLLOUT}.max_model_len=640", f"{ROLLOUT}.agent.num_workers=1", "reward.num_workers=1"),
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=64",
    f"+{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",
    f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={2**28}",
]
"""Settings of verl for two replicas on CPU cores."""


def run(model: Path, out: Path, *more: str) -> str:
    """Run the example, and return what it printed."""
    environment = dict(os.environ) | CPU
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLE), str(model), "--out", str(out), *more),
            *("--steps", str(NUM_STEPS), *ON_CPU, f"trainer.rollout_data_dir={out}/rollouts"),
        ],
        capture_output=True,
        text=True,
        timeout=3600,
        env=environment,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout + done.stderr


def steps_of(text: str) -> list[dict[str, float]]:
    """Return the metrics of every RL step that verl printed."""
    lines = re.findall(r"step:\d+ - .*", text)
    pairs = [re.findall(r"(\S+):(-?[\d.]+(?:e[-+]?\d+)?)(?: - |$)", line) for line in lines]
    return [{name: float(value) for name, value in found} for found in pairs]


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.two_cores
def test_idle_replicas_train_a_drafter(tmp_path: Path) -> None:
    from tlt.drafter.checkpoint import load_drafter
    from tlt.models import tiny

    model = tiny.make(tmp_path / "tiny")
    out = tmp_path / "run"
    quick = ("+tlt.session_s=2", "+tlt.min_lease_s=0", f"trainer.save_freq={NUM_STEPS}")
    steps = steps_of(run(model, out, *quick))
    assert len(steps) == NUM_STEPS
    assert sum(step["harvest/used_s"] for step in steps) > 0
    assert steps[-1]["tlt/drafter_version"] >= 1, "no better drafter reached the replicas"
    for number in range(1, NUM_STEPS + 1):
        lines = (out / "rollouts" / f"{number}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == SAMPLES_PER_STEP, "every sample once"
        prompts = [sample["input"] for sample in samples]
        assert {prompts.count(prompt) for prompt in prompts} == {4}
    trained = load_drafter(out / f"global_step_{NUM_STEPS}" / "drafter")
    first = load_drafter(out / "drafter-start")
    assert not trained.fc.weight.equal(first.fc.weight)


# --- what TLT relies on, in verl's sources --------------------------------------------------------


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_verl_loads_the_entry_point_and_knows_the_trainer() -> None:
    program = (
        "from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls\n"
        "assert issubclass(get_trainer_cls('tlt'), PPOTrainerSync)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_hooks_of_the_trainer_are_there() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    for hook in ("on_init_end", "on_sample_begin", "on_sample_end", "on_step_end"):
        assert parameters(getattr(PPOTrainerSync, hook)) == ["self"]
        assert f"self.{hook}()" in inspect.getsource(PPOTrainer)
    assert "_pending_sync_metrics" in inspect.getsource(PPOTrainer._consume_sync_metrics)
    assert "global_step_{self.global_steps}" in inspect.getsource(PPOTrainer._save_checkpoint)
    # Replicas exist before the first weight sync, and the loop ends without `on_train_end`.
    setup = inspect.getsource(PPOTrainer.init)
    assert setup.index("self._setup()") < setup.index("self.on_init_end()")


def test_the_load_of_replicas_can_be_seen() -> None:
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    balancer = GlobalRequestLoadBalancer({"a": "first", "b": "second"})
    name, _ = balancer.acquire_server("request")
    assert balancer.get_status()["servers"] == {"a": 0, "b": 0} | {name: 1}
    balancer.release_server(name)
    assert balancer.get_status()["servers"] == {"a": 0, "b": 0}
    source = inspect.getsource(LLMServerManager)
    for attribute in ("server_handles", "server_addresses", "global_load_balancer"):
        assert f"self.{attribute} = " in source


def test_the_worker_extension_fits_tlts_worker() -> None:
    """vLLM refuses an extension with an attribute that the worker has."""
    from tlt.integrations.verl_worker import WorkerExtension
    from tlt.rollout.vllm.cpu_worker import AdaptiveCPUWorker

    own = {name for name in dir(WorkerExtension) if not name.startswith("__")}
    assert not {name for name in own if hasattr(AdaptiveCPUWorker, name)}
    assert parameters(WorkerExtension.__mro__[1]._update_weights)[:2] == ["self", "weights"]
    assert "self._update_weights(" in inspect.getsource(
        WorkerExtension.__mro__[1].update_weights_from_ipc
    )


def test_engine_arguments_of_the_user_come_last() -> None:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    launch = inspect.getsource(vLLMHttpServer.launch_server)
    assert launch.index('"worker_extension_cls"') < launch.index("**engine_kwargs,")
    assert {"method", "args"} <= {*parameters(vLLMHttpServer.collective_rpc)}


def test_the_settings_on_the_page_exist() -> None:
    from omegaconf import OmegaConf

    folder = Path(verl.__file__).parent / "trainer" / "config"
    config = OmegaConf.load(folder / "_generated_ppo_trainer.yaml")
    page = (ROOT / "docs" / "verl.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    keys = {key for row in rows for key in re.findall(r"`([a-z_.\d]+)`", row) if "." in key}
    assert len(keys) > 30
    missing = object()
    assert not [key for key in keys if OmegaConf.select(config, key, default=missing) is missing]
