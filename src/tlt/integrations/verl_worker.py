"""The worker's half of TLT inside verl: what happens when verl loads a policy into an engine.

verl loads the policy through its own worker extension, which bypasses vLLM's ways to load a policy.
This extension tells TLT's worker of the load, and keeps the policy's embedding and head for the
drafter's trainers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from tlt.node.shared import SharedFolder
from tlt.vllm.policy_verifier import EMBEDDING, HEAD


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, for an engine that runs with TLT."""

    _folder: SharedFolder | None = None
    _file: Path | None = None
    """File for the policy's embedding and head, in the engine that hands them to trainers."""
    _embed_and_head: dict[str, torch.Tensor] | None = None
    """Embedding and head of the policy that is being loaded."""

    def tlt_share_embed_and_head(self, file: str) -> None:
        """Write embedding and head of every later policy to a file in shared memory."""
        self._file = Path(file)
        self._folder = SharedFolder.join(self._file.parent)

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Load a policy as verl does, and tell TLT's worker."""
        self._embed_and_head = None if self._file is None else {}
        super().update_weights_from_ipc(*args, **kwargs)
        if self._file is not None and self._embed_and_head:
            hidden = self._file.with_name(f".{self._file.name}")
            save_file(self._embed_and_head, hidden)
            hidden.rename(self._file)
        self._embed_and_head = None
        self.tlt_policy_changed()

    def _update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        super()._update_weights(weights, *args, **kwargs)
        if self._embed_and_head is not None:
            for name, tensor in weights:
                if name in (EMBEDDING, HEAD):
                    # verl reuses the memory of a bucket for the next one.
                    self._embed_and_head[name] = tensor.detach().to("cpu", copy=True).contiguous()
