"""The worker's half of a policy that comes without a file, mixed into our workers.

The policy comes from GPU to GPU (`send`), or from a trainer in this very process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from tlt.node.fingerprint import Fingerprint, fingerprint
from tlt.node.weights import check_shapes
from tlt.vllm import compat


class ReceivesPolicy:
    """A worker that checks a policy before it comes, and compares it afterwards."""

    def tlt_start_policy(self, shapes: list[tuple[str, list[int]]]) -> None:
        """Refuse a policy that does not fit the model's folder; otherwise start an update."""
        config = self.vllm_config  # type: ignore[attr-defined]
        check_shapes(shapes, Path(config.model_config.model), whole=True)
        self.start_weight_update()  # type: ignore[attr-defined]

    def tlt_finish_policy(self, seed: int, fingerprints: dict[str, Fingerprint]) -> dict[str, Any]:
        """Finish an update, and compare the policy with the learner's.

        There is no file to load a policy that differs again: the engine must be replaced.
        """
        self.finish_weight_update()  # type: ignore[attr-defined]
        return self._compared(seed, fingerprints)

    def tlt_load_policy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Load the policy of a trainer in this process, and compare it as `tlt_finish_policy`.

        No request may run. vLLM reads the tensors while it loads them, and copies nothing before.
        """
        config = self.vllm_config  # type: ignore[attr-defined]
        dtype = config.model_config.dtype
        seed = secrets.randbits(31)
        seen: dict[str, Fingerprint] = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                seen[name] = fingerprint(tensor, seed, dtype)
                yield name, tensor

        model = self.get_model()  # type: ignore[attr-defined]
        with set_current_vllm_config(config), torch.no_grad():
            compat.begin_reload(model)
            compat.load(model, noted())
            compat.end_reload(model, config.model_config)
        return self._compared(seed, seen)

    def _compared(self, seed: int, fingerprints: dict[str, Fingerprint]) -> dict[str, Any]:
        self._renew_drafter()  # type: ignore[attr-defined]
        self._drop_states()  # type: ignore[attr-defined]
        started_s = time.monotonic()
        differed = self._watch.expect_sent(seed, fingerprints)  # type: ignore[attr-defined]
        if compat.skips("fingerprint"):
            differed = []
        return {"differed": differed, "still": differed, "seconds": time.monotonic() - started_s}
