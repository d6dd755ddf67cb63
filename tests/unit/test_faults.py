"""benchmarks/faults.py: what it reads from pytest, without a campaign."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

faults = importlib.import_module("faults")


def test_the_last_line_of_pytest_says_what_passed() -> None:
    said = "..F.\nFAILED tests/unit/x.py::test_1 passed\n1 failed, 39 passed in 242.69s (0:04:02)\n"
    assert faults.outcome(said) == {"passed": 39, "failed": 1}
    assert faults.outcome("40 passed in 3.00s") == {"passed": 40, "failed": 0}
    assert faults.outcome("") == {"passed": 0, "failed": 0}


def test_every_part_has_its_tests() -> None:
    for layer in faults.LAYERS:
        assert (ROOT / "tests" / "unit" / layer / "test_fault_layer.py").exists()
