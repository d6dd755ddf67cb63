"""Keys that do not exist and values that no run can use are refused with a way out."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from tlt.config.load import load_config, read_toml
from tlt.config.rollout import EngineConfig
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "configs" / "tiny_tail_cpu.toml"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learner.lrr=1", "did you mean lr?"),
        ("learner.learning_rate=1", "did you mean lr?"),
        ("zzz.a=1", "known here: run, policy"),
    ],
)
def test_a_wrong_key_is_named_with_a_suggestion(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, RECIPE, [override])
    message = str(refused.value)
    assert override.split("=")[0].removesuffix(".a") in message
    assert hint in message


@pytest.mark.parametrize(("value", "harvests"), [("on", True), ("off", False), ("false", False)])
def test_harvest_is_a_switch(value: str, harvests: bool) -> None:
    config = load_config(TrainConfig, RECIPE, ["tlt.enabled=true", f"tlt.harvest={value}"])
    assert config.tlt.harvests is harvests


def test_engines_alone_are_in_the_group_of_a_run() -> None:
    config = load_config(TrainConfig, RECIPE)
    assert config.debug.core_group == EngineConfig(model="any").core_group


def numbers(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings that are numbers."""
    for name, field in schema.model_fields.items():
        if get_origin(field.annotation) is list:  # its settings have a place in their names
            continue
        kinds = (field.annotation, *get_args(field.annotation))
        if {int, float} & {*kinds}:
            yield f"{prefix}{name}"
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from numbers(kind, f"{prefix}{name}.")


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e308", str(10**30)])
def test_no_setting_takes_a_number_that_is_none(value: str) -> None:
    names = list(numbers(TrainConfig))
    assert len(names) > 50
    for name in names:
        with pytest.raises(ConfigError) as refused:
            load_config(TrainConfig, RECIPE, [f"{name}={value}"])
        # A number, or a description of it, and a way out.
        assert re.search(rf"{re.escape(name)} .*should be .*; ", str(refused.value)), refused.value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lr=inf", "learner.lr = inf should be a finite number; e.g. 1e-06"),
        ("learner.lr=5", "learner.lr = 5 should be less than or equal to 1; e.g. 1e-06"),
        (
            "reward.num_workers=100000",
            "reward.num_workers = 100000 should be less than or equal to 1024; e.g. 1",
        ),
        ("pool.num_engines=1000000000", "pool.num_engines = 1000000000 should be less than"),
        ("run.seed=" + "9" * 5000, "run.seed = '9999"),
        ("learner.lr=" + "[" * 5000, "learner.lr = '[[["),
        ("learner.lr=1e-6\nrun.seed=3", r"learner.lr = '1e-6\nrun.seed=3' should be a valid num"),
        ('run.out="a\\u0000b"', r"run.out = 'a\x00b' should be text without NUL"),
    ],
)
def test_values_that_no_run_can_use(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, RECIPE, [override])
    assert str(refused.value).startswith(f"{RECIPE}: {message}")
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 5000, "is not valid TOML"),
        (b"a = " + b"9" * 5000, "is not valid TOML"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_files_that_no_parser_can_read(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"run\.toml {message}.*; "):
        read_toml(path)


def test_a_name_of_too_many_parts_is_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"is not section\.key=value; e\.g\. learner\.lr=1e-6"):
        load_config(TrainConfig, RECIPE, ["engine.engine_args." + "a." * 2000 + "b=1"])
