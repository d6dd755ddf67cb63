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


def run(command: list[str | Path], folder: Path, seconds: float = 300) -> str:
    """Run a command without this checkout on its path, and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=limit(seconds), env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    for name in ("Makefile", "LICENSE", "CHANGELOG.md", "requirements-cpu.lock", ".ci/run"):
        assert name in names
    assert not [name for name in names if name.startswith(("models", "runs", ".venv"))]


def test_an_empty_environment_runs_the_command(programs: Path, tmp_path: Path) -> None:
    """Without torch, vLLM and Ray, the command says what is missing and how to get it."""
    assert run([programs / "tlt", "--version"], tmp_path) == f"tlt {PROJECT['version']}\n"
    assert "Usage: tlt" in run([programs / "tlt", "--help"], tmp_path)
    done = subprocess.run(
        [programs / "tlt", "doctor"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "tlt-rl[cpu]" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--json"),
        ("models", "tiny", "--out", "tiny"),
        ("sft", "--model", "tiny", "--out", "out", "--task", "gcd"),
        ("bench", "same"),
        ("drafter", "train", "--model", "tiny", "--out", "out"),
    ],
)
def test_what_a_command_lacks_is_said(
    programs: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [programs / "tlt", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 2
    assert "pip install 'tlt-rl[" in done.stderr, done.stderr


def test_the_doctor_finds_everything(borrowing: Path, tmp_path: Path) -> None:
    where = run([borrowing / "python", "-c", "import tlt; print(tlt.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(borrowing.parent)
    assert "rollouts with speculation can run here" in run(
        [borrowing / "tlt", "doctor"], tmp_path, 600
    )


def test_the_demo_runs(borrowing: Path, tmp_path: Path) -> None:
    if "demo" not in run([borrowing / "tlt", "--help"], tmp_path):
        pytest.skip("this version has no `tlt demo`")
    printed = run([borrowing / "tlt", "demo"], tmp_path, 900)
    assert "The two runs were" in printed, printed
    assert list(tmp_path.rglob("report.html")), printed
