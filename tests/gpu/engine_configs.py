"""The configs that vLLM makes of an engine of each GPU recipe, as plain values.

Runs under `stand_in`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from gpu.stand_in import NUM_GPUS
from model_folders import SHAPES, make

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(
    path.stem for path in CONFIGS.glob("*.toml") if "no GPU was available" in path.read_text()
)
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DOCTORS: dict[str, dict[str, Any]] = {
    "float32": {},
    "sleeps": {"engine_args": {"enable_sleep_mode": True}},
    "two GPUs": {"num_gpus": 2},
    "bfloat16": {"engine_args": {"dtype": "bfloat16", "enforce_eager": False}},
}
"""Engines of the checks of `tlt doctor --gpu`."""
PATCHES_TORCH = "vllm.v1.worker.cpu.shm"
"""vLLM's module that patches torch for a machine without a GPU."""


def engine_of(recipe: str, folder: Path) -> tuple[Any, bool]:
    """Return an engine's settings as `tlt train` makes them, and whether it has a drafter.

    The drafter's folder has a config like that of the drafter which the run makes first.
    """
    from tlt.config.load import load_config
    from tlt.config.train import TrainConfig, resolve_defaults
    from tlt.train.preflight import engine_config

    name = recipe.partition("_math")[0]
    model = folder / name
    if not model.exists():
        model.mkdir()
        make(name, model)
        said = SHAPES[name] | {
            "architectures": [ARCHITECTURES[SHAPES[name]["model_type"]]],
            "dtype": "bfloat16",
            "rms_norm_eps": 1e-6,
        }
        (model / "config.json").write_text(json.dumps(said))
    overrides = [f"policy.model={model}"]
    config = resolve_defaults(load_config(TrainConfig, CONFIGS / f"{recipe}.toml", overrides))
    engine, _ = engine_config(config, json.loads((model / "config.json").read_text()))
    if config.tlt.harvests and engine.drafter is None:
        drafter = folder / f"{name}-drafter"
        _describe_drafter(model, drafter, "bfloat16")
        engine = engine.model_copy(update={"drafter": str(drafter)})
    return engine, engine.drafter is not None


def _describe_drafter(model: Path, drafter: Path, dtype: str) -> None:
    """Write the config of a new drafter of this model, without weights."""
    from transformers import AutoConfig

    from tlt.drafter.eagle3.config import Eagle3Config

    drafter.mkdir(exist_ok=True)
    shape = Eagle3Config.for_target(AutoConfig.from_pretrained(model))
    (drafter / "config.json").write_text(json.dumps(shape.to_hf(dtype)))


def facts(folder: str) -> dict[str, dict[str, Any]]:
    """Return what vLLM decides about an engine of each recipe."""
    return {recipe: _facts(*engine_of(recipe, Path(folder))) for recipe in RECIPES}


def _facts(engine: Any, has_drafter: bool) -> dict[str, Any]:
    from vllm import EngineArgs
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.worker.gpu_worker import Worker

    from tlt.vllm import compat, plugin
    from tlt.vllm.args import engine_args, graph_plan

    plugin.register()
    config = EngineArgs(**engine_args(engine)).create_engine_config()
    plan = graph_plan(engine)
    assert plan is not None
    graphs, speculative = config.compilation_config, config.speculative_config
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    backend = config.weight_transfer_config.backend
    return {
        "has_drafter": has_drafter,
        "is_refused": not has_drafter and not compat.counts_drafts(),
        "is_v2": config.use_v2_model_runner,
        "is_async": config.scheduler_config.async_scheduling,
        "scheduler_fits": issubclass(config.scheduler_config.get_scheduler_cls(), AsyncScheduler),
        "worker": worker.__name__,
        "worker_fits": issubclass(worker, Worker),
        "patches_torch": PATCHES_TORCH in sys.modules,
        "executor": config.parallel_config.distributed_executor_backend,
        "tensor_parallel": (config.parallel_config.tensor_parallel_size, engine.num_gpus),
        "graph_mode": graphs.cudagraph_mode.name,
        "graph_sizes": (tuple(graphs.cudagraph_capture_sizes), plan.sizes),
        "schedule": (speculative.num_speculative_tokens_per_batch_size, plan.draft_schedule()),
        "method": speculative.method,
        "drafts": speculative.num_speculative_tokens,
        "is_dynamic": speculative.uses_dynamic_speculative_decoding(),
        "sleeps": config.model_config.enable_sleep_mode,
        "preserved": config.model_config.sleep_preserve_parameter_names,
        "dtype": str(config.model_config.dtype),
        "backend": backend,
        "receiver": WeightTransferEngineFactory._registry[backend]().__name__,
    }


def doctor_backends(folder: str, is_invariant: bool) -> dict[str, tuple[str, bool]]:
    """Return the attention backend of the engines of `tlt doctor --gpu`, and whether they run V2.

    They are float32 for the checks of all tokens, which few backends compute.
    """
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(is_invariant))
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    from tlt.doctor.engines import Place, engine_config
    from tlt.models import tiny
    from tlt.vllm import plugin
    from tlt.vllm.args import engine_args

    plugin.register()
    _describe_drafter(tiny.make(Path(folder) / "policy"), Path(folder) / "drafter", "float32")
    place, found = Place(Path(folder), NUM_GPUS), {}
    for name, settings in DOCTORS.items():
        args = engine_args(engine_config(place, **settings))
        config = EngineArgs(**args).create_engine_config()
        model = config.model_config
        with set_current_vllm_config(config):
            backend = get_attn_backend(model.get_head_size(), model.dtype, None)
        found[name] = backend.get_name(), config.use_v2_model_runner
    return found
