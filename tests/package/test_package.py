"""The wheel and the sources: what is in them, and that an empty environment runs TLT from them.

`make check-package` runs this file. The wheel is built from the sources, as an index would have
it. The empty environment gets the wheel and its few dependencies from the index. It then borrows
the large packages (torch, vLLM, Ray) of the environment that runs this test.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from speed import limit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = [pytest.mark.slow, pytest.mark.two_cores]


def run(command: list[str | Path], folder: Path, seconds: float = 300, code: int = 0) -> str:
    """Run a command without this checkout on its path, and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=limit(seconds), env=environment
    )
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said
    return said if code else done.stdout


def environment(folder: Path) -> Path:
    """Make an empty environment, and return its folder of programs."""
    run([sys.executable, "-m", "venv", folder], ROOT)
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sources, and the wheel from the sources."""
    folder = tmp_path_factory.mktemp("built")
    programs = environment(folder / "builder")
    run([programs / "pip", "install", "--quiet", "build"], folder)
    run([programs / "python", "-m", "build", "--outdir", folder / "dist", ROOT], folder, 600)
    return folder / "dist"


@pytest.fixture(scope="module")
def programs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an empty environment, with what it asks for."""
    programs = environment(tmp_path_factory.mktemp("empty") / "venv")
    (wheel,) = built.glob("*.whl")
    run([programs / "pip", "install", "--quiet", wheel], built)
    return programs


@pytest.fixture(scope="module")
def borrowing(programs: Path) -> Path:
    """Let the environment borrow the large packages, after all that it has itself."""
    code = "import site; print(site.getsitepackages()[0])"
    place = Path(run([programs / "python", "-c", code], ROOT).strip())
    (place / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return programs


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"tlt_rl-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        entry_points = file.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "tlt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if not name.startswith("tlt_rl-")} == wanted
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for line in ("tlt = tlt.cli.main:main", "tlt = tlt.vllm.plugin:register"):
        assert line in entry_points


def test_the_sources_hold_recipes_tests_and_pages(built: Path) -> None:
    (sources,) = built.glob("*.tar.gz")
    top = f"tlt_rl-{PROJECT['version']}/"
    with tarfile.open(sources) as file:
        names = {name.removeprefix(top) for name in file.getnames()}
    for folder, pattern in (("configs", "*.toml"), ("docs", "*.md"), ("tests", "**/*.py")):
        wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob(pattern)}
        assert wanted <= names
    assert {"Makefile", "LICENSE", "CHANGELOG.md", "requirements-cpu.lock", ".ci/run"} <= names
    assert not [name for name in names if name.startswith(("models", "runs", ".venv"))]


def test_an_empty_environment_runs_the_command(programs: Path, tmp_path: Path) -> None:
    """Without torch, vLLM and Ray, the command says what is missing and how to get it."""
    assert run([programs / "tlt", "--version"], tmp_path) == f"tlt {PROJECT['version']}\n"
    for words in ("simulate --json", "models tiny --out tiny", "verify"):
        said = run([programs / "tlt", *words.split()], tmp_path, code=2)
        assert "pip install 'tlt-rl[" in said
    # The table of the doctor may wrap its lines.
    assert "tlt-rl[cpu]" in run([programs / "tlt", "doctor"], tmp_path, code=1).replace("\n", "")


def test_the_doctor_finds_everything_and_the_demo_runs(borrowing: Path, tmp_path: Path) -> None:
    where = run([borrowing / "python", "-c", "import tlt; print(tlt.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(borrowing.parent)
    run([borrowing / "tlt", "doctor"], tmp_path, 600)
    printed = run([borrowing / "tlt", "demo"], tmp_path, 900)
    assert list(tmp_path.rglob("report.html")), printed
