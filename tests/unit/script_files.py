"""Scripts outside the package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    """Load a script such as ".ci/release.py"; its folder and benchmarks/ can be imported from."""
    sys.path[:0] = [str((ROOT / path).parent), str(ROOT / "benchmarks")]
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
