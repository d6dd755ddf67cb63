"""`tlt demo` without engines: its settings, its refusals, and its verdict on two runs."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from called import tlt
from made_up import made_up_folder

from tlt.cli import demo
from tlt.config.load import load_config
from tlt.config.train import TrainConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo see two cores, although tests at once have one each."""
    monkeypatch.setattr("tlt.cli.demo.os.sched_getaffinity", lambda _: {0, 1})


def test_the_demo_is_half_of_the_emulated_node(tmp_path: Path) -> None:
    mine = tomllib.loads(demo._settings(tmp_path, tmp_path / "model").read_text())
    recipe = tomllib.loads((ROOT / "configs" / "words_emulated_cpu.toml").read_text())
    samples = mine["sampling"]["prompts_per_step"] * mine["sampling"]["group_size"]
    assert mine.pop("metrics") == {"keep_samples": samples}
    recipe["run"] = {"out": str(tmp_path / "off"), "num_steps": demo.STEPS}
    recipe["policy"]["model"] = str(tmp_path / "model")
    for section, key in (("pool", "num_engines"), ("sampling", "prompts_per_step")):
        recipe[section][key] //= 2
    recipe["engine"]["engine_args"]["enforce_eager"] = True  # compiled, engines start later
    assert mine["emulate"].pop("dilation") <= recipe["emulate"].pop("dilation")
    assert mine == recipe


def test_the_demo_says_what_was_emulated_and_what_was_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = FakeRun({"off": 20.0, "tlt": 10.0})
    runs.config = {"emulate": {"hardware": "h100"}, "pool": {"num_engines": 4}}
    with_runs(monkeypatch, runs)
    code, output, errors = tlt("demo", "--out", str(tmp_path / "d"), "--steps", "5")
    assert code == 0, errors
    assert "Emulated: 4 H100s, qwen2.5-7b. Real: engines" in " ".join(output.split())
    assert "noise of the machine" not in output
    assert "Time was emulated: 4 H100s" in (tmp_path / "d" / "report.html").read_text()


def test_folders_may_have_any_name(tmp_path: Path) -> None:
    out = tmp_path / 'a "b" [c] ä\\b'
    out.mkdir()
    path = demo._settings(out, out / "model")
    job = demo.Job("tlt", path, out / "tlt", 3, ("tlt.enabled=true",))
    settings = load_config(TrainConfig, path, job.arguments[2:])
    assert settings.run.out == str(out / "tlt")
    assert settings.policy.model == str(out / "model")
    assert settings.run.num_steps == 3
    assert settings.tlt.enabled


@pytest.mark.parametrize(
    ("patched", "value", "words"),
    [
        ("os.sched_getaffinity", {0}, "two CPU cores"),
        ("find_spec", None, "pip install 'tlt-rl[cpu,train]'"),
        ("shutil.disk_usage", type("Usage", (), {"free": 64 * 2**20}), "--shm-size"),
    ],
)
def test_what_would_fail_later_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched: str, value: object, words: str
) -> None:
    monkeypatch.setattr(f"tlt.cli.demo.{patched}", lambda _: value)
    code, _, errors = tlt("demo", "--out", str(tmp_path / "new"))
    assert code == 2
    assert words in errors
    assert not (tmp_path / "new").exists()


def test_an_earlier_demo_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("")
    code, _, errors = tlt("demo", "--out", str(tmp_path))
    assert code == 2
    assert f"--out {tmp_path}-2" in errors


