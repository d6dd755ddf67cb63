"""Settings for a model, data and hardware: what `tlt init` writes is what `--check` accepts."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from called import tlt

pytest.importorskip("torch")
pytest.importorskip("reasoning_gym")

from model_folders import SHAPES
from tlt.config.load import load_config
from tlt.config.rollout import EngineConfig
from tlt.config.train import TrainConfig, resolve_defaults
from tlt.errors import ConfigError
from tlt.models import tiny
from tlt.strategy.spec import build_strategy
from tlt.tasks.file import task_of
from tlt.train.recipe import Hardware, choose, parse_hardware
from tlt.vllm.args import strategy_spec

QWEN3_8B = SHAPES["qwen3_8b"]
GPU_NODE = Hardware(gpus=8, gpu_gib=79.0, host_gib=900.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, num_layers=3)


@pytest.fixture
def outline(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return folder


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_hardware_in_words() -> None:
    found = {
        "cpu": Hardware(cores=4),
        "here": GPU_NODE,
        "8x80": Hardware(gpus=8, gpu_gib=79.0),
        "1x24GB": Hardware(gpus=1, gpu_gib=23.0),
        "4x8x141": Hardware(nodes=4, gpus=8, gpu_gib=139.0),
    }
    for text, hardware in found.items():
        assert parse_hardware(text, GPU_NODE, 4) == hardware
    for text in ("", "gpu", "8", "8x", "0x80", "8x0", "x80", "-1x80", "8x80x", "0x8x80"):
        with pytest.raises(ConfigError, match=r"--hardware .* e\.g\. 8x80"):
            parse_hardware(text, GPU_NODE, 4)


@pytest.mark.parametrize("hardware", ["1x180", "4x8x80", "8x48"])
def test_a_large_model_gets_settings_that_the_check_accepts(outline: Path, hardware: str) -> None:
    code, _, errors = tlt(
        *("init", "--model", str(outline), "--data", "gcd", "--hardware", hardware),
    )
    assert code == 0, errors
    code, output, errors = tlt("train", "run.toml", "--dry-run")
    assert code == 0, errors
    assert "only planned" in output
    text = Path("run.toml").read_text()
    assert "#   a GPU, generating: " in text
    settings = tomllib.loads(text)
    engines = settings["pool"]["num_engines"] * settings["engine"]["num_gpus"]
    assert engines == settings["learner"]["num_ranks"]
    assert settings["tlt"]["harvest"] == (settings["pool"]["num_engines"] > 1)
    # N-grams draft until the drafter that the run makes is worth it.
    config = resolve_defaults(load_config(TrainConfig, Path("run.toml")))
    engine = EngineConfig(model="m", **config.engine.model_dump() | {"drafter": "made by the run"})
    arms = build_strategy(strategy_spec(engine)).arms()
    assert {arm.drafter for arm in arms} == {"off", "ngram", "eagle3"}


def test_what_fits_nowhere_is_refused(outline: Path) -> None:
    code, _, errors = tlt(
        *("init", "--model", str(outline), "--data", "gcd", "--hardware", "1x24"),
    )
    assert code == 2
    assert f"--model {outline} does not fit on 1 GPU of 23 GiB: memory of a GPU" in errors
    assert not Path("run.toml").exists()


def test_a_model_on_this_machine(model: Path) -> None:
    rows = [{"problem": f"{n} + 1?", "answer": str(n + 1)} for n in range(5)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output, errors = tlt(
        *("init", "--model", str(model), "--data", "sums.jsonl", "--hardware", "cpu", "--json"),
    )
    assert code == 0, errors
    found = json.loads(output)
    assert found["memory"][0]["place"] == "host"
    assert found["settings"]["task"]["question_key"] == "problem"
    assert found["settings"]["reward"] == {"function": "math"}
    assert found["settings"]["sampling"]["prompts_per_step"] == 5, "no more than there are"
    code, output, errors = tlt("train", "run.toml", "--check", "--json")
    assert code == 0, errors
    assert json.loads(output)["memory"][0]["need_bytes"] > 0


def test_a_name_that_is_not_utf8_leaves_no_file(model: Path) -> None:
    name = os.fsdecode(b"\xff.jsonl")
    Path(name).write_text('{"question": "1?", "answer": "1"}\n')
    code, _, errors = tlt("init", "--model", str(model), "--data", name, "--hardware", "cpu")
    assert code == 2
    assert "not UTF-8; rename" in errors
    assert not Path("run.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "gcd"], "--model is missing"),
        (["--model", "nowhere", "--data", "gcd", "--hardware", "cpu"], "--model = 'nowhere'"),
        (["--model", "M", "--data", "gdc", "--hardware", "cpu"], "--data: "),
        (["--model", "M", "--data", "n.jsonl", "--hardware", "cpu"], "--data: n.jsonl"),
        (["--model", "M", "--data", "o.jsonl", "--hardware", "cpu"], "column of the answer"),
        (["--model", "M", "--data", "o.csv", "--hardware", "cpu"], "--data o.csv"),
        (["--model", "M", "--out", "x.json"], "x.toml"),
        (["--model", "M", "--out", "there.toml"], "--out there.toml"),
    ],
)
def test_mistakes_name_the_option(model: Path, arguments: list[str], words: str) -> None:
    Path("there.toml").write_text("")
    Path("o.csv").write_text("question,answer\n")
    Path("o.jsonl").write_text('{"question": "1?", "right": "1"}\n')
    code, _, errors = tlt("init", *(str(model) if a == "M" else a for a in arguments))
    assert code == 2
    assert words in " ".join(errors.split())
    assert not Path("run.toml").exists()


def test_what_is_not_given_is_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([str(model), "gcd", "cpu"])
    monkeypatch.setattr(
        "tlt.cli.init.sys.stdin", type("Terminal", (), {"isatty": lambda s: True})()
    )
    monkeypatch.setattr("tlt.cli.init.typer.prompt", lambda *_, **__: next(answers))
    code, _, errors = tlt("init")
    assert code == 0, errors
    assert tomllib.loads(Path("run.toml").read_text())["task"] == {"name": "gcd"}


def test_of_a_model_on_the_hub_only_its_settings_are_read(
    outline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def download(*arguments: Any) -> Path:
        asked.append(arguments)
        return outline

    monkeypatch.setattr("tlt.models.hub.local_folder", download)
    code, output, errors = tlt(
        *("init", "--model", "Qwen/Qwen3-8B", "--data", "gcd", "--hardware", "8x80"),
    )
    assert code == 0, errors
    assert asked == [("Qwen/Qwen3-8B", "--model", ("config.json",))]
    assert tomllib.loads(Path("run.toml").read_text())["policy"]["model"] == "Qwen/Qwen3-8B"
    assert "only planned" in output


def test_a_short_context_gets_short_responses(outline: Path) -> None:
    (outline / "config.json").write_text(json.dumps(QWEN3_8B | {"max_position_embeddings": 2048}))
    text, places = choose("m", outline, task_of("gcd"), GPU_NODE, 'a "b" \\ ü', 5)
    tree = tomllib.loads(text)
    assert tree["run"]["out"] == 'a "b" \\ ü'
    assert tree["sampling"]["max_tokens"] <= 1024
    assert tree["engine"]["engine_args"]["max_model_len"] <= 2048
    assert places
