"""`import tlt`, `tlt --help` and completion are quick and import no heavy library."""

import os
import resource
import subprocess
import sys

import pytest

from speed import limit


def _children_s() -> float:
    """Return the processor time of ended children, which other processes do not lengthen."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "code",
    [
        "import tlt",
        "import sys; sys.argv = ['tlt', '-h']; from tlt.cli.main import app; app()",
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
        before_s = _children_s()
        done = subprocess.run(
            [sys.executable, "-c", check + code], capture_output=True, text=True, check=True
        )
        best = min(best, _children_s() - before_s)
        assert "HEAVY []" in done.stdout
    assert best < limit(0.7)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("tlt data ", ["gsm8k", "math", "jsonl"]), ("tlt train --d", ["--dry-run"])],
)
def test_the_shell_completes(typed: str, offered: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    code = "import sys; sys.argv = ['tlt']; from tlt.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ) | words | {"_TLT_COMPLETE": "complete_bash"},
    )
    assert done.stdout.split() == offered
