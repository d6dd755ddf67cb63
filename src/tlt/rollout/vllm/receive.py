"""The worker's half of a policy that comes from GPU to GPU (`send`), mixed into our workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tlt.node.fingerprint import Fingerprint
from tlt.node.weights import check_shapes
from tlt.rollout.vllm import compat


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
        self._renew_drafter()  # type: ignore[attr-defined]
        self._drop_states()  # type: ignore[attr-defined]
        started_s = time.monotonic()
        differed = self._watch.expect_sent(seed, fingerprints)  # type: ignore[attr-defined]
        if compat.skips("fingerprint"):
            differed = []
        return {"differed": differed, "still": differed, "seconds": time.monotonic() - started_s}
