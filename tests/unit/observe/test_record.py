"""What a run writes about itself: records, sinks, summary."""

from __future__ import annotations

import json
import logging
import math
import re
import resource
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import made_up_run

from tlt.config.train import MetricsConfig
from tlt.errors import ConfigError
from tlt.observe.metrics import METRICS, STAGES, check_names, reference
from tlt.observe.record import MetricsLog, read
from tlt.observe.sinks import (
    MAX_TABLE_ROWS,
    PrometheusSink,
    Samples,
    Sinks,
    TensorBoardSink,
    WandbSink,
    open_sinks,
    prometheus_name,
)
from tlt.observe.stopwatch import Stopwatch
from tlt.observe.summary import stage_table, summary

ROOT = Path(__file__).parents[3]


def record(step: int, **values: float) -> dict[str, float]:
    return {"step": step, "reward/mean": step / 10, **values}


# --- the registry ---------------------------------------------------------------------------------


def test_metrics_are_declared() -> None:
    assert all(name and meaning.endswith(".") for name, meaning in METRICS.items())
    assert all(f"time/{stage}_s" in METRICS for stage in STAGES)
    for values in made_up_run(20):
        check_names(values)
    with pytest.raises(AssertionError, match="reward/maen"):
        check_names({"step": 1, "reward/maen": 1.0})
    check_names({"eval/pass_at_8": 0.5, "eval/aime_24/pass_at_16": 0.5, "eval/aime/mean_tokens": 1})
    for wrong in ("eval/aime/mean", "eval/a/b/reward_mean", "eval/pass_at_k", "reward/aime/mean"):
        with pytest.raises(AssertionError, match=wrong):
            check_names({wrong: 1.0})


def test_the_metrics_page_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference()


# --- the log --------------------------------------------------------------------------------------


def test_a_record_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.append(record(0))
    log.append(record(1, **{"learner/loss": math.nan}))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    first, second = read(tmp_path / "run" / "metrics.jsonl")
    assert first == record(0)
    assert math.isnan(second["learner/loss"])
    log.close()
    for step in (0, 1):  # each step once, also in a resumed run
        with pytest.raises(AssertionError, match="after step 1"):
            MetricsLog(tmp_path / "run" / "metrics.jsonl").append(record(step))


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


@contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size: a write that would is cut short or fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(record(1))
    with full_disk(path.stat().st_size + 5), pytest.raises(OSError, match="disk is full"):
        log.append(record(2))
    log.append(record(2))
    log.close()
    assert read(path) == [record(1), record(2)]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')  # not torn, but broken
    with pytest.raises(ConfigError, match="line 2"):
        read(path)


# --- sinks ----------------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def shown() -> dict[int, float]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert set(events.Tags()["scalars"]) == {"reward/mean"}
        return {e.step: round(e.value, 6) for e in events.Scalars("reward/mean")}

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
    samples = [
        {"question": f"{n} + 1?", "response": "2", "reward": 1.0, "fault": fault, "num_tokens": 3}
        for n, fault in enumerate([None, "timeout"] * 10)
    ]
    ids = []
    for step in (1, 2):
        settings = {"learner": {"lr": 0.125}, "run": {"num_steps": step}}
        config = MetricsConfig(wandb_project="tlt-test")
        (sink,) = open_sinks(config, run_dir, step - 1, settings)
        assert isinstance(sink, WandbSink)
        sink.log(record(step), samples)
        ids.append((run_dir / "wandb_id").read_text())
        sink.close()
        time.sleep(1.1)  # W&B names its folders by the second
    assert ids[0] == ids[1]
    files = sorted(run_dir.glob(f"wandb/offline-run-*/run-{ids[0]}.wandb"))
    assert len(files) == 2
    for text in (b"reward/mean", b"num_steps", b"0.125"):
        assert all(text in file.read_bytes() for file in files)
    tables = sorted(run_dir.glob("wandb/offline-run-*/files/media/table/samples_*.table.json"))
    assert len(tables) == 2
    table = json.loads(tables[0].read_text())
    assert table["columns"] == list(samples[0])
    assert table["data"] == [list(sample.values()) for sample in samples[:MAX_TABLE_ROWS]]


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
    host, port = sink.address

    def scraped() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    assert "tlt_" not in scraped()  # nothing known is not 0
    sink.log(record(1, **{"learner/loss": math.nan}))
    sink.log(record(2, **{"eval/aime/pass_at_4": 0.5}))
    lines = scraped().splitlines()
    assert "tlt_step 2.0" in lines
    assert "tlt_reward_mean 0.2" in lines
    assert "tlt_learner_loss NaN" in lines
    assert "tlt_eval_aime_pass_at_4 0.5" in lines
    assert f"# HELP tlt_reward_mean {METRICS['reward/mean']}" in lines

    # By default the server listens on one address of this machine only.
    assert host == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=2)

    for key, config in (
        ("prometheus_port", MetricsConfig(prometheus_port=port)),
        ("prometheus_host", MetricsConfig(prometheus_port=0, prometheus_host="192.0.2.1")),
    ):
        with pytest.raises(ConfigError, match=f"metrics.{key}: "):
            open_sinks(config, tmp_path, resume_step=0)
    sink.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=2)
    assert threading.active_count() == num_threads


def test_the_dashboard_asks_for_metrics_that_are_exported() -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana" / "tlt.json").read_text())
    queries = [target["expr"] for of in dashboard["panels"] for target in of.get("targets", [])]
    queries += [of["query"]["query"] for of in dashboard["templating"]["list"][1:]]
    names = [re.findall(r"tlt_\w+", query) for query in queries]
    assert all(len(of) == 1 for of in names), names
    assert {of[0] for of in names} <= {prometheus_name(name) for name in METRICS}
    ids = [of["id"] for of in dashboard["panels"]]
    assert len({*ids}) == len(ids)


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


class Memory:
    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[float] = []
        self.fails_at = fails_at
        self.num_closed = 0

    def log(self, values: dict[str, float], samples: Samples = ()) -> None:
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
    """TensorBoard's own writer would never return here."""
    pytest.importorskip("tensorboard")
    sinks = Sinks([TensorBoardSink(tmp_path, 0)])
    (events,) = tmp_path.iterdir()
    with full_disk(events.stat().st_size):
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
    assert result["eval"] == {"eval/reward_mean": result["eval_reward"]}
    assert result["total"]["rollout/output_tokens"] == 50 * 50_000
    assert result["median"]["learner/gap_mean"] == pytest.approx(0.0115, abs=0.001)
    assert "rollout/acceptance_length" not in result["median"]
    json.dumps(result)
    assert summary([]) == {"num_steps": 0, "total": {}, "median": {}}


def test_a_stopwatch_gives_every_second_to_one_stage() -> None:
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
