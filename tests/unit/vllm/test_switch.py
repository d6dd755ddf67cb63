"""What `TLT_CONFIG` changes in a program's arguments of vLLM, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from tlt.contracts import Arm
from tlt.errors import ConfigError, LossyError
from tlt.strategy.spec import build_strategy
from tlt.vllm.switch import Wiring, read_settings, wire

NGRAMS = "strategy.kind=fixed strategy.drafter=ngram strategy.num_draft_tokens=4"


def wired(text: str, on_gpu: bool = False, **given: Any) -> Wiring:
    found = wire(text, {"model": "models/policy"} | given, on_gpu, lambda: "generate")
    assert found is not None
    return found


@pytest.fixture
def drafter(tmp_path: Path) -> str:
    (tmp_path / "drafter").mkdir()
    return str(tmp_path / "drafter")


# --- settings ---------------------------------------------------------------------------------


def test_words_keep_quotes_and_blanks_within_them() -> None:
    text = 'drafter="my models/d" strategy={kind="random",arms=[["ngram", 2], ["off", 0]]}'
    with pytest.raises(ConfigError, match="without blanks"):
        read_settings(text)
    settings = read_settings(text.replace(", ", ","))
    assert settings.drafter == "my models/d"
    assert settings.strategy["arms"] == [["ngram", 2], ["off", 0]]


def test_settings_come_from_a_file_and_words_change_it(tmp_path: Path) -> None:
    file = tmp_path / "tlt.toml"
    file.write_text('drafter = "models/d"\nmax_draft_tokens = 4\n[strategy]\nkind = "off"\n')
    assert read_settings(str(file)).max_draft_tokens == 4
    assert read_settings(f"{file} strategy.kind=adaptive").strategy == {"kind": "adaptive"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere.toml", "nowhere.toml"),
        ("draftr=models/d", "drafter"),
        ("num_cores=2", "num_cores"),
        ("max_draft_tokens=99", "max_draft_tokens"),
    ],
)
def test_wrong_settings_are_explained(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wired(text)


# --- what changes -----------------------------------------------------------------------------


def test_an_engine_gets_scheduler_worker_and_drafts() -> None:
    changes = wired(NGRAMS, async_scheduling=True, additional_config={"mine": 1}).changes
    assert changes["scheduler_cls"].endswith(".AdaptiveScheduler")
    assert changes["worker_cls"].endswith(".AdaptiveCPUWorker")
    assert changes["speculative_config"]["method"] == "ngram"
    assert changes["additional_config"]["tlt"]["embedded"]
    assert changes["additional_config"]["mine"] == 1
    assert changes["async_scheduling"] is False, "vLLM schedules synchronously on CPUs"
    assert changes["weight_transfer_config"] == {"backend": "tlt_shm"}
    # Everything else stays the program's.
    assert changes.keys() == {
        *("scheduler_cls", "worker_cls", "speculative_config", "additional_config"),
        *("weight_transfer_config", "async_scheduling"),
    }


def test_a_gpu_engine_drafts_with_its_drafter(drafter: str) -> None:
    changes = wired(
        f"drafter={drafter}",
        on_gpu=True,
        tensor_parallel_size=2,
        max_num_seqs=8,
        sleep_preserve_parameter_names=["mine.*"],
    ).changes
    assert changes["worker_cls"].endswith(".AdaptiveGPUWorker")
    assert changes["speculative_config"]["model"] == drafter
    assert changes["sleep_preserve_parameter_names"] == ["mine.*", "draft.*"]
    assert "compilation_config" in changes
    assert "tensor_parallel_size" not in changes


def test_the_programs_graphs_and_weight_transfer_stay(drafter: str) -> None:
    changes = wired(
        f"drafter={drafter}",
        on_gpu=True,
        max_num_seqs=8,
        compilation_config={"mode": 0},
        weight_transfer_config={"backend": "nccl"},
    ).changes
    assert "compilation_config" not in changes
    assert "weight_transfer_config" not in changes


def test_a_drafter_is_loaded_although_the_program_loads_its_policy_later(drafter: str) -> None:
    """Frameworks that send the policy start engines with dummy weights; drafters come from disk."""
    speculative = wired(f"drafter={drafter}", load_format="dummy").changes["speculative_config"]
    assert speculative["draft_load_config"] == {"load_format": "auto"}
    assert "draft_load_config" not in wired(f"drafter={drafter}").changes["speculative_config"]
    assert (
        "draft_load_config" not in wired(NGRAMS, load_format="dummy").changes["speculative_config"]
    )


def test_a_strategy_without_drafts_still_measures() -> None:
    changes = wired("strategy.kind=off").changes
    assert "speculative_config" not in changes
    assert changes["additional_config"]["tlt"]["strategy"] == {"kind": "off"}


def test_the_default_strategy_chooses_among_all_arms() -> None:
    found = wired("ngram.min_match=2")
    spec = found.changes["additional_config"]["tlt"]["strategy"]
    assert build_strategy(spec).arms() == {Arm(), *(Arm("ngram", k) for k in (2, 4, 8))}
    assert "n-grams" in found.message
    assert "ngram:8" in found.message


# --- what is left alone -----------------------------------------------------------------------


def test_engines_are_left_alone_without_the_variable_and_if_ours_or_for_pooling() -> None:
    ours = {"model": "m", "additional_config": {"tlt": {}}}
    assert wire(" ", {"model": "m"}, False, lambda: "generate") is None
    assert wire(NGRAMS, ours, False, lambda: "generate") is None
    assert wire(NGRAMS, {"model": "m"}, False, lambda: "pooling") is None


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheduler_cls": "my.Scheduler"}, "scheduler_cls"),
        ({"worker_cls": "my.Worker"}, "worker_cls"),
        ({"speculative_config": {"method": "ngram"}}, 'TLT_CONFIG="strategy.kind=adaptive"'),
        ({"speculative_config": {"model": "models/d"}}, 'TLT_CONFIG="drafter=models/d"'),
        ({"spec_model": "models/d"}, 'TLT_CONFIG="drafter=models/d"'),
        ({"data_parallel_size": 2}, "use 1"),
        ({"additional_config": "mine"}, "additional_config"),
    ],
)
def test_arguments_that_tlt_cannot_work_with(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wired(NGRAMS, **given)


@pytest.mark.parametrize("key", ["logits_processors", "watermark_config"])
def test_arguments_that_change_samples(key: str) -> None:
    given: dict[str, Any] = {key: ["mine"]}
    with pytest.raises(LossyError, match=key):
        wired(NGRAMS, **given)


def test_a_drafter_must_be_a_folder(drafter: str) -> None:
    with pytest.raises(ConfigError, match=f"{drafter}-not"):
        wired(f"drafter={drafter}-not")


def test_a_drafter_of_another_model(drafter: str, tmp_path: Path) -> None:
    """Without this check, vLLM fails deep inside a matrix product."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 50}))
    Path(drafter, "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    narrow = {"hidden_size": 32, "vocab_size": 50}
    Path(drafter, "config.json").write_text(json.dumps(narrow | {"target_hidden_size": 64}))
    wired(f"drafter={drafter}", model=str(tmp_path))
    Path(drafter, "config.json").write_text(json.dumps(narrow))
    with pytest.raises(ConfigError, match=r"hidden_size.*32.*64"):
        wired(f"drafter={drafter}", model=str(tmp_path))


def test_a_drafter_by_its_id_on_the_hub(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: {"me/eagle3": drafter}[name])
    assert wired("drafter=me/eagle3").changes["speculative_config"]["model"] == drafter


def test_a_drafter_in_place_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    with pytest.raises(ConfigError, match=f"drafter={tmp_path}"):
        wired(NGRAMS, model=str(tmp_path))