class FakeRun:
    """A `tlt train` that is over at once; `steps` and `seconds` are those of its rollouts."""

    def __init__(self, seconds: Mapping[str, float], code: int = 0, endless: bool = False) -> None:
        self.seconds, self.code, self.endless = seconds, code, endless
        self.commands: list[list[str]] = []
        self.config: dict[str, Any] = {}

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.commands.append(command)
        out = Path(command[5].partition("=")[2].strip('"'))
        steps = int(command[6].partition("=")[2])
        if not self.code:
            seconds = self.seconds[out.name]
            made_up_folder(
                out,
                steps=steps,
                config={"tlt": {"enabled": out.name == "tlt"}} | self.config,
                arms=(("off", 2.0, 16, 600, 0), ("ngram:3", seconds - 2.0, 2, 200, 150)),
                time__rollout_s=seconds,
            )
            (out / "samples").mkdir()
            order = range(3) if out.name == "off" else (2, 0, 1)  # as they ended
            rows = [json.dumps({"problem": "p", "response": f"{n}"}) + "\n" for n in order]
            (out / "samples" / "step-000001.jsonl").write_text("".join(rows))
        text = "error: no room; make some\n" if self.code else "done\n"
        code = f"import sys; sys.stdout.write({text!r}); sys.exit({self.code})"
        if self.endless:
            now = {
                **{"at_s": 0.0, "num_steps": 10, "what": "step 6: generating", "done": 1.0},
                **{"total": 2.0, "since_s": 0.0, "remaining_s": None, "workers": {}},
                "record": {"step": float(steps)},
            }
            (out / "live.json").write_text(json.dumps(now))
            code = "import signal; signal.pause()"
        return subprocess.Popen([sys.executable, "-c", code], **_)


def with_runs(monkeypatch: pytest.MonkeyPatch, runs: FakeRun) -> None:
    """Let the demo make no model, and start these runs; everything else of `subprocess` stays."""

    def made(out: Path) -> Path:
        out.mkdir(parents=True)
        return out / "model"

    class Subprocess:
        Popen = staticmethod(runs)
        TimeoutExpired = subprocess.TimeoutExpired

    monkeypatch.setattr(demo, "_model", made)
    monkeypatch.setattr(demo, "subprocess", Subprocess)


def test_the_gain_and_what_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = FakeRun({"off": 20.0, "tlt": 10.0})
    with_runs(monkeypatch, runs)
    monkeypatch.setenv("COLUMNS", "160")
    code, output, errors = tlt("demo", "--out", str(tmp_path / "d"), "--steps", "5")
    assert code == 0, errors
    text = " ".join(output.split())
    for part in (
        "TLT made RL steps 1.73x as fast",
        "The rollout alone: 2.00x",
        "n-grams 40.0 1,000 4.00 100%",
        "Samples: 3 of 3 are the same text in both runs.",
    ):
        assert part in text
    assert (tmp_path / "d" / "report.html").read_text().startswith("<!doctype html>")
    assert [command[7:] for command in runs.commands] == [[], ["tlt.enabled=true"]]


def test_no_gain_is_called_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_runs(monkeypatch, FakeRun({"off": 10.0, "tlt": 10.0}))
    code, output, _ = tlt("demo", "--out", str(tmp_path / "d"), "--steps", "5", "--json")
    assert code == 0
    found = json.loads(output)
    assert "within noise" in found["verdict"]
    assert not found["gain"]["is_clear"]
    assert found["samples"] == {"compared": 3, "same": 3}


def test_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_runs(monkeypatch, FakeRun({}, code=2))
    code, _, errors = tlt("demo", "--out", str(tmp_path / "d"))
    assert code == 2
    assert "the run 'off' of the demo ended with exit code 2: no room; make some" in errors
    assert "off.log" in errors


def test_a_slow_machine_makes_fewer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that would not end are ended at their time, and what they did is compared."""
    runs = FakeRun({"off": 20.0, "tlt": 10.0}, endless=True)
    with_runs(monkeypatch, runs)
    monkeypatch.setattr(demo, "LIMIT_S", 1.0)
    code, output, errors = tlt("demo", "--out", str(tmp_path / "d"))
    assert code == 0, errors
    assert output.count("as many as fit into five minutes") == 2
    assert "TLT made RL steps" in output
    assert runs.commands[1][6] == f"run.num_steps={demo.STEPS}"
