"""The code of a page runs: its named blocks become files, and its tests pass."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def named_blocks(page: str) -> dict[str, str]:
    """Return the Python blocks of a page whose first line is a comment with a file's name."""
    blocks = re.findall(r"```python\n(# (\S+\.py)\n.*?)```", (ROOT / page).read_text(), re.S)
    return {name: code for code, name in blocks}


def test_the_code_of_the_development_page_runs(tmp_path: Path) -> None:
    files = named_blocks("docs/development.md")
    tests = sorted(name for name in files if name.startswith("test_"))
    assert tests == ["test_best_so_far.py", "test_copy_drafter.py", "test_shout.py"]
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_environment_of_the_agents_page_works(tmp_path: Path) -> None:
    """A policy that halves the interval reads its answers and gets its reward."""
    pytest.importorskip("transformers")
    from tlt.agents.environment import answer, begin, environment_class, tagged_calls, tool_schemas

    ((name, code),) = named_blocks("docs/agents.md").items()
    (tmp_path / name).write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        cls = environment_class("higher_lower:HigherLower")
        (schema,) = tool_schemas(cls)
        assert schema["function"]["parameters"]["required"] == ["number"]
        said = begin(cls, {"question": "Guess!", "answer": "42"})
        assert said.messages == ("You have 7 tries.",)
        low, high = 1, 101
        while not said.done:
            guess = {"name": "guess", "arguments": {"number": (low + high) // 2}}
            text = f"<tool_call>{json.dumps(guess)}</tool_call>"
            said = answer(cls, said.state, text, tagged_calls)
            if said.messages == ("higher",):
                low = (low + high) // 2 + 1
            else:
                high = (low + high) // 2
        assert (said.messages, said.reward, said.num_errors) == (("right",), 1.0, 0)


def test_the_draws_of_the_page_on_losslessness() -> None:
    """The page's code prints what stands below it, and its table shows the draw of seed 8."""
    page = (ROOT / "docs/lossless.md").read_text()
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.S)
    assert found is not None
    code, printed = found.groups()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == printed
    sums = re.findall(r"^\| [ABC] \| 0\.\d .*\| \**([-\d.]+)\** \|$", page, re.M)
    assert f"8 {sums} draws B" in printed
