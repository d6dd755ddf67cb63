"""TLT: fast, lossless RL training of reasoning LLMs on stock vLLM, Ray and PyTorch.

The names in `__all__` are the public API (docs/api.md): stable, documented, and imported when they
are first used, so that `import tlt` stays light. All other modules may change at any time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt.config.rollout import EngineConfig as EngineConfig
    from tlt.config.rollout import PoolConfig as PoolConfig
    from tlt.contracts import OFF as OFF
    from tlt.contracts import Arm as Arm
    from tlt.contracts import EngineStats as EngineStats
    from tlt.contracts import Sample as Sample
    from tlt.contracts import SampleRequest as SampleRequest
    from tlt.contracts import SamplingSpec as SamplingSpec
    from tlt.contracts import StepContext as StepContext
    from tlt.contracts import StepReport as StepReport
    from tlt.contracts import Strategy as Strategy
    from tlt.drafter.checkpoint import drafter_weights as drafter_weights
    from tlt.drafter.checkpoint import load_drafter as load_drafter
    from tlt.drafter.checkpoint import save_drafter as save_drafter
    from tlt.drafter.evaluation import evaluate_samples as evaluate_samples
    from tlt.drafter.trainer import DrafterTrainer as DrafterTrainer
    from tlt.drafter.trainer import TrainerSettings as TrainerSettings
    from tlt.drafter.trainer import fresh_drafter as fresh_drafter
    from tlt.errors import ConfigError as ConfigError
    from tlt.errors import EngineError as EngineError
    from tlt.harvest.contract import Evaluation as Evaluation
    from tlt.harvest.contract import Trained as Trained
    from tlt.harvest.contract import TrainerFailed as TrainerFailed
    from tlt.harvest.contract import TrainerHandle as TrainerHandle
    from tlt.harvest.coordinator import Coordinator as Harvest
    from tlt.harvest.coordinator import CoordinatorSettings as HarvestSettings
    from tlt.harvest.leases import Begin as Begin
    from tlt.harvest.leases import End as End
    from tlt.harvest.leases import Freed as Freed
    from tlt.harvest.leases import Kill as Kill
    from tlt.harvest.leases import Leases as Leases
    from tlt.harvest.leases import LeaseSettings as LeaseSettings
    from tlt.models.hub import model_folder as model_folder
    from tlt.node.weights import SharedWeights as SharedWeights
    from tlt.rollout.actor import ray_spawner as ray_spawner
    from tlt.rollout.engine import RolloutEngine as Engine
    from tlt.rollout.offline import generate as generate
    from tlt.rollout.pool import RolloutPool as Pool
    from tlt.states.buffer import BufferSettings as BufferSettings
    from tlt.states.buffer import SampleBuffer as SampleBuffer
    from tlt.states.captured import capture as capture
    from tlt.strategy.spec import build_strategy as build_strategy
    from tlt.tasks.chat import Chat as Chat
    from tlt.tasks.gym import Problem as Problem
    from tlt.vllm.args import engine_args as engine_args

__version__ = "0.2.0"

__all__ = [
    "OFF",
    "Arm",
    "Begin",
    "BufferSettings",
    "Chat",
    "ConfigError",
    "DrafterTrainer",
    "End",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "Evaluation",
    "Freed",
    "Harvest",
    "HarvestSettings",
    "Kill",
    "LeaseSettings",
    "Leases",
    "Pool",
    "PoolConfig",
    "Problem",
    "Sample",
    "SampleBuffer",
    "SampleRequest",
    "SamplingSpec",
    "SharedWeights",
    "StepContext",
    "StepReport",
    "Strategy",
    "Trained",
    "TrainerFailed",
    "TrainerHandle",
    "TrainerSettings",
    "build_strategy",
    "capture",
    "drafter_weights",
    "engine_args",
    "evaluate_samples",
    "fresh_drafter",
    "generate",
    "load_drafter",
    "model_folder",
    "ray_spawner",
    "save_drafter",
]

_HOMES = {
    "tlt.config.rollout": ("EngineConfig", "PoolConfig"),
    "tlt.contracts": (
        *("OFF", "Arm", "EngineStats", "Sample", "SampleRequest", "SamplingSpec"),
        *("StepContext", "StepReport", "Strategy"),
    ),
    "tlt.drafter.checkpoint": ("drafter_weights", "load_drafter", "save_drafter"),
    "tlt.drafter.evaluation": ("evaluate_samples",),
    "tlt.drafter.trainer": ("DrafterTrainer", "TrainerSettings", "fresh_drafter"),
    "tlt.errors": ("ConfigError", "EngineError"),
    "tlt.harvest.coordinator": ("Harvest", "HarvestSettings"),
    "tlt.harvest.leases": ("Begin", "End", "Freed", "Kill", "LeaseSettings", "Leases"),
    "tlt.harvest.contract": ("Evaluation", "Trained", "TrainerFailed", "TrainerHandle"),
    "tlt.models.hub": ("model_folder",),
    "tlt.node.weights": ("SharedWeights",),
    "tlt.rollout.actor": ("ray_spawner",),
    "tlt.rollout.engine": ("Engine",),
    "tlt.rollout.offline": ("generate",),
    "tlt.rollout.pool": ("Pool",),
    "tlt.vllm.args": ("engine_args",),
    "tlt.states.buffer": ("BufferSettings", "SampleBuffer"),
    "tlt.states.captured": ("capture",),
    "tlt.strategy.spec": ("build_strategy",),
    "tlt.tasks.chat": ("Chat",),
    "tlt.tasks.gym": ("Problem",),
}
"""The module of each public name."""
_NAMES_THERE = {
    "Engine": "RolloutEngine",
    "Harvest": "Coordinator",
    "HarvestSettings": "CoordinatorSettings",
    "Pool": "RolloutPool",
}
"""Names that differ inside."""


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(importlib.import_module(home), _NAMES_THERE.get(name, name))
                globals()[name] = value
                return value
        raise AttributeError(f"module 'tlt' has no public name {name!r}; docs/api.md lists them")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
