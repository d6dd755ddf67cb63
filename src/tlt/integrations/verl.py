"""TLT inside verl: its synchronous trainer, with a drafter that idle replicas train.

    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=tlt ...

verl starts its replicas under `TLT_CONFIG`, which names a drafter. Each replica stores the hidden
states of its samples. A replica that has nothing left to generate is lent to a trainer beside it,
until verl has all samples of the RL step. A drafter that became better goes into all replicas. It
is saved with verl's checkpoints. A fault of harvest ends harvest, not the run.

Importing this module registers the trainer; `verl_plugin` imports it when verl needs it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import BaseModel
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from tlt.config.load import check
from tlt.config.train import CaptureConfig, TltConfig
from tlt.errors import ConfigError
from tlt.harvest.published import is_new
from tlt.harvest.trainer import trainer_settings
from tlt.integrations.replicas import ReplicaHarvest
from tlt.models.hub import local_folder
from tlt.states.buffer import BufferSettings
from tlt.strategy.spec import trained_draft_tokens
from tlt.vllm.environment import SWITCH_VARIABLE
from tlt.vllm.switch import EXAMPLE, read_settings

S = TypeVar("S", bound=BaseModel)
FOLDER = "drafter"
"""Folder of the drafter in a checkpoint of verl."""
EXTENSION = "tlt.integrations.verl_worker.WorkerExtension"


@register_trainer("tlt")
class PPOTrainerTLT(PPOTrainerSync):
    """verl's synchronous trainer, and harvest on its idle replicas."""

    _tlt: ReplicaHarvest

    def __init__(self, config: DictConfig) -> None:
        self._drafter = _drafter_folder()
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl's replay buffer asks for this name
            engine_kwargs = config.actor_rollout_ref.rollout.engine_kwargs
            engine_kwargs.vllm = {**(engine_kwargs.get("vllm") or {})}
            engine_kwargs.vllm.worker_extension_cls = EXTENSION
        super().__init__(config)

    def on_init_end(self) -> None:
        self._tlt = _harvest(self.config, self._drafter, self.llm_server_manager)
        super().on_init_end()  # the first weight sync
        self._tlt.policy_changed()

    def on_sample_begin(self) -> None:
        super().on_sample_begin()
        self._tlt.rollout_started()

    def on_sample_end(self) -> None:
        self._tlt.rollout_ended()
        super().on_sample_end()

    def on_step_end(self) -> None:
        super().on_step_end()
        self._tlt.policy_changed()
        self._pending_sync_metrics = self._tlt.record()

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        step = f"global_step_{self.global_steps}"
        self._tlt.save(Path(self.config.trainer.default_local_dir) / step / FOLDER)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().fit(*args, **kwargs)
        finally:
            self._tlt.stop()


def _harvest(config: DictConfig, drafter: Path, manager: Any) -> ReplicaHarvest:
    """Start harvest on the replicas that verl's manager of servers has started."""
    tlt = _section(TltConfig, config, "tlt")
    buffer = BufferSettings.of_run(_section(CaptureConfig, config, "capture"))
    strategy = read_settings(os.environ[SWITCH_VARIABLE]).strategy
    on_gpu = torch.cuda.is_available()
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    trainer = trainer_settings(
        drafter,
        str(local_folder(model.path, "model")),
        buffer,
        tlt,
        num_draft_tokens=trained_draft_tokens(strategy, on_gpu),
        new=is_new(drafter),
        temperature=rollout.temperature,
        seed=rollout.seed,
        on_gpu=on_gpu,
    )

    async def load() -> Sequence[int]:
        status = await manager.global_load_balancer.get_status.remote()
        return [status["servers"].get(address, 0) for address in manager.server_addresses]

    return ReplicaHarvest(tlt, trainer, manager.server_handles, load)


def _drafter_folder() -> Path:
    """Return the drafter that `TLT_CONFIG` names; refuse a run that has none to train."""
    text = os.environ.get(SWITCH_VARIABLE, "")
    drafter = read_settings(text).drafter if text.strip() else None
    if drafter is None:
        raise ConfigError(
            f"trainer.v1.trainer_mode = 'tlt' trains a drafter, and {SWITCH_VARIABLE} names none; "
            f"export {EXAMPLE} before verl starts"
        )
    return local_folder(drafter, f"{SWITCH_VARIABLE}: drafter")


def _section(schema: type[S], config: DictConfig, name: str) -> S:
    """Return a section of TLT's settings, which verl's config may have: `+tlt.session_s=5`."""
    found = config.get(name)
    return check(schema, {} if found is None else OmegaConf.to_container(found), name)
