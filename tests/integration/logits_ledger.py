"""A record of the logits that an engine computes, by the text that they follow."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


class LogitsLedger:
    """Digests of the logits after each text. One text, one digest, if logits are invariant."""

    def __init__(self) -> None:
        self.digests: dict[bytes, set[bytes]] = {}

    def record(self, runner: Any, scheduler_output: Any) -> None:
        """Add the rows of logits of one engine step."""
        state = runner.execute_model_state
        if state is None:
            return
        batch, start, row = runner.input_batch, 0, 0
        spec = state.spec_decode_metadata
        drafts = spec.num_draft_tokens if spec is not None else [0] * batch.num_reqs
        for index, request in enumerate(batch.req_ids):
            num_rows = scheduler_output.num_scheduled_tokens[request]
            num_computed = int(batch.num_computed_tokens_cpu[index])
            text = hashlib.blake2b(batch.token_ids_cpu[index, :num_computed].astype(np.int32))
            tokens = runner.input_ids.cpu[start : start + num_rows].numpy().astype(np.int32)
            first = num_rows - 1 - drafts[index]
            for place, token in enumerate(tokens):
                text.update(token.tobytes())
                if place < first:
                    continue
                digest = hashlib.blake2b(state.logits[row].numpy().tobytes()).digest()
                self.digests.setdefault(text.digest(), set()).add(digest)
                row += 1
            start += num_rows


ledger = LogitsLedger()


def watch(engine: Any) -> None:
    """Record all later engine steps of this process's engine."""
    worker = engine.core.llm.model_executor.driver_worker.worker
    execute = worker.execute_model

    def execute_model(scheduler_output: Any) -> Any:
        output = execute(scheduler_output)
        ledger.record(worker.model_runner, scheduler_output)
        return output

    worker.execute_model = execute_model


def take(engine: Any) -> dict[bytes, set[bytes]]:
    """Return the digests by text, and begin anew."""
    taken = ledger.digests
    ledger.digests = {}
    return taken


def drop_prefixes(engine: Any) -> None:
    """Drop all cached prefixes, but keep the history that n-grams are looked up in."""
    assert engine.between_steps(engine.core.llm.reset_prefix_cache)
