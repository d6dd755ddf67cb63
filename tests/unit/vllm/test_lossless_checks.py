"""Lossy and unsupported settings are refused before an engine starts, with a way out."""

from typing import Any

import pytest

from tlt.config.rollout import EngineConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.errors import ConfigError, LossyError
from tlt.strategy.spec import build_strategy
from tlt.vllm.args import engine_args, max_draft_tokens, strategy_spec
from tlt.vllm.lossless_checks import check_length, check_params, check_sampling, code_arguments

EAGLE = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4}
NGRAM = {"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 4}


def config(**kwargs: Any) -> EngineConfig:
    return EngineConfig(**({"model": "m", "drafter": "d", "strategy": EAGLE} | kwargs))


def speculative(**given: Any) -> dict[str, Any]:
    return {"engine_args": {"speculative_config": given}}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"drafter": None}, ConfigError, "engine.drafter = "),
        ({"strategy": NGRAM, "ngram": None}, ConfigError, "engine.ngram = "),
        ({"ngram": {"min_match": 5, "max_match": 2}}, ConfigError, "min_match = 2"),
        ({"max_draft_tokens": 2}, ConfigError, "set it to 4"),
        ({"engine_args": {"scheduler_cls": "x"}}, ConfigError, "scheduler_cls"),
        ({"engine_args": {"logits_processors": ["x"]}}, LossyError, "logits_processors"),
        ({"engine_args": {"data_parallel_size": 2}}, ConfigError, "pool.num_engines"),
        (
            {"strategy": NGRAM, "engine_args": {"async_scheduling": True}},
            ConfigError,
            "async_scheduling",
        ),
        (speculative(rejection_sample_method="synthetic"), LossyError, "use 'standard'"),
        (speculative(rejection_sample_method="block"), ConfigError, "rejection_sample_method"),
        (speculative(method="medusa"), LossyError, "'eagle3' or 'ngram'"),
        (speculative(synthetic_acceptance_rates=[1.0]), LossyError, "synthetic_acceptance_rates"),
        (speculative(num_speculative_tokens=99), ConfigError, "num_speculative_tokens"),
        ({"engine_args": {"spec_model": "drafter"}}, ConfigError, r"use engine\."),
    ],
)
def test_engines_that_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine_args(config(**settings))


def test_block_verification_is_allowed_on_gpus() -> None:
    args = engine_args(config(num_gpus=1, **speculative(rejection_sample_method="block")))
    assert args["speculative_config"]["rejection_sample_method"] == "block"


@pytest.mark.parametrize("key", ["min_p", "some_future_option"])
def test_sampling_that_is_refused_with_drafts_only(key: str) -> None:
    sampling = SamplingSpec(max_tokens=8, extra={key: 0.1})
    with pytest.raises(LossyError, match=rf"sampling\.extra\.{key}"):
        check_sampling(sampling, speculating=True)
    check_sampling(sampling, speculating=False)
    check_sampling(SamplingSpec(max_tokens=8, extra={"min_tokens": 2, key: 0}), speculating=True)


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1}, {"temperature": 2.5}, {"top_p": 0}]
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        check_sampling(SamplingSpec(**({"max_tokens": 8} | wrong)), speculating=False)


def test_head_room_for_drafts() -> None:
    request = SampleRequest("s", tuple(range(10)), SamplingSpec(max_tokens=85))
    check_length(request, max_model_len=100, max_draft_tokens=4)
    with pytest.raises(ConfigError, match="max_model_len = 101"):
        check_length(request, max_model_len=100, max_draft_tokens=5)
    check_length(request, max_model_len=95, max_draft_tokens=0)


def test_engine_args_pass_through_verbatim() -> None:
    given = speculative(draft_sample_method="x")["engine_args"] | {"max_num_seqs": 7}
    args = engine_args(config(engine_args=given))
    assert args["max_num_seqs"] == 7
    expected = {"draft_sample_method": "x", "model": "d", "num_speculative_tokens": 4}
    assert expected.items() <= args["speculative_config"].items()


