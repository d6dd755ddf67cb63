import json
import logging
import math
import random
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.config.train import MetricsConfig
from tlt.errors import ConfigError
from tlt.observe.metrics import METRICS, STAGES, check_names, reference
from tlt.observe.record import MetricsLog, read
from tlt.observe.sinks import PrometheusSink, Sinks, TensorBoardSink, WandbSink, open_sinks
from tlt.observe.summary import stage_table, summary
from tlt.report.plot import plot_run, smoothed

ROOT = Path(__file__).parents[3]


def record(step: int, **values: float) -> dict[str, float]:
    return {"step": step, "reward/mean": step / 10, **values}


def made_up_run(num_steps: int) -> list[dict[str, float]]:
    """A record for every step, as a run would write them, that learns and grows its answers."""
    draw = random.Random(0)
    records = [{"step": 0, "eval/reward_mean": 0.1, "time/eval_s": 9.0}]
    for step in range(1, num_steps + 1):
        done = step / num_steps
        median_tokens = 200 * (1 + done) * draw.uniform(0.9, 1.1)
        seconds = {
            "time/rollout_s": 40 + 20 * done + draw.uniform(-5, 5),
            "time/reward_wait_s": draw.uniform(0.1, 1),
            "time/update_s": 18 + draw.uniform(-1, 1),
            "time/sync_s": 2.0,
            "time/checkpoint_s": 0.0 if step % 10 else 4.0,
            "time/other_s": 0.5,
        }
        if step % 10 == 0:
            seconds["time/eval_s"] = 9.0
        values = {
            "step": step,
            "reward/mean": min(1, 0.1 + 0.7 * done + draw.gauss(0, 0.06)),
            "response/median_tokens": median_tokens,
            "response/p99_tokens": median_tokens * 7,
            "response/longest_tokens": min(4096, median_tokens * draw.uniform(8, 16)),
            "rollout/output_tokens": 50_000,
            "rollout/tokens_per_s": 50_000 / seconds["time/rollout_s"],
            "learner/tokens_per_s": 60_000 / seconds["time/update_s"],
            "learner/gap_mean": 0.01 + draw.uniform(0, 0.003),
            **seconds,
            "time/step_s": sum(seconds.values()),
        }
        if step % 10 == 0:
            values["eval/reward_mean"] = 0.12 + 0.68 * done
        records.append(values)
    return records


# --- the registry ---------------------------------------------------------------------------------


def test_metrics_are_declared() -> None:
    assert all(name == metric.name and metric.meaning for name, metric in METRICS.items())
    assert all(f"time/{stage}_s" in METRICS for stage in STAGES)
    for values in made_up_run(20):
        check_names(values)
    with pytest.raises(AssertionError, match="undeclared metrics: reward/maen"):
        check_names({"step": 1, "reward/maen": 1.0})


def test_the_metrics_page_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference()


# --- the log --------------------------------------------------------------------------------------


def test_a_record_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    assert log.last_step is None
    log.append(record(0))
    log.append(record(1, **{"learner/loss": math.nan}))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    first, second = read(tmp_path / "run" / "metrics.jsonl")
    assert first == record(0)
    assert math.isnan(second["learner/loss"])
    assert log.last_step == 1
    log.close()


def test_each_step_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(record(3))
    for step in (2, 3):
        with pytest.raises(AssertionError, match="after step 3"):
            log.append(record(step))
    with pytest.raises(AssertionError, match="undeclared"):
        log.append(record(4, made_up=1))
    log.close()
    again = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(AssertionError, match="after step 3"):
        again.append(record(3))
    again.close()


@given(num=st.integers(1, 6), cut=st.integers(0, 60), step=st.integers(-1, 7))
def test_resume_after_a_kill_anywhere(
    tmp_path_factory: pytest.TempPathFactory, num: int, cut: int, step: int
) -> None:
    """Whatever is left of the last line, a resumed run ends with every step once."""
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    log = MetricsLog(path)
    for index in range(num):
        log.append(record(index))
    log.close()
    last = len(path.read_bytes().splitlines(keepends=True)[-1])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - min(cut, last))
    left = num - (cut > 0)
    assert read(path) == [record(i) for i in range(left)]

    log = MetricsLog(path)
    log.rewind(step)
    start = min(step + 1, left)
    assert read(path) == [record(i) for i in range(start)]
    for index in range(start, 8):
        log.append(record(index))
    log.close()
    assert read(path) == [record(i) for i in range(8)]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(record(1))
    whole = log._file

    class Full:
        def write(self, line: bytes) -> int:
            return whole.write(line[:5])

        def __getattr__(self, name: str) -> object:
            return getattr(whole, name)

    log._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk is full"):
        log.append(record(2))
    log._file = whole
    log.append(record(2))
    log.close()
    assert read(path) == [record(1), record(2)]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read(path)


