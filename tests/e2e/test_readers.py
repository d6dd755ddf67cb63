"""Every `tlt` command of the README and the quickstart, in order, as a reader would type them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commands import ROOT, tlt

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


def commands(page: str) -> list[str]:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S))
    lines = re.sub(r"\\\n\s*", "", blocks).splitlines()
    return [line.split("#")[0].strip()[4:] for line in lines if line.startswith("tlt ")]


def test_what_readers_type_works(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    # Each command once, in the order in which a reader meets it.
    found = dict.fromkeys([*commands("docs/quickstart.md"), *commands("README.md")])
    assert len(found) >= 6
    for command in found:
        if "tiny_gcd" in command:
            command += " run.num_steps=2"  # test_train.py runs all of it
        if command == "demo":
            command += " --steps 2"  # test_cli.py looks at what it says
        tlt(command, tmp_path)
    assert (tmp_path / "runs" / "tlt" / "report.html").exists()
    compared = json.loads(tlt("report runs/off runs/tlt --json", tmp_path))["comparisons"][0]
    assert compared["steps"] == 10
    assert compared["rollout"]["median"] > 1.0, compared
