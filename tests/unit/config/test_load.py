"""Old names of settings are refused, and the message says the new one."""

from pathlib import Path
from typing import Any

import pytest

from tlt.config.load import load_config, renewed
from tlt.config.rollout import EngineConfig
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "configs" / "tiny_tail_cpu.toml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.policy={kind='off'}", "engine.policy is called engine.strategy now"),
        ("engine.core_group=mine", "engine.core_group is called debug.core_group now"),
        (
            "sampling.forced_lengths.longest=9",
            "sampling.forced_lengths is called debug.forced_lengths now",
        ),
        (
            "tlt.harvest=unpublished",
            "tlt.harvest = 'unpublished' is called debug.publish_drafters = false now",
        ),
        (
            "sampling.seeded=true",
            "sampling.seeded is no setting any more: every sample has a seed of its own",
        ),
    ],
)
def test_old_settings_say_what_became_of_them(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, RECIPE, [override])
    assert str(refused.value).startswith(f"{RECIPE}: {message}; ")


@pytest.mark.parametrize(("value", "harvests"), [("on", True), ("off", False), ("false", False)])
def test_harvest_is_a_switch(value: str, harvests: bool) -> None:
    config = load_config(TrainConfig, RECIPE, ["tlt.enabled=true", f"tlt.harvest={value}"])
    assert config.tlt.harvests is harvests


def test_engines_alone_are_in_the_group_of_a_run() -> None:
    config = load_config(TrainConfig, RECIPE)
    assert config.debug.core_group == EngineConfig(model="any").core_group


def test_settings_of_an_earlier_version_are_read_by_todays_names() -> None:
    old: dict[str, Any] = {
        "engine": {"policy": {"kind": "off"}, "core_group": "mine"},
        "sampling": {"forced_lengths": {"longest": 9}, "max_tokens": 8, "seeded": True},
        "tlt": {"harvest": "unpublished"},
    }
    assert renewed(old) == {
        "engine": {"strategy": {"kind": "off"}},
        "sampling": {"max_tokens": 8},
        "tlt": {"harvest": True},
        "debug": {
            "core_group": "mine",
            "forced_lengths": {"longest": 9},
            "publish_drafters": False,
        },
    }
    assert renewed({"tlt": {"harvest": "off"}}) == {"tlt": {"harvest": False}}
    assert "policy" in old["engine"], "the old settings are left alone"
    assert "seeded" in old["sampling"]
