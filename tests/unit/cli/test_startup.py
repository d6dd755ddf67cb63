"""`import tlt`, `tlt --help` and completion are quick and import no heavy library."""

import os
import subprocess
import sys
import time

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import tlt",
        "import sys; sys.argv = ['tlt', '--help']; from tlt.cli.main import app; app()",
    ],
)
def test_light(code: str) -> None:
    check = (
        "import atexit, sys\n"
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'numpy'}\n"
        "atexit.register(lambda: print('HEAVY', sorted(heavy & set(sys.modules))))\n"
    )
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", check + code], capture_output=True, text=True, check=True
        )
        best = min(best, time.perf_counter() - started)
        assert "HEAVY []" in done.stdout
    assert best < 1.0


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tlt tr", ["train"]),
        ("tlt data ", ["gsm8k", "math", "jsonl"]),
        ("tlt train --d", ["--dry-run"]),
        ("tlt bench s", ["strategy", "same"]),
    ],
)
def test_the_shell_completes(typed: str, offered: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv = ['tlt']; from tlt.cli.main import main; main()",
        ],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ) | words | {"_TLT_COMPLETE": "complete_bash"},
    )
    assert done.stdout.split() == offered
