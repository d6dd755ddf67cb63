"""Stock vLLM on its V2 runner under Triton's interpreter: the ground that the V2 tests stand on."""

from pathlib import Path

import pytest
from interpreter import interpreted
from v2_calls import run_stock

pytestmark = pytest.mark.vllm


def test_stock_vllm_runs_on_v2(tiny: Path, tiny_drafter: Path) -> None:
    drafts = {"method": "eagle3", "model": str(tiny_drafter), "num_speculative_tokens": 3}
    runner, tokens = interpreted(run_stock, str(tiny), drafts)
    assert runner == "vllm.v1.worker.gpu.model_runner"
    assert (runner, tokens) == interpreted(run_stock, str(tiny), None)
