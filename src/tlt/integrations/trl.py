"""TLT inside TRL: a drafter that trains between generation and update of a `GRPOTrainer`.

    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate", ...))
    trainer.add_callback(TLTCallback(trainer))

The colocated engine is built under `TLT_CONFIG`, which names a drafter. The callback records the
hidden states of the engine's samples, trains the drafter on them after each generation, hands a
drafter that became better to the engine at the next weight sync, and saves it with the model. A
fault of the drafter's training ends that training, not the run.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tlt.config.train import CaptureConfig, TltConfig
from tlt.drafter.checkpoint import load_drafter
from tlt.errors import ConfigError
from tlt.harvest.contract import Weights
from tlt.harvest.published import (
    EMBEDDING,
    HEAD,
    engine_dtype,
    is_new,
    save_published,
    version_of,
)
from tlt.harvest.rounds import EVALUATED_SHARE
from tlt.harvest.trainer import HarvestTrainer, trainer_settings
from tlt.integrations.hosted import HostedEngine
from tlt.integrations.training import new_drafter
from tlt.models.hub import local_folder
from tlt.node.shared import SharedFolder
from tlt.states.buffer import BufferSettings
from tlt.strategy.spec import trained_draft_tokens

__all__ = ["CaptureConfig", "TLTCallback", "TltConfig", "new_drafter"]

logger = logging.getLogger(__name__)

FOLDER = "drafter"
"""Folder of the drafter in a saved model's folder."""


