"""Breaks the verification of drafts in every process that has this folder in its PYTHONPATH."""

import importlib.abc
import importlib.util
import sys
from typing import Any

from broken_verification import break_verification

MODULE = "tlt.vllm.v1.sampler"
NUM_GOOD = 50
"""Draws with drafts before the break: more than the self-test makes."""


class Finder(importlib.abc.MetaPathFinder):
    """Breaks the module right after its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_break(module: Any) -> None:
            load(module)
            break_verification(module, NUM_GOOD)

        spec.loader.exec_module = load_and_break  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