# --- sinks ----------------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def shown() -> dict[int, float]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert set(events.Tags()["scalars"]) == {"reward/mean"}
        return {e.step: pytest.approx(e.value) for e in events.Scalars("reward/mean")}

    config = MetricsConfig(tensorboard=True)
    (sink,) = open_sinks(config, tmp_path, resume_step=0)
    for step in range(6):
        sink.log(record(step))
    assert shown() == {step: step / 10 for step in range(6)}  # before it is closed
    sink.close()

    # Steps 4 and 5 came after the checkpoint; the resumed run gets as far as step 4.
    (sink,) = open_sinks(config, tmp_path, resume_step=3)
    sink.log({"step": 4, "reward/mean": 0.9})
    sink.close()
    assert shown() == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.9}

    (sink,) = open_sinks(config, tmp_path, resume_step=0)
    sink.log(record(0))
    sink.close()
    assert shown() == {0: 0.0}


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    run_dir = tmp_path / "run"
    ids = []
    for step in (1, 2):
        (sink,) = open_sinks(MetricsConfig(wandb_project="tlt-test"), run_dir, resume_step=step - 1)
        assert isinstance(sink, WandbSink)
        sink.log(record(step))
        ids.append(sink.id)
        sink.close()
        time.sleep(1.1)  # W&B names its folders by the second
    assert ids[0] == ids[1] == (run_dir / "wandb_id").read_text()
    files = sorted(run_dir.glob(f"wandb/offline-run-*/run-{ids[0]}.wandb"))
    assert len(files) == 2
    assert all(b"reward/mean" in file.read_bytes() for file in files)