class TLTCallback(TrainerCallback):
    """Trains, publishes and saves the drafter of a trainer's colocated vLLM engine.

    `train_share` is the time for the drafter's training, in seconds per second of generation. `tlt`
    and `capture` take the keys of the sections of the same names in a run of `tlt train`.
    """

    def __init__(
        self,
        trainer: Any,
        train_share: float = 0.1,
        tlt: TltConfig | None = None,
        capture: CaptureConfig | None = None,
    ) -> None:
        generation = _generation_of(trainer)
        self._trl = trainer
        self._generation = generation
        self._engine = HostedEngine(generation.llm)
        self._share = train_share
        self._settings = tlt or TltConfig()
        buffer = BufferSettings.of_run(capture or CaptureConfig())
        on_gpu = trainer.accelerator.device.type == "cuda"
        with torch.random.fork_rng():  # the run draws the same numbers as without TLT
            self.drafter_trainer = HarvestTrainer(
                trainer_settings(
                    self._engine.drafter,
                    str(local_folder(self._engine.policy, "model")),
                    buffer,
                    self._settings,
                    num_draft_tokens=trained_draft_tokens(self._engine.strategy, on_gpu),
                    new=is_new(self._engine.drafter),
                    temperature=trainer.temperature,
                    seed=trainer.args.seed,
                    on_gpu=on_gpu,
                ),
                trainer.accelerator.device,
            )
        self._engine.record(buffer)
        atexit.register(SharedFolder.join(Path(buffer.folder)).remove)
        self._version = version_of(self._engine.drafter)
        self._engine.controller.drafter_version = self._version
        self._published: dict[str, torch.Tensor] | None = None
        self._waits = False
        """Whether the published drafter has not reached the engine yet."""
        self._lease = 0
        self._credit_s = 0.0
        """Seconds of training that generation has paid for, and that were not used yet."""
        self._trained_s = 0.0
        """Seconds of training since the last evaluation."""
        self._before = (0, 0)
        """Drafts and accepted tokens that were counted before."""
        self._is_off = train_share <= 0
        self._generate = generation.generate
        generation.generate = self._generate_and_train
        generation.sync_weights = self._sync_weights

    # --- weight sync, and drafter swap --------------------------------------------------------

    def _sync_weights(self) -> None:
        """Load the policy into the engine, and a drafter that is new; instead of TRL's method.

        TRL's own would write into the engine's modules: vLLM's CPU build cannot do that, and TLT
        would not know of the new policy.
        """
        generation = self._generation
        if generation.enable_sleep_mode:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            generation.llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False
        embed_and_head: dict[str, torch.Tensor] = {}
        self._engine.load_policy(
            _noting_embed_and_head(generation._iter_named_params(), embed_and_head)
        )
        self._engine.rl_step = self._trl.state.global_step
        if not self._is_off:
            self.drafter_trainer.take(policy=Weights(self._engine.rl_step, embed_and_head))
        if self._waits and self._published is not None:
            folder = self._engine.drafter
            config = load_drafter(folder).config
            self._engine.load_drafter(self._published, config, engine_dtype(folder), self._version)
            self._waits = False

    # --- training -----------------------------------------------------------------------------

    def _generate_and_train(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does, then train the drafter for a share of that time."""
        started_s = time.monotonic()
        generated = self._generate(*args, **kwargs)
        generated_s = time.monotonic() - started_s
        if self._trl.model.training:
            self._credit_s += self._share * generated_s
            started_s = time.monotonic()
            self._train()
            trained_s = time.monotonic() - started_s
            self._credit_s -= trained_s
            self._note(
                generation_s=generated_s,
                training_s=trained_s,
                recorded_samples=self._engine.num_recorded,
                drafter_version=self._engine.controller.drafter_version,
                **self._acceptance(),
            )
        return generated

    def _acceptance(self) -> dict[str, float]:
        """Return the acceptance length since the last call; nothing if nothing was drafted."""
        totals, before = self._engine.controller.totals, self._before
        self._before = totals.drafts, totals.accepted_tokens
        drafts, accepted = (now - old for now, old in zip(self._before, before, strict=True))
        return {"acceptance_length": 1 + accepted / drafts} if drafts else {}

    def _train(self) -> None:
        """Train, and evaluate once there was enough training; contain every fault."""
        if self._is_off or self._credit_s <= 0:
            return
        self._lease += 1
        try:
            with torch.enable_grad(), torch.random.fork_rng():
                self.drafter_trainer.begin(self._lease, float("inf"))
                started_s = time.monotonic()
                self.drafter_trainer.train(self._lease, self._credit_s)
                self._trained_s += time.monotonic() - started_s
                if self._trained_s >= self._settings.session_s:
                    self._evaluate()
                self.drafter_trainer.release()
        except FloatingPointError as error:
            logger.warning("%s", error)
        except Exception:
            logger.exception("the drafter's training has failed and stopped; the run continues")
            self._is_off = True

    def _evaluate(self) -> None:
        """Publish the drafter if it has become better."""
        found = self.drafter_trainer.evaluate(self._lease, EVALUATED_SHARE * self._trained_s)
        self._trained_s = 0.0
        if found is None:
            return
        self._note(held_out_length=found.length)
        if found.better:
            self._published = self.drafter_trainer.export()
            self._version += 1
            self._waits = True
            self.drafter_trainer.take(published=Weights(self._version, self._published))

    def _note(self, **values: float) -> None:
        """Add values to the metrics that TRL logs next."""
        for name, value in values.items():
            self._trl._metrics["train"][f"tlt/{name}"].append(value)

    # --- saving -------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the drafter with its optimizer in the checkpoint."""
        self._save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the drafter into the folder of the model that `save_model` writes."""
        self._save(Path(args.output_dir) / FOLDER, state)

    def _save(self, folder: Path, state: Any) -> None:
        if state.is_world_process_zero:
            folder.parent.mkdir(parents=True, exist_ok=True)
            state_of_optimizer = self.drafter_trainer.optimizer_state()
            start = self._engine.drafter
            save_published(folder, start, self._published, self._version, state_of_optimizer)


def _generation_of(trainer: Any) -> Any:
    """Return the part of a trainer that generates, or refuse one that TLT cannot work with."""
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or generation.mode != "colocate":
        raise ConfigError(
            "TLTCallback needs a vLLM engine in the trainer's process; set use_vllm=True and "
            'vllm_mode="colocate" in GRPOConfig'
        )
    if generation.tensor_parallel_size > 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size = {generation.tensor_parallel_size}: every process trains "
            "its own drafter, and the parts of one engine need the same one; use 1"
        )
    return generation


def _noting_embed_and_head(
    tensors: Iterable[tuple[str, torch.Tensor]], embed_and_head: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a policy's tensors, and copy its embedding and head to `embed_and_head`."""
    for name, tensor in tensors:
        if name in (EMBEDDING, HEAD):
            embed_and_head[name] = tensor.detach().to("cpu", copy=True)
        yield name, tensor
