"""The direction of imports in the source: `contracts <- config <- parts <- train <- cli`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "tlt"

# Packages of tlt that each package may import, besides itself.
ALLOWED = {
    "__init__": set(),
    "errors": set(),
    "user_code": {"errors"},
    "packing": set(),
    "spans": set(),
    "colours": set(),
    "contracts": set(),
    "hardware": set(),
    "logs": set(),
    "config": {"contracts", "errors", "hardware"},
    "strategy": {"contracts", "errors", "config", "spans"},
    "timing": {"contracts", "config"},
    "tasks": {"contracts", "errors", "config", "user_code"},
    "agents": {"contracts", "errors", "config", "user_code", "tasks", "vllm"},
    "models": {"contracts", "errors", "config"},
    "node": {"contracts", "errors", "config"},
    "states": {"contracts", "errors", "config", "node"},
    "drafter": {"contracts", "errors", "config", "hardware", "packing", "states"},
    "learner": {
        *("contracts", "errors", "config", "hardware", "logs", "packing", "node", "states"),
        "user_code",
    },
    "vllm": {
        *("contracts", "errors", "config", "hardware", "logs", "spans"),
        *("models", "node", "states", "strategy", "drafter", "timing"),
    },
    "rollout": {
        *("contracts", "errors", "config", "hardware", "logs", "spans"),
        *("node", "states", "strategy", "vllm"),
    },
    "harvest": {
        *("contracts", "errors", "config", "hardware", "logs", "spans"),
        *("node", "states", "drafter", "rollout", "timing"),
    },
    "observe": {"contracts", "errors", "config", "hardware", "spans"},
    "report": {"contracts", "errors", "config", "spans", "colours", "observe"},
    "simulate": {
        *("contracts", "errors", "config", "spans", "colours"),
        *("strategy", "tasks", "rollout", "harvest", "observe", "report", "timing"),
    },
    "bench": {
        *("contracts", "errors", "config", "colours", "report"),
        *("strategy", "vllm", "rollout", "tasks"),
    },
}
PARTS = {*ALLOWED} - {"bench", "simulate", "report"}
ALLOWED["integrations"] = PARTS
ALLOWED["doctor"] = {
    *("contracts", "errors", "config", "hardware", "models"),
    *("node", "states", "drafter", "vllm", "rollout", "bench"),
}
ALLOWED["offline"] = PARTS
ALLOWED["train"] = PARTS
ALLOWED["cli"] = {*ALLOWED}
ALLOWED["__main__"] = {"cli"}

STDLIB_ONLY = {
    *("colours", "contracts", "errors", "hardware", "logs", "packing", "spans", "user_code"),
    "__init__",
}
NO_HEAVY = {*STDLIB_ONLY, "config", "strategy"}
PURE = {
    *(
        ROOT / "harvest" / f"{name}.py"
        for name in ("contract", "leases", "forecast", "rounds", "coordinator")
    ),
    *(ROOT / "rollout" / f"{name}.py" for name in ("dispatch", "recheck")),
    ROOT / "train" / "fit.py",
    ROOT / "train" / "memory.py",
}
ON_RAY = {
    *(ROOT / "learner" / "group.py", ROOT / "harvest" / "session.py"),
    ROOT / "integrations" / "replicas.py",
}
"""The driver's handles on actors."""
HEAVY = {"torch", "vllm", "ray", "transformers", "numpy"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            names.add(node.module)
            if node.module == "tlt" or node.module.startswith("tlt."):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_direction(path: Path) -> None:
    part = part_of(path)
    for name in imports(path):
        if name.startswith("tlt."):
            other = name.split(".")[1]
            if other.startswith("_") or (
                (ROOT / other).exists() is False and not (ROOT / f"{other}.py").exists()
            ):
                continue  # an attribute such as tlt.__version__
            allowed = ALLOWED[part]
            assert other == part or other in allowed, f"{part} may not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_libraries_stay_where_they_belong(path: Path) -> None:
    part = part_of(path)
    roots = {name.split(".")[0] for name in imports(path)}
    if part in NO_HEAVY:
        assert not roots & HEAVY
    if part == "simulate":
        assert not roots & {"torch", "vllm", "ray"}
    if path in PURE:
        assert not roots & HEAVY
    if "vllm" in roots:
        assert part == "vllm"
    if "ray" in roots:
        assert path.name == "actor.py" or part in {"node", "train"} or path in ON_RAY


@pytest.mark.parametrize("part", sorted(STDLIB_ONLY))
def test_contracts_are_stdlib_only(part: str) -> None:
    import sys

    roots = {name.split(".")[0] for name in imports(ROOT / f"{part}.py")}
    assert roots - {"tlt"} <= set(sys.stdlib_module_names)


def test_no_utils() -> None:
    assert not [p for p in modules() if p.stem in {"utils", "helpers", "common", "misc"}]
