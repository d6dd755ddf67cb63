"""Log files: what is in them, and what they leave alone."""

import logging
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tlt.cli.progress import progress_bar
from tlt.logs import LogSettings, log_to_file
from tlt.vllm.environment import log_engine, log_environment

logger = logging.getLogger("tlt.test")
NAMES = ("", "tlt", "vllm", "py.warnings")


def state() -> list[tuple[int, list[logging.Handler], bool]]:
    found = [logging.getLogger(name) for name in NAMES]
    return [(each.level, list(each.handlers), each.propagate) for each in found]


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    before, show = state(), warnings.showwarning
    yield
    logging.captureWarnings(False)
    warnings.showwarning = show
    for name, (level, handlers, _) in zip(NAMES, before, strict=True):
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).handlers[:] = handlers


def test_a_line_has_time_process_level_logger_message_and_traceback(tmp_path: Path) -> None:
    end = log_to_file(tmp_path / "logs", "engine-0", "info")
    logger.info("%d slots", 4)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    end()
    first, second, *rest = (tmp_path / "logs" / "engine-0.log").read_text().splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    assert re.fullmatch(time + " engine-0 INFO tlt.test: 4 slots", first)
    assert second.endswith("engine-0 ERROR tlt.test: it failed")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: broken"


def test_a_successor_and_a_resumed_run_append(tmp_path: Path) -> None:
    for name in ("engine-0", "engine-0.1"):
        end = log_to_file(tmp_path, name, "info")
        logger.info("hello")
        end()
    lines = (tmp_path / "engine-0.log").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["engine-0", "engine-0.1"]


def test_only_lines_of_the_level_and_above_are_written(tmp_path: Path) -> None:
    end = log_to_file(tmp_path, "run", "warning", {"vllm": "ERROR"})
    logger.info("hidden")
    logging.getLogger("vllm.engine").warning("hidden")
    logging.getLogger("vllm.engine").error("of vLLM")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("of Python", stacklevel=1)
    end()
    text = (tmp_path / "run.log").read_text()
    assert "of vLLM" in text
    assert "of Python" in text
    assert "hidden" not in text


def test_the_root_logger_and_other_loggers_are_left_alone(tmp_path: Path) -> None:
    before = state()
    end = log_to_file(tmp_path, "run", "debug")
    assert state()[0] == before[0]
    assert state()[2] == before[2]
    end()
    assert state() == before


def test_a_second_call_in_a_process_changes_nothing(tmp_path: Path) -> None:
    log_to_file(tmp_path, "run", "info")
    log_to_file(tmp_path, "run", "info")()
    logger.info("once")
    assert (tmp_path / "run.log").read_text().count("once") == 1


@pytest.mark.parametrize("missing", ["gone/logs", "file/logs"])
def test_a_folder_that_cannot_be_written_means_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    (tmp_path / "file").touch()
    end = log_to_file(tmp_path / missing, "rank-0", "info")
    logger.info("first")
    logger.info("second")
    end()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == ["WARNING", "INFO", "INFO"]
    assert str(tmp_path / missing / "rank-0.log") in lines[0]


def test_a_disk_that_fills_up_means_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.log").symlink_to("/dev/full")
    end = log_to_file(tmp_path, "run", "info")
    logger.info("first")
    logger.info("second")
    end()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == ["WARNING", "INFO", "INFO"]


def test_settings_reach_all_processes_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    settings = LogSettings(str(tmp_path))
    assert pickle.loads(pickle.dumps(settings)) == settings
    for name, value in log_environment(settings, "engine-1").items():
        monkeypatch.setenv(name, value)
    log_engine()
    log_engine()  # vLLM's plug-in calls it as well
    logger.info("of TLT")
    logging.getLogger("vllm.core").info("hidden")
    logging.getLogger("vllm.core").warning("of vLLM")
    text = (tmp_path / "engine-1.log").read_text()
    assert len(text.splitlines()) == 2
    assert "of TLT" in text
    assert "of vLLM" in text


def test_without_settings_an_engine_leaves_logging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_environment(None, "engine-0") == {}
    before = state()
    log_engine()
    assert state() == before


def test_the_terminal_shows_warnings_in_one_line_without_traceback(tmp_path: Path) -> None:
    console = Console(force_terminal=True, record=True, width=300, color_system=None)
    with progress_bar(console, tmp_path / "run.log"):
        logger.info("hidden")
        logger.warning("[engine-0] is lost")
        try:
            raise ValueError("broken")
        except ValueError:
            logger.exception("it failed")
    text = console.export_text()
    assert "warning [engine-0] is lost" in text
    assert f"error it failed (see {tmp_path}/run.log)" in text
    assert "hidden" not in text
    assert "Traceback" not in text
