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
    assert found.keys() >= known_args.LIMITS.keys()
    check_args({"max_num_seqs": 8, "enforce_eager": True, "hf_overrides": {"x": 1}, "seed": None})


@needs_vllm
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_num_seq", 8, "max_num_seqs"),
        ("zzz", 8, "remove it"),
        ("max_num_seqs", "8", "int"),
        ("max_num_seqs", True, "int"),
        ("max_num_seqs", 0, "1 to 100000"),
        ("cpu_offload_gb", float("nan"), "float"),
        ("speculative_config", "x", "dict"),
    ],
)
def test_wrong_arguments_are_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_args\.{name} .*{said}"):
        check_args({name: value})


def test_without_vllm_only_numbers_that_plans_need_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_args, "arguments", lambda: None)
    check_args({"anything": object()})
    with pytest.raises(ConfigError, match=r"max_model_len = '4k'"):
        check_args({"max_model_len": "4k"})
