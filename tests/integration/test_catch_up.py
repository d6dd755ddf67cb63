"""On V1, skipping the draft model and catching up equals running it in every engine step."""

from pathlib import Path

import pytest
from draft_spies import check_catch_up, spy_v1
from engine_process import EngineProcess
from workloads import TINY_ARGS, EngineFactory, random_prompts, seeded, watch_preemptions

pytestmark = pytest.mark.vllm

SCRIPT = [["off", 0]] * 5 + [["ngram", 4]] * 5 + [["eagle3", 4]] * 3
ROW_BYTES = 3 * 128 * 4 + 8 + 4  # states of three layers in fp32, position, token
COMMON = [token for prompt in random_prompts(4, seed=9) for token in prompt][:40]
"""The start of all prompts: more than a block of the KV cache."""


@pytest.fixture(scope="module")
def engine(engines: EngineFactory, tiny: Path, tiny_drafter: Path) -> EngineProcess:
    small = {
        "max_model_len": 256,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,  # splits prompts and catch-up
        "num_gpu_blocks_override": 18,  # requests are preempted
    }
    engine = engines(
        model=str(tiny),
        drafter=str(tiny_drafter),
        max_draft_tokens=8,
        ngram={"history_tokens": 0},  # no run may learn from an earlier one
        engine_args=TINY_ARGS | small,
    )
    engine.call(spy_v1)
    engine.call(watch_preemptions)
    return engine


@pytest.mark.parametrize("num_rows", [10**6, 100], ids=["roomy", "small budget"])
def test_same_drafts_and_same_cache(engine: EngineProcess, num_rows: int) -> None:
    prompts = [COMMON + prompt for prompt in random_prompts(6, seed=4)]
    work = seeded(prompts, [{"temperature": 0.0}], 100)
    check_catch_up(engine, SCRIPT, num_rows * ROW_BYTES, lambda: engine.tokens_of(work))
    assert engine.call("num_preemptions") > 0