def test_wandb_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def no_key(**settings: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", no_key)
    with pytest.raises(ConfigError, match=r"metrics.wandb_project: No API key.*WANDB_MODE=offline"):
        open_sinks(MetricsConfig(wandb_project="p"), tmp_path, resume_step=0)


def test_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    num_threads = threading.active_count()
    (sink,) = open_sinks(MetricsConfig(prometheus_port=0), tmp_path, resume_step=0)
    assert isinstance(sink, PrometheusSink)

    def scraped() -> str:
        address = f"http://127.0.0.1:{sink.port}/metrics"
        with urllib.request.urlopen(address, timeout=5) as answer:
            return str(answer.read().decode())

    assert "tlt_" not in scraped()  # nothing known is not 0
    sink.log(record(1, **{"learner/loss": math.nan}))
    sink.log(record(2))
    lines = scraped().splitlines()
    assert "tlt_step 2.0" in lines
    assert "tlt_reward_mean 0.2" in lines
    assert "tlt_learner_loss NaN" in lines
    assert f"# HELP tlt_reward_mean {METRICS['reward/mean'].meaning}" in lines

    # The default is this machine only, and there the one address.
    assert sink._server.server_address == ("127.0.0.1", sink.port)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", sink.port), timeout=2)

    with pytest.raises(ConfigError, match=r"metrics.prometheus_port: cannot serve at 127.0.0.1"):
        open_sinks(MetricsConfig(prometheus_port=sink.port), tmp_path, resume_step=0)
    sink.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", sink.port), timeout=2)
    assert threading.active_count() == num_threads


def test_prometheus_at_a_foreign_address(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    config = MetricsConfig(prometheus_port=0, prometheus_host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"metrics.prometheus_host: 192.0.2.1 is no address"):
        open_sinks(config, tmp_path, resume_step=0)


@pytest.mark.parametrize(
    ("key", "library", "value"),
    [
        ("tensorboard", "tensorboard.compat.proto.event_pb2", True),
        ("wandb_project", "wandb", "p"),
        ("prometheus_port", "prometheus_client", 0),
    ],
)
def test_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, library: str, value: object
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"metrics.{key}: .*pip install 'tlt-rl\[metrics\]'"):
        open_sinks(MetricsConfig.model_validate({key: value}), tmp_path, resume_step=0)


def test_no_sinks_by_default(tmp_path: Path) -> None:
    assert open_sinks(MetricsConfig(), tmp_path, resume_step=0) == []
    assert list(tmp_path.iterdir()) == []


class Memory:
    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[float] = []
        self.fails_at = fails_at
        self.num_closed = 0

    def log(self, values: dict[str, float]) -> None:
        if values["step"] == self.fails_at:
            raise ConnectionError("gone")
        self.steps.append(values["step"])

    def close(self) -> None:
        self.num_closed += 1
        if self.fails_at is not None:
            raise ConnectionError("still gone")


def test_a_failing_sink_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    first, failing, last = Memory(), Memory(fails_at=2), Memory()
    sinks = Sinks([first, failing, last])
    with caplog.at_level(logging.ERROR):
        for step in range(1, 5):
            sinks.log(record(step))
    sinks.close()
    sinks.close()
    assert first.steps == last.steps == [1, 2, 3, 4]
    assert failing.steps == [1]
    assert [s.num_closed for s in (first, failing, last)] == [1, 1, 1]
    dropped = [r for r in caplog.records if "Memory failed at step 2" in r.message]
    assert len(dropped) == 1
    assert dropped[0].exc_info


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TensorBoard's own writer would wait for ever here."""
    pytest.importorskip("tensorboard")
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    from tensorboard.summary.writer.record_writer import RecordWriter

    sink = TensorBoardSink(tmp_path)
    sink._writer.close()
    sink._writer = RecordWriter(Path("/dev/full").open("wb"))  # noqa: SIM115
    sinks = Sinks([sink])
    sinks.log(record(1))
    sinks.log(record(2))
    assert sum("TensorBoardSink failed" in r.message for r in caplog.records) == 1


# --- looking back ---------------------------------------------------------------------------------


def test_stage_table() -> None:
    records = made_up_run(50)
    table = stage_table(records)
    assert [stage for stage, _, _ in table] == list(STAGES)
    assert sum(share for _, _, share in table) == pytest.approx(1)
    by_stage = {stage: (median_s, share) for stage, median_s, share in table}
    assert by_stage["checkpoint"][0] == 4.0  # of the steps that had one
    assert by_stage["rollout"][1] > by_stage["update"][1] > by_stage["sync"][1]
    assert stage_table([]) == []
    assert stage_table([{"step": 1, "time/sync_s": 0.0}]) == []


def test_summary() -> None:
    records = made_up_run(50)
    result = summary(records)
    assert result["num_steps"] == 50  # what is measured before the first step is none
    assert result["reward"]["first_fifth"] < 0.3 < 0.6 < result["reward"]["last_fifth"]
    assert result["eval_reward"] == {"first": 0.1, "last": pytest.approx(0.8)}
    assert result["total"]["rollout/output_tokens"] == 50 * 50_000
    assert result["median"]["learner/gap_mean"] == pytest.approx(0.0115, abs=0.001)
    assert "rollout/acceptance_length" not in result["median"]
    json.dumps(result)
    assert summary([]) == {"num_steps": 0, "total": {}, "median": {}}


def test_smoothing() -> None:
    assert smoothed([], 3) == []
    assert smoothed([1, 2, 6], 3) == [1.5, 3, 4]


@pytest.mark.parametrize("num_steps", [0, 1, 60])
def test_plot(tmp_path: Path, num_steps: int) -> None:
    pytest.importorskip("matplotlib")
    out = plot_run(made_up_run(num_steps), tmp_path / "run.png", "A run")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_plot_of_little(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_run([{"step": 1}], tmp_path / "bare.png", "A run")
    plot_run([{"step": 1, "learner/gap_mean": 0.01}], tmp_path / "gap.png", "A run")
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_run([], tmp_path / "none.png", "A run")


def test_a_stopwatch_gives_every_second_to_one_stage() -> None:
    from tlt.observe.stopwatch import Stopwatch

    now = 100.0
    watch = Stopwatch(lambda: now)
    now += 2
    watch.skip()
    now += 5
    watch.lap("rollout")
    now += 1
    watch.lap("update")
    now += 4
    watch.lap("rollout")
    record = watch.record()
    assert record["time/rollout_s"] == 9
    assert record["time/update_s"] == 1
    assert record["time/other_s"] == 2
    assert record["time/step_s"] == 12
