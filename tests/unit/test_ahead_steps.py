"""The pure parts of benchmarks/ahead_steps.py: parts of texts, and what an engine counted."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def ahead_steps() -> ModuleType:
    for name in ("look_ahead", "ahead_steps"):  # the second imports the first
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


def test_a_share_of_a_text_is_its_beginning(ahead_steps: ModuleType) -> None:
    texts = {"a": list(range(10)), "b": [7], "c": []}
    assert ahead_steps.begin_of(texts, 0.0) == {"a": [], "b": [], "c": []}
    assert ahead_steps.begin_of(texts, 0.5) == {"a": [0, 1, 2, 3, 4], "b": [], "c": []}
    assert ahead_steps.begin_of(texts, 1.0) == texts


def test_an_engine_step_counts_once_for_each_request(ahead_steps: ModuleType) -> None:
    stats = {
        **{"output_tokens": 30, "accepted_tokens": 20, "steps": 6},
        **{"drafts": 9, "draft_tokens": 36, "busy_s": 0.5, "model_drafts": 0},
    }
    found = ahead_steps.counted(stats)
    assert found["request_steps"] == 10
    assert found["engine_steps"] == 6
