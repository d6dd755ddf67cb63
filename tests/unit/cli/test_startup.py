"""`import tlt` and `tlt --help` are quick and import no heavy library."""

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
