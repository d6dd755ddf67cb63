"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "one_run.ipynb"

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.two_cores]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    text = printed.getvalue()
    assert "ok one_run.toml: 4 steps" in text
    assert len(re.findall(r"^ +[1-4] +\d+\.\d", text, re.M)) >= 4, text
    for words in ("engine-1: generating", "seconds by arm: {", "idle seconds trained"):
        assert words in text, text
    assert (tmp_path / "runs" / "one" / "report.html").exists()
