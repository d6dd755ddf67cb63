"""Parts of a run of verl that need neither Ray nor an engine: `python verl_programs.py NAME FILE`.

The file holds verl's settings as JSON. A program prints its result as JSON in the last line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


def composed(words: list[str]) -> Any:
    """Return verl's config with these settings, as its command makes it."""
    import verl
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=words)


def trainer(words: list[str]) -> dict[str, Any]:
    """Build the trainer that verl's task runner asks for, and return what it made of the config."""
    from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls

    config = composed(words)
    made = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    assert isinstance(made, PPOTrainerSync)
    return {
        "class": type(made).__name__,
        "buffer": type(made.replay_buffer).__name__,
        "engine_kwargs": dict(made.config.actor_rollout_ref.rollout.engine_kwargs.vllm),
    }


def replica(words: list[str]) -> dict[str, Any]:
    """Return the arguments of the engine that verl's replica would start, with TLT in it."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig
    from verl.workers.rollout.vllm_rollout import vllm_async_server
    from vllm.engine.arg_utils import AsyncEngineArgs

    class Server(vllm_async_server.vLLMHttpServer):  # type: ignore[misc]
        """verl's server, which takes its arguments to vLLM's config and no further."""

        def __init__(self, config: Any) -> None:
            rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
            self.config = omega_conf_to_dataclass(rollout)
            self.model_config = omega_conf_to_dataclass(model, dataclass_type=HFModelConfig)
            self.replica_rank, self.node_rank, self.nnodes = 1, 0, 1
            self._disaggregation_role = "null"
            self._validate_configs()

        def _should_profile(self) -> bool:
            return False

        async def run_server(self, args: Any) -> None:
            self.vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()

    server = Server(composed(words))
    asyncio.run(server.launch_server())
    config = server.vllm_config
    return {
        "scheduler": str(config.scheduler_config.scheduler_cls),
        "worker": str(config.parallel_config.worker_cls),
        "extension": config.parallel_config.worker_extension_cls,
        "load_format": str(config.load_config.load_format),
        "method": config.speculative_config and config.speculative_config.method,
        "draft_load_format": config.speculative_config
        and config.speculative_config.draft_load_config
        and str(config.speculative_config.draft_load_config.load_format),
        "tlt": bool(config.additional_config.get("tlt")),
        "logprobs_mode": str(config.model_config.logprobs_mode),
    }


def extension(words: list[str]) -> dict[str, Any]:
    """Load a policy of two buckets through TLT's worker extension, injected as vLLM does it."""
    import torch
    from safetensors.torch import load_file
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    from tlt.integrations.verl_worker import WorkerExtension
    from tlt.vllm.cpu_worker import AdaptiveCPUWorker

    heard: list[str] = []

    class Worker(AdaptiveCPUWorker):
        def tlt_policy_changed(self) -> None:
            heard.append("policy changed")

    def receive(self: Any, **_: Any) -> None:
        buffer = torch.zeros(2)  # verl reuses the memory of a bucket
        for index, name in enumerate(["model.embed_tokens.weight", "lm_head.weight", "other"]):
            self._update_weights([(name, buffer.fill_(index))], peft_config=None)

    vLLMColocateWorkerExtension.update_weights_from_ipc = receive
    vLLMColocateWorkerExtension._update_weights = lambda self, weights, peft_config: heard.extend(
        name for name, _ in weights
    )
    Worker.__bases__ = (*Worker.__bases__, WorkerExtension)
    worker = object.__new__(Worker)
    worker.update_weights_from_ipc(use_shm=True)
    before = list(heard)
    file = Path(words[0])
    worker.tlt_share_embed_and_head(str(file))
    worker.update_weights_from_ipc(use_shm=True)
    embed_and_head = {name: tensor.tolist() for name, tensor in load_file(file).items()}
    return {
        "heard": before,
        "again": heard[len(before) :] == before,
        "embed_and_head": embed_and_head,
    }


if __name__ == "__main__":
    name, file = sys.argv[1:]
    programs = {"trainer": trainer, "replica": replica, "extension": extension}
    result = programs[name](json.loads(Path(file).read_text()))
    sys.stdout.write(f"\n{json.dumps(result)}\n")
