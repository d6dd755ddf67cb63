"""vLLM's own classes capture and choose exactly the CUDA graphs that the plan predicts.

The test needs no GPU and no engine: it builds a real `VllmConfig` from our engine arguments, and
the real dispatchers of the V2 runner. The CPU platform stands in for one with graphs.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graph_model import Graph, cases, graph_for, graphs_of
from tlt.config.rollout import EngineConfig
from tlt.contracts import Arm
from tlt.vllm.args import engine_args, graph_plan

pytestmark = pytest.mark.vllm


def arms(*lengths: int) -> dict[str, Any]:
    return {"kind": "random", "arms": [["ngram", k] if k else ["off", 0] for k in lengths]}


STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "all": (arms(*range(9)), {"max_num_seqs": 256}),
    "powers of two": (arms(0, 1, 3, 7), {"max_num_seqs": 200}),
    "table": (
        {"kind": "by_batch_size", "drafter": "ngram", "schedule": [[4, 6], [16, 4], [32, 2]]},
        {"max_num_seqs": 128},
    ),
    "off": ({"kind": "off"}, {"max_num_seqs": 300}),
    "crowded": (arms(0, 1, 2, 3, 4), {"max_num_seqs": 3}),
    "budget": (arms(0, 2, 8), {"max_num_seqs": 64, "max_num_batched_tokens": 300}),
}


@pytest.fixture
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes an engine's vLLM config as on a GPU: with graphs."""
    import vllm.config.vllm
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    platform = type(current_platform)
    methods: dict[str, Callable[..., Any]] = {
        "support_static_graph_mode": lambda cls: True,
        "check_and_update_config": lambda cls, config: None,
        "get_global_graph_pool": lambda cls: None,
    }
    for name, value in methods.items():
        monkeypatch.setattr(platform, name, classmethod(value))
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    only_stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: only_stage)

    def make(config: EngineConfig) -> Any:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        made = EngineArgs(**engine_args(config)).create_engine_config()
        assert made.use_v2_model_runner
        return made

    return make


def manager(config: Any) -> Any:
    """Return the graphs of the target, as if captured."""
    import torch
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    mode = config.compilation_config.cudagraph_mode
    made = CudaGraphManager(config, torch.device("cpu"), mode, 1 + config.num_speculative_tokens)
    made._graphs_captured = True
    return made


def dispatched(graphs: Any, num_decodes: int, query_len: int) -> tuple[str, int]:
    num_tokens = num_decodes * query_len
    chosen = graphs.dispatch(num_decodes, num_tokens, query_len, 0, max_query_len=query_len)
    return chosen.cg_mode.name, chosen.num_tokens


def drafter_loop(config: Any) -> Callable[[int, int], str]:
    """Return the kind of graph in which the drafter makes all tokens but the first."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
        SpeculatorCudaGraphManager,
    )

    def capture(self: Any, *_: Any) -> None:
        self.graphs = {desc: None for descs in self._capture_descs.values() for desc in descs}
        self._graphs_captured = True

    graphs = SpeculatorCudaGraphManager(
        config, torch.device("cpu"), CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphManager, "capture", capture)
        graphs.capture(*[None] * 6, specialize_spec_tokens=True)

    def mode(num_decodes: int, num_draft_tokens: int) -> str:
        chosen = graphs.dispatch(num_decodes, num_decodes, 1, 0)
        return str(graphs.specialize_spec_tokens(chosen, num_draft_tokens).cg_mode.name)

    return mode


def predicted(graphs: set[Graph], num_decodes: int, arm: Arm) -> tuple[str, int]:
    graph = graph_for(graphs, num_decodes, arm)
    if graph is None:
        return "NONE", num_decodes * (arm.num_draft_tokens + 1)
    return graph.mode, graph.num_tokens


@pytest.mark.parametrize("name", STRATEGIES)
def test_vllm_captures_and_chooses_the_graphs_of_the_plan(
    name: str, tiny: Path, vllm_config: Callable[..., Any]
) -> None:
    from vllm.config import CUDAGraphMode

    strategy, args = STRATEGIES[name]
    limits = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "dtype": "float32"}
    config = EngineConfig(model=str(tiny), num_gpus=1, strategy=strategy, engine_args=limits | args)
    plan = graph_plan(config)
    assert plan is not None
    made = vllm_config(config)
    assert made.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert made.compilation_config.cudagraph_capture_sizes == list(plan.sizes)
    graphs = manager(made)
    captured = [desc for descs in graphs._capture_descs.values() for desc in descs]
    expected = graphs_of(plan)
    assert len(captured) == len(expected)
    assert {(d.num_tokens, d.uniform_token_count) for d in captured} == {
        (g.num_tokens, g.query_len) for g in expected
    }
    for num_decodes, arm in cases(plan):
        chosen = dispatched(graphs, num_decodes, arm.num_draft_tokens + 1)
        assert chosen == predicted(expected, num_decodes, arm), (num_decodes, arm)
        assert chosen[0] != "NONE" or name == "budget"
    loop = drafter_loop(made) if name != "off" else None
    for num_decodes, arm in cases(plan):
        named = arm.num_draft_tokens + 1 in plan.query_lens
        if loop and arm.num_draft_tokens > 1 and named:
            assert loop(num_decodes, arm.num_draft_tokens) == "FULL"
