"""Arguments that vLLM does not have, or not of this type, are refused without importing vLLM."""

import importlib.util
from typing import Any

import pytest

from tlt.errors import ConfigError
from tlt.vllm import args as known_args
from tlt.vllm.args import arguments, check_args

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@needs_vllm
def test_arguments_and_their_types_are_those_of_the_installed_vllm() -> None:
    found = arguments()
    assert found is not None
    assert len(found) > 100
    for name in known_args.LIMITS:
        assert found[name] in ("int", "int | None", "float")
    check_args({"max_num_seqs": 8, "enforce_eager": True, "hf_overrides": {"x": 1}, "seed": None})


@needs_vllm
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_num_seq", 8, "engine_args.max_num_seq is not a vLLM argument; did you mean max_num_"),
        ("zzz", 8, "engine_args.zzz is not a vLLM argument; remove it"),
        ("max_num_seqs", "8", "engine_args.max_num_seqs = '8' should be int | None; remove it"),
        ("max_num_seqs", True, "engine_args.max_num_seqs = True should be int | None; remove it"),
        ("max_num_seqs", 0, "engine_args.max_num_seqs = 0 should be a number from 1 to 100000; "),
        ("enforce_eager", 1, "engine_args.enforce_eager = 1 should be bool; remove it"),
        ("cpu_offload_gb", float("nan"), "engine_args.cpu_offload_gb = nan should be float; remo"),
        ("speculative_config", "x", "engine_args.speculative_config = 'x' should be dict[str, A"),
    ],
)
def test_wrong_arguments_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_args({name: value})
    assert str(refused.value).startswith(message)


def test_without_vllm_only_numbers_that_plans_need_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_args, "arguments", lambda: None)
    check_args({"anything": object()})
    with pytest.raises(ConfigError, match="max_model_len = '4k' should be a number from 1 to"):
        check_args({"max_model_len": "4k"})
