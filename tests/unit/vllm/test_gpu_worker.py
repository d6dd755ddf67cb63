"""The memory that a GPU worker leaves for the KV cache. No GPU is needed."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.worker.gpu_worker import Worker

from tlt.vllm.worker import AdaptiveGPUWorker

EAGLE3 = SimpleNamespace(method="eagle3")


@pytest.mark.parametrize(
    ("speculative", "given", "left"),
    [
        (EAGLE3, None, 900),
        (EAGLE3, 1000, 1000),
        (SimpleNamespace(method="ngram_gpu"), None, 1000),
        (None, None, 1000),
    ],
)
def test_catch_up_and_recorder_have_their_memory(
    monkeypatch: pytest.MonkeyPatch, speculative: Any, given: int | None, left: int
) -> None:
    monkeypatch.setattr(Worker, "determine_available_memory", lambda worker: 1000)
    worker: Any = AdaptiveGPUWorker.__new__(AdaptiveGPUWorker)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=given)
    worker.vllm_config = SimpleNamespace(
        speculative_config=speculative,
        additional_config={"tlt": {"drafter_state_bytes": 100}},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=3),
        model_config=SimpleNamespace(get_hidden_size=lambda: 5),
    )
    assert worker.determine_available_memory() == left
    worker.vllm_config.additional_config["tlt"]["records"] = True
    states = 3 * 4 * 5 * 2
    assert worker.determine_available_memory() == (left if given else left - states)
