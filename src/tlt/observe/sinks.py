"""Where metrics go besides the run's own file: TensorBoard, Weights & Biases, Prometheus.

A sink that cannot be opened is a mistake in the settings and stops the run before it starts. A sink
that fails later is logged and dropped; the run continues, and `metrics.jsonl` has every metric. The
libraries are optional and imported when a sink is opened.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tlt.config.train import MetricsConfig
from tlt.errors import ConfigError
from tlt.observe.metrics import METRICS, declared

logger = logging.getLogger(__name__)

Samples = Sequence[Mapping[str, Any]]
"""Samples to read, all with the same keys."""

MAX_TABLE_ROWS = 8
"""Samples of an RL step that W&B gets at most."""


class Sink(Protocol):
    """A receiver of records."""

    def log(self, record: dict[str, float], samples: Samples = ()) -> None:
        """Send the record of an RL step, and samples of it where the sink shows text."""

    def close(self) -> None:
        """Send the rest, and release all resources."""


class TensorBoardSink:
    """An event file in `folder`. It replaces what earlier files say of `purge_step` and later."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        # TensorBoard's EventFileWriter writes in a thread. If a full disk ends that thread, its
        # flush() never returns.
        self._writer = RecordWriter((folder / name).open("xb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def log(self, record: dict[str, float], samples: Samples = ()) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name != "step"
        ]
        step, summary = int(record["step"]), self._summary(value=values)
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class WandbSink:
    """A W&B run, with the settings as its config and a table of samples for every RL step.

    Its id is kept in `run_dir`, for a resumed run to continue it.

    W&B cannot delete records: RL steps that a resumed run repeats appear twice, at the same place
    of the `step` axis. Output, code and git state are not uploaded. W&B sends in the background,
    and `close` waits for the rest: shut down engines first.
    """

    def __init__(self, project: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._table = wandb.Table
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=project,
                dir=run_dir,
                id=id_file.read_text().strip(),
                name=run_dir.name,
                resume="allow",
                config=dict(config),
                allow_val_change=True,  # a resumed run may change some settings
                settings=wandb.Settings(
                    console="off", disable_code=True, disable_git=True, quiet=True
                ),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"metrics.wandb_project: {error} "
                "To continue without a connection, set WANDB_MODE=offline and `wandb sync` later."
            ) from error
        # W&B's own step only rises; ours falls back when a run resumes.
        self._run.define_metric("*", step_metric="step")

    def log(self, record: dict[str, float], samples: Samples = ()) -> None:
        logged: dict[str, Any] = dict(record)
        if samples:
            rows = [list(sample.values()) for sample in samples[:MAX_TABLE_ROWS]]
            logged["samples"] = self._table(columns=list(samples[0]), data=rows)
        self._run.log(logged)

    def close(self) -> None:
        self._run.finish()


def prometheus_name(name: str) -> str:
    """Return the name under which Prometheus shows a metric."""
    return f"tlt_{name.replace('/', '_')}"


class PrometheusSink:
    """An HTTP server of every metric's latest value, on `host` only; port 0 takes a free port."""

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._gauge = Gauge
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            why = f"port: cannot serve at {host}:{port} ({error}); 0 takes a free port"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                why = f"host: {host} is not an address of this machine ({error}); 127.0.0.1 is"
            raise ConfigError(f"metrics.prometheus_{why}") from error

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the server listens on."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def log(self, record: dict[str, float], samples: Samples = ()) -> None:
        for name, value in record.items():
            if name not in self._gauges:  # not earlier: a gauge without a value shows 0
                self._gauges[name] = self._gauge(
                    prometheus_name(name), METRICS[declared(name)], registry=self._registry
                )
            self._gauges[name].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Sinks:
    """Several sinks as one that never raises."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def log(self, record: dict[str, float], samples: Samples = ()) -> None:
        for sink in list(self._sinks):
            try:
                sink.log(record, samples)
            except Exception:  # third-party code may raise anything
                logger.exception(
                    "%s failed at step %s and is dropped", type(sink).__name__, record["step"]
                )
                self._sinks.remove(sink)
                _close(sink)

    def close(self) -> None:
        while self._sinks:
            _close(self._sinks.pop())


def _close(sink: Sink) -> None:
    try:
        sink.close()
    except Exception:
        logger.exception("%s could not be closed", type(sink).__name__)


def open_sinks(
    config: MetricsConfig,
    run_dir: Path,
    resume_step: int,
    settings: Mapping[str, Any] | None = None,
) -> list[Sink]:
    """Open the sinks of the settings. `resume_step` is the last valid RL step; 0 for a new run.

    `settings` are the run's, for sinks that show them.
    """
    wanted: list[tuple[str, Callable[[], Sink]]] = []
    if config.tensorboard:
        # Without a checkpoint, this also purges the previous attempt.
        purge_step = resume_step + 1 if resume_step else 0
        wanted.append(("tensorboard", lambda: TensorBoardSink(run_dir / "tensorboard", purge_step)))
    if config.prometheus_port is not None:
        port = config.prometheus_port
        wanted.append(("prometheus_port", lambda: PrometheusSink(config.prometheus_host, port)))
    if config.wandb_project is not None:
        project = config.wandb_project
        wanted.append(("wandb_project", lambda: WandbSink(project, run_dir, settings or {})))

    sinks: list[Sink] = []
    try:
        for key, make in wanted:
            try:
                sinks.append(make())
            except ImportError as error:
                raise ConfigError(
                    f"metrics.{key}: {error}; run `pip install 'tlt-rl[metrics]'`"
                ) from error
    except BaseException:
        Sinks(sinks).close()
        raise
    return sinks
