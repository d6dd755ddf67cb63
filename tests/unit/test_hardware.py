"""Settings that follow from the processor."""

from pathlib import Path

import pytest

from tlt.config.load import load_config
from tlt.config.train import TrainConfig, resolve_defaults
from tlt.hardware import DtypeChoice, compute_dtype, thread_environment, why_dtype

AMX = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
OLDER = frozenset({"avx2", "avx512f"})


def test_bfloat16_where_the_processor_multiplies_it() -> None:
    assert compute_dtype(flags=AMX) == "bfloat16"
    assert compute_dtype(flags=frozenset({"asimd", "bf16"})) == "bfloat16"
    assert compute_dtype(flags=OLDER) == "float32"
    assert compute_dtype(flags=frozenset()) == "float32"
    assert compute_dtype(on_gpu=True, flags=OLDER) == "bfloat16"


@pytest.mark.parametrize("choice", ["bfloat16", "float32"])
def test_a_choice_of_the_user_stands(choice: DtypeChoice) -> None:
    assert compute_dtype(choice, flags=AMX) == choice
    assert compute_dtype(choice, flags=OLDER) == choice


def test_the_reason_is_said() -> None:
    assert why_dtype(AMX) == "bfloat16: this CPU multiplies it (amx_bf16, avx512_bf16)"
    assert why_dtype(OLDER) == "float32: this CPU only emulates bfloat16"


def test_a_run_is_started_with_the_dtype_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required = ["run.out=x", "run.num_steps=1", "policy.model=m", "task.name=gcd"]
    required += [f"sampling.{key}=2" for key in ("prompts_per_step", "group_size", "max_tokens")]
    recipe = tmp_path / "run.toml"
    recipe.touch()
    config = load_config(TrainConfig, recipe, required)
    assert config.policy.dtype == "auto"
    for flags, dtype in ((AMX, "bfloat16"), (OLDER, "float32")):
        monkeypatch.setattr("tlt.hardware.cpu_flags", lambda flags=flags: flags)
        assert resolve_defaults(config).policy.dtype == dtype
    chosen = load_config(TrainConfig, recipe, [*required, "policy.dtype=bfloat16"])
    assert resolve_defaults(chosen).policy.dtype == "bfloat16"
    on_gpus = load_config(TrainConfig, recipe, [*required, "engine.num_gpus=1"])
    assert resolve_defaults(on_gpus).policy.dtype == "bfloat16"


def test_threads_do_not_spin_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert thread_environment() == {"GOMP_SPINCOUNT": "0"}
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert thread_environment() == {"GOMP_SPINCOUNT": "1000"}