@pytest.mark.parametrize(
    ("settings", "use_v2", "scheduler", "worker", "runner"),
    [
        ({}, None, "Scheduler", "CPUWorker", "v1"),
        ({"num_gpus": 2}, None, "AsyncScheduler", "GPUWorker", "v2"),
        ({"num_gpus": 1, "strategy": NGRAM}, None, "AsyncScheduler", "GPUWorker", "v2"),
        # The V1 runner looks n-grams up in the tokens of the last engine step.
        ({"num_gpus": 1, "strategy": NGRAM}, "0", "Scheduler", "GPUWorker", "v1"),
    ],
)
def test_scheduler_worker_and_runner_follow_the_device(
    settings: dict[str, Any],
    use_v2: str | None,
    scheduler: str,
    worker: str,
    runner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if use_v2 is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", use_v2)
    args = engine_args(config(**settings))
    assert args["scheduler_cls"].endswith(f".Adaptive{scheduler}")
    assert args["async_scheduling"] is scheduler.startswith("Async")
    assert args["worker_cls"].endswith(f".Adaptive{worker}")
    assert args["additional_config"]["tlt"]["runner"] == runner
    assert args["tensor_parallel_size"] == settings.get("num_gpus", 1)


def test_engines_without_drafts_get_no_speculative_config() -> None:
    bare = config(drafter=None, strategy={"kind": "off"})
    assert "speculative_config" not in engine_args(bare)
    assert max_draft_tokens(bare) == 0
    assert max_draft_tokens(config(strategy={"kind": "off"}, max_draft_tokens=8)) == 8


def test_ngrams_are_looked_up_by_the_runner_of_the_device() -> None:
    for num_gpus, method in ((0, "ngram"), (1, "ngram_gpu")):
        args = engine_args(config(drafter=None, strategy=NGRAM, num_gpus=num_gpus))
        assert args["speculative_config"]["method"] == method


@pytest.mark.parametrize(("runner", "also"), [(None, {"ngram"}), ("0", set())])
def test_n_grams_draft_beside_a_drafter_where_they_cost_other_engine_steps_nothing(
    runner: str | None, also: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On vLLM's V1 runner a lookup would end asynchronous scheduling in every engine step."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    gpu = config(num_gpus=1, strategy={"kind": "adaptive"})
    arms = build_strategy(strategy_spec(gpu)).arms()
    assert {arm.drafter for arm in arms} == {"off", "eagle3", *also}
    assert engine_args(gpu)["async_scheduling"]


def test_an_emulated_gpu_has_the_draft_lengths_of_gpus() -> None:
    emulated = config(strategy={"kind": "adaptive"}, emulate={"hardware": "h100"})
    arms = build_strategy(strategy_spec(emulated)).arms()
    assert {arm.num_draft_tokens for arm in arms} == {0, 1, 3, 7}


def test_gpu_engines_get_graphs_for_their_arms() -> None:
    table = {"kind": "by_batch_size", "drafter": "eagle3", "schedule": [[4, 6], [16, 2]]}
    limits = {"max_num_seqs": 64}
    gpu = config(num_gpus=1, strategy=table, engine_args=limits)
    args = engine_args(gpu)
    assert args["compilation_config"]["cudagraph_capture_sizes"][-1] == 512
    lengths = args["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert lengths == [[1, 1, 0], [2, 2, 2], [3, 1_000_000, 6]]
    # Room for later strategies with longer drafts, at any batch size.
    for changes, largest in (
        ({"max_draft_tokens": 9}, 640),
        ({"engine_args": limits | {"max_num_batched_tokens": 256}}, 256),
    ):
        args = engine_args(gpu.model_copy(update=changes))
        assert args["compilation_config"]["cudagraph_capture_sizes"][-1] == largest


@pytest.mark.parametrize(
    ("num_gpus", "given"),
    [(0, {"max_num_seqs": 64}), (1, {}), (1, {"max_num_seqs": 64, "enforce_eager": True})],
)
def test_graphs_are_left_to_vllm(num_gpus: int, given: dict[str, Any]) -> None:
    args = engine_args(config(num_gpus=num_gpus, engine_args=given))
    assert "compilation_config" not in args
    lengths = args["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert lengths == [[1, 1_000_000, 4]]


# --- code of others -------------------------------------------------------------------------------

CODE: list[dict[str, Any]] = [
    {"trust_remote_code": True},
    {"worker_extension_cls": "mine.Worker"},
    {"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
    {"logits_processors": ["mine.Processor"]},
    {"distributed_executor_backend": "mine.Executor"},
    {"structured_outputs_config": {"reasoning_parser_plugin": "mine.py"}},
    {"kv_transfer_config": {"kv_connector": "Mine", "kv_connector_module_path": "mine"}},
    {"ec_transfer_config": {"ec_connector": "Mine"}},
    {"compilation_config": {"backend": "mine.backend"}},
    {"compilation_config": {"inductor_passes": {"a": "mine.run"}}},
    {"logging_config": {"pylogging_config_file": "logging.json"}},
    {"log_config_file": "logging.json"},
    {"load_format": "ipc_cache"},
    {"speculative_config": {"model": "mine.Proposer"}},
]


@pytest.mark.parametrize("args", CODE, ids=lambda args: next(iter(args)))
def test_code_of_others_needs_a_permission(args: dict[str, Any]) -> None:
    plain = {"drafter": None, "ngram": None, "strategy": {"kind": "off"}, "engine_args": args}
    with pytest.raises(ConfigError, match=rf"{next(iter(args))}.*allow_code = true"):
        engine_args(config(**plain))
    allowed = engine_args(config(**plain, allow_code=True))
    assert next(iter(args)) in allowed


def test_arguments_that_load_no_code_need_none() -> None:
    args = {
        "trust_remote_code": False,
        "worker_extension_cls": "",
        "distributed_executor_backend": "mp",
        "compilation_config": {"mode": 3, "backend": "inductor"},
        "load_format": "safetensors",
        "speculative_config": {"model": "models/drafter-1.0"},
        "max_model_len": 512,
    }
    assert code_arguments(args) == []


def test_requests_of_other_programs_that_drafts_would_not_honour() -> None:
    with pytest.raises(LossyError, match="min_p"):
        check_params({"temperature": 0.7, "min_p": 1.5})
    check_params({"n": 4, "top_p": 0.9, "seed": 1, "logprobs": 5, "_eos_token_id": 2})
