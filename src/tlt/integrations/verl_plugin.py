"""The entry point that verl loads in every process (`verl.plugins`).

verl loads it while verl itself is being imported, before there is a trainer to derive from. So this
module only waits: when a process has imported verl's trainers, TLT's trainer joins them.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

logger = logging.getLogger(__name__)


def after_import(name: str, call: Callable[[ModuleType], object]) -> None:
    """Call a function with a module once any code has imported the module."""
    sys.meta_path.insert(0, _Waiting(name, call))


class _Waiting(MetaPathFinder, Loader):
    """Finds one module, once, loads it as its own loader does, and then calls a function."""

    _loader: Loader

    def __init__(self, name: str, call: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)


def _register(_: ModuleType) -> None:
    """Register TLT's trainer; a fault must not keep verl from starting."""
    try:
        importlib.import_module("tlt.integrations.verl")
    except Exception:
        logger.warning("verl starts without the trainer 'tlt'", exc_info=True)


after_import("verl.trainer.ppo.v1", _register)
