"""Log files: `run.log` of a run's driver, and one file under `logs/` for each of its actors.

Only processes of TLT call `log_to_file`. It adds a handler to the loggers of `tlt`, to Python's
warnings, and to loggers that the caller names. The root logger and its handlers belong to the
program around TLT and are not changed. Logging never ends a run: where a file cannot be written,
its lines go to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TextIO

Level = Literal["debug", "info", "warning", "error"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the actors of a run log, and the lowest level that they log."""

    folder: str
    """Absolute path of the folder, on storage that all nodes share."""
    level: Level = "info"


def log_to_file(
    folder: str | Path, name: str, level: str, others: Mapping[str, str] | None = None
) -> Callable[[], None]:
    """Append what this process logs to a file in `folder`, and return a function that ends that.

    `name` is the process's name. The successor of a lost engine, such as engine-0.1, appends to the
    file of its place, engine-0.log. `others` names loggers of other libraries, with their levels.
    """
    path = Path(folder) / f"{name.split('.')[0]}.log"
    ours = logging.getLogger("tlt")
    if any(isinstance(handler, _LogFile) and handler.path == path for handler in ours.handlers):
        return lambda: None  # an earlier call has done it
    handler = _LogFile(path, name)
    levels = {"tlt": level, "py.warnings": level, **(others or {})}
    before = {which: logging.getLogger(which).level for which in levels}
    for which, least in levels.items():
        logging.getLogger(which).setLevel(least.upper())
        logging.getLogger(which).addHandler(handler)
    logging.captureWarnings(True)
    handler.report_fault()

    def end() -> None:
        logging.captureWarnings(False)
        for which, least in before.items():
            logging.getLogger(which).removeHandler(handler)
            logging.getLogger(which).setLevel(least)
        handler.close()

    return end


class _LogFile(logging.StreamHandler[TextIO]):
    """Appends lines to a file, or to stderr once the file cannot be written."""

    def __init__(self, path: Path, process: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Lines(process))
        self.path = path
        self.fault: OSError | None = None
        """Why lines go to stderr."""
        try:
            path.parent.mkdir(exist_ok=True)  # run.out itself must exist: it is shared storage
            self.stream = path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self.fault = error

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if self.fault is not None or not isinstance(error, OSError):
            super().handleError(record)
            return
        self._close_file()
        self.stream, self.fault = sys.stderr, error
        self.report_fault()
        self.emit(record)

    def report_fault(self) -> None:
        if self.fault is not None:
            logger.warning("%s cannot be written (%s); logging to stderr", self.path, self.fault)

    def close(self) -> None:
        self._close_file()
        super().close()

    def _close_file(self) -> None:
        if self.fault is None:
            with suppress(OSError):  # a full disk
                self.stream.close()


class _Lines(logging.Formatter):
    """Time, process, level, logger and message, then the traceback."""

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s %(tlt_process)s %(levelname)s %(name)s: %(message)s")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        record.tlt_process = self._process
        return super().format(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        at = datetime.fromtimestamp(record.created).astimezone()
        return at.isoformat(timespec="milliseconds")
