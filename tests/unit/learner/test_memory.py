"""The formula of a rank's memory says what torch's memory tracker counts, without a device."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tlt.train.memory import learner_memory
from tlt.train.shape import ModelShape

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks" / "results" / "learner_memory.json"


def load() -> ModuleType:
    path = ROOT / "benchmarks" / "learner_memory.py"
    spec = importlib.util.spec_from_file_location("learner_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["learner_memory"] = module
    spec.loader.exec_module(module)
    return module


benchmark = load()
LARGE = benchmark.CASES[0]
SMALL = benchmark.CPU_CASES[0]


def with_layers(case: Any, num_layers: int, **changes: Any) -> Any:
    model = case.model | {"num_hidden_layers": num_layers} | changes.pop("model", {})
    return replace(case, model=model, **changes)


QWEN3 = {
    "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
CASES = {
    "a layer": with_layers(LARGE, 3),
    "the head": with_layers(LARGE, 3, row_tokens=4608),
    "embedding and head": with_layers(LARGE, 3, row_tokens=256),
    "Qwen3": with_layers(LARGE, 3, model=QWEN3, row_tokens=33792, num_ranks=16),
    "experts": with_layers(LARGE, 3, model=QWEN3_MOE, row_tokens=33792),
    "no checkpointing, experts": with_layers(
        LARGE, 3, model=QWEN3_MOE, gradient_checkpointing=False
    ),
    "no checkpointing": with_layers(LARGE, 3, gradient_checkpointing=False),
    "LoRA, a layer": with_layers(LARGE, 3, lora_rank=256),
    "LoRA, the head": with_layers(LARGE, 3, row_tokens=4608, lora_rank=16),
    "LoRA, the embedding": with_layers(LARGE, 3, row_tokens=256, lora_rank=16),
    "LoRA, loop over samples": with_layers(SMALL, 3, gradient_checkpointing=False, lora_rank=16),
    "loop over samples": with_layers(SMALL, 3, gradient_checkpointing=False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_what_the_tracker_counts(name: str) -> None:
    case = CASES[name]
    assert benchmark.formula(case) == pytest.approx(benchmark.tracked(case)["Total"], rel=0.01)


def test_the_committed_cases_agree() -> None:
    cases = json.loads(RESULT.read_text())["cases"]
    assert set(cases) == {case.name for case in (*benchmark.CASES, *benchmark.CPU_CASES)}
    for name, case in cases.items():
        tracked = case["tracked_bytes"]
        given = benchmark.Case(**case["settings"])
        assert benchmark.formula(given) == pytest.approx(tracked, rel=0.01), name
        if given in benchmark.CPU_CASES:
            assert case["measured_bytes"] == pytest.approx(tracked, rel=0.1), name


def test_more_of_everything_needs_more() -> None:
    shape = ModelShape.of(benchmark.QWEN2_5_7B)
    given: dict[str, Any] = {
        "row_tokens": 8192, "num_ranks": 8, "dtype": "bfloat16",
        "gradient_checkpointing": True, "attention_kernel": True,
    }  # fmt: skip
    least = learner_memory(shape, **given)
    assert least.resting < least.peak
    for change in (
        {"row_tokens": 16384}, {"num_ranks": 4}, {"dtype": "float32"},
        {"gradient_checkpointing": False}, {"attention_kernel": False, "row_tokens": 65536},
        {"reference": True}, {"captures": True},
    ):  # fmt: skip
        assert learner_memory(shape, **(given | change)).peak > least.peak, change
