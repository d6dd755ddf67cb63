"""Every result says where it comes from."""

import json
import subprocess
from pathlib import Path

import pytest

from tlt.observe.provenance import commit, cpu, provenance

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
KEYS = {"command", "commit", "date", "cpu", "versions"}


def test_a_record_is_complete_and_serializable() -> None:
    record = provenance("tlt drafter bench")
    assert set(record) == KEYS
    assert record["command"] == "tlt drafter bench"
    assert json.loads(json.dumps(record)) == record


def test_the_cpu_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Xeon 9\nflags\t\t: fpu avx2 amx_bf16 sse\n")
    monkeypatch.setattr("tlt.hardware.CPU_INFO", info)
    found = cpu()
    assert (found["model"], found["features"]) == ("Xeon 9", ["avx2", "amx_bf16"])
    monkeypatch.setattr("tlt.hardware.CPU_INFO", tmp_path / "missing")
    assert cpu()["model"] == "unknown"


def test_the_commit_is_that_of_the_code(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("a = 1\n")
    assert commit(source) is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = commit(source)
    assert clean is not None
    assert len(clean) == 40
    source.write_text("a = 2\n")
    assert commit(source) == f"{clean}-dirty"
    installed = tmp_path / "installed.py"
    installed.write_text("")  # below a checkout, and no part of it
    assert commit(installed) is None


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.json")), ids=lambda p: str(p.relative_to(RESULTS))
)
def test_committed_results_have_one(path: Path) -> None:
    assert set(json.loads(path.read_text())["provenance"]) >= KEYS
