"""The metrics of harvest in one RL step, from the coordinator's totals. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tlt.harvest.contract import Record


def step_record(before: Mapping[str, float], now: Mapping[str, float]) -> Record:
    """Return what the coordinator did between two looks at its totals."""
    since = {name: now[name] - before.get(name, 0.0) for name in now}
    return {
        "harvest/idle_s": since["idle_s"],
        "harvest/coverable_s": since["coverable_s"],
        "harvest/used_s": since["used_s"],
        "harvest/evaluated_s": since["evaluated_s"],
        "harvest/evaluated_share": now["evaluated_s"] / max(now["used_s"], 1e-9),
        "harvest/trained_tokens": since["trained_tokens"],
        "harvest/published": since["published"],
        "harvest/refused": since["refused"],
        "harvest/merges": since["merges"],
        "harvest/faults": since["faults"],
        "harvest/trainer_restarts": since["trainer_restarts"],
        "harvest/kills": since["kills"],
        "harvest/stop_max_s": now["stop_max_s"],
        "harvest/loss": now["loss"],
        "harvest/held_out_length": now["length"],
    }
