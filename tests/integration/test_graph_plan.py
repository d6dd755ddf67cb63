"""vLLM's own classes capture and choose exactly the CUDA graphs that the plan predicts.

The test needs no GPU and no engine: it builds a real `VllmConfig` from our engine arguments, and
the real dispatchers of both model runners. The CPU platform stands in for one with graphs.
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
    "on and off": (arms(0, 4), {"max_num_seqs": 100}),
    "table": (
        {"kind": "by_batch_size", "drafter": "ngram", "schedule": [[4, 6], [16, 4], [32, 2]]},
        {"max_num_seqs": 128},
    ),
    "fixed": (
        {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4},
        {"max_num_seqs": 48},
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

    def make(config: EngineConfig, runner: str) -> Any:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0")
        made = EngineArgs(**engine_args(config)).create_engine_config()
        assert made.use_v2_model_runner == (runner == "v2")
        return made

    return make


def engine(model: Path, strategy: dict[str, Any], **args: Any) -> EngineConfig:
    limits = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "dtype": "float32"}
    return EngineConfig(model=str(model), num_gpus=1, strategy=strategy, engine_args=limits | args)


def manager(config: Any) -> Any:
    """Return the V2 runner's graphs of the target, as if captured."""
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
    """Return the kind of graph in which the V2 runner's drafter makes all tokens but the first."""
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
def test_v2_runner(name: str, tiny: Path, vllm_config: Callable[..., Any]) -> None:
    from vllm.config import CUDAGraphMode

    strategy, args = STRATEGIES[name]
    config = engine(tiny, strategy, **args)
    plan = graph_plan(config)
    assert plan is not None
    made = vllm_config(config, "v2")
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


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "off"])
def test_the_drafters_own_loop(name: str, tiny: Path, vllm_config: Callable[..., Any]) -> None:
    """The drafter's later passes run as one graph per draft length, where attention allows it."""
    strategy, args = STRATEGIES[name]
    config = engine(tiny, strategy, **args)
    plan = graph_plan(config)
    assert plan is not None
    loop = drafter_loop(vllm_config(config, "v2"))
    for num_decodes, arm in cases(plan):
        named = arm.num_draft_tokens + 1 in plan.query_lens
        if arm.num_draft_tokens > 1 and named:
            assert loop(num_decodes, arm.num_draft_tokens) == "FULL"


@pytest.mark.parametrize("name", STRATEGIES)
def test_v1_runner(name: str, tiny: Path, vllm_config: Callable[..., Any]) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    strategy, args = STRATEGIES[name]
    config = engine(tiny, strategy, **args)
    plan = graph_plan(config)
    assert plan is not None
    expected = graphs_of(plan, "v1")
    made = vllm_config(config, "v1")
    longest = 1 + made.num_speculative_tokens
    mode = made.compilation_config.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.ALWAYS, "any", longest
    )
    assert mode.name == ("FULL_AND_PIECEWISE" if name == "off" else "PIECEWISE")
    dispatcher = CudagraphDispatcher(made)
    dispatcher.initialize_cudagraph_keys(mode, longest)
    captured = sum(len(descs) for _, descs in dispatcher.get_capture_descs())
    assert captured == len(expected)
    for num_decodes, arm in cases(plan):
        query_len = arm.num_draft_tokens + 1
        runtime_mode, batch = dispatcher.dispatch(
            num_decodes * query_len, uniform_decode=query_len == longest
        )
        assert (runtime_mode.name, batch.num_tokens) == predicted(expected, num_decodes, arm)


def test_what_vllm_does_without_a_plan(tiny: Path, vllm_config: Callable[..., Any]) -> None:
    """Steps of more than 512 tokens have no graph; only the longest drafts have full graphs."""
    config = engine(tiny, arms(0, 3, 7), max_num_seqs=256, compilation_config={})
    assert graph_plan(config) is None
    made = vllm_config(config, "v2")
    graphs = manager(made)
    assert dispatched(graphs, 128, 8)[0] == "NONE"
    assert dispatched(graphs, 64, 8)[0] == "FULL"
    assert dispatched(graphs, 64, 4)[0] == dispatched(graphs, 64, 1)[0] == "PIECEWISE"
    loop = drafter_loop(made)
    assert loop(64, 7) == "FULL"
    assert loop(64, 3) == "NONE"


def test_vllm_skips_a_larger_full_graph_that_fits(
    tiny: Path, vllm_config: Callable[..., Any]
) -> None:
    """This is why sizes are multiples of all query lengths. Drop it when vLLM takes any graph."""
    config = engine(
        tiny,
        arms(0, 2),
        max_num_seqs=64,
        compilation_config={"cudagraph_capture_sizes": [16, 32, 64]},
        speculative_config={"num_speculative_tokens_per_batch_size": [[1, 1, 0], [2, 64, 2]]},
    )
    graphs = manager(vllm_config(config, "v2"))
    assert dispatched(graphs, 32, 1) == dispatched(graphs, 19, 1) == ("FULL", 32)
    assert dispatched(graphs, 17, 1) == ("PIECEWISE", 32), "18 tokens are captured for 6 x 3"
