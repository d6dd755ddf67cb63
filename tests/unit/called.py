"""The `tlt` command, called in this process."""

from __future__ import annotations

import contextlib
import io

import pytest

from tlt.cli.main import run


def tlt(*arguments: str) -> tuple[int, str, str]:
    """Return the exit code, the output and the errors of a command."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as end,
    ):
        run(list(arguments))
    return int(end.value.code or 0), output.getvalue(), errors.getvalue()
