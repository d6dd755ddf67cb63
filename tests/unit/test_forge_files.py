"""Workflows, Dockerfiles, templates and release files name only what exists, and agree."""

import fnmatch
import importlib.util
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def make_targets() -> set[str]:
    found = re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    return set(found)


def unknown(command: str) -> list[str]:
    """Return what a shell command names and the repository does not have."""
    said = [
        f"make {target}"
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", command)
        if target not in make_targets()
    ]
    for group in re.findall(r"(?:\.|tlt-rl)\[([a-z,]+)\]", command):
        said += [
            f"extra {extra}"
            for extra in group.split(",")
            if extra not in PROJECT["optional-dependencies"]
        ]
    said += [
        path
        for path in re.findall(r"(?:^|\s)(\.ci/\S+)", command)
        if not (ROOT / path.strip("'\"")).exists()
    ]
    return said


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job.get("steps", [])


def test_there_is_something_to_check() -> None:
    assert {path.stem for path in WORKFLOWS} == {"gate", "nightly", "docs", "release"}
    assert {path.name for path in DOCKERFILES} == {"cpu.Dockerfile", "cuda.Dockerfile"}
    assert {"setup", "check", "check-all", "docs", "check-package"} <= make_targets()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("make chek", ["make chek"]),
        ("pip install '.[cpu,gpus]'", ["extra gpus"]),
        ("bash .ci/gone", [".ci/gone"]),
        ("make check && pip install '.[cpu]' && bash .ci/run", []),
    ],
)
def test_what_does_not_exist_is_found(command: str, says: list[str]) -> None:
    assert unknown(command) == says


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_run_what_exists(path: Path) -> None:
    for step in steps(path):
        assert unknown(step.get("run", "")) == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_are_bounded_and_have_few_rights(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        if "uses" in job:
            assert (ROOT / job["uses"]).exists()
            continue
        assert job["timeout-minutes"] <= 360
        assert job["runs-on"] != "ubuntu-latest"  # changes under our feet
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d[\w.]*", step["uses"])
            if step["uses"].startswith("actions/checkout"):
                assert step["with"] == {"persist-credentials": False}
        # What a stranger may choose (a branch's name) reaches a shell only as a variable.
        assert "${{" not in step.get("run", "")


def test_the_gate_is_the_script_that_everybody_runs() -> None:
    gate = ROOT / ".github" / "workflows" / "gate.yml"
    assert "bash .ci/run" in [step.get("run") for step in steps(gate)]
    (job,) = jobs(gate).values()
    supported = {
        line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    }
    assert set(job["strategy"]["matrix"]["python"]) == supported


def test_the_site_is_built_with_its_warnings() -> None:
    """With --quiet, mkdocs hides warnings from --strict, and a broken link passes."""
    recipe = (ROOT / "Makefile").read_text().split("\ndocs:\n")[1].split("\n\n")[0]
    assert "mkdocs build --strict" in recipe
    assert "--quiet" not in recipe


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile and their arguments."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    found = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in found]


def reaches_the_builder(source: str) -> bool:
    """Return whether .dockerignore lets a path of the top folder through; the last rule wins."""
    lets = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        rule = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch.fnmatch(source, rule):
            lets = line.startswith("!")
    return lets


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_what_a_dockerfile_copies_is_there(path: Path) -> None:
    copied: set[str] = set()
    for word, rest in instructions(path):
        if word == "COPY":
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert reaches_the_builder(source), source
            copied |= set(sources)
    # What hatchling reads to build the package.
    assert {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]} <= copied


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_do_what_the_makefile_does_and_are_not_root(path: Path) -> None:
    found = instructions(path)
    runs = [rest for word, rest in found if word == "RUN"]
    assert [name for command in runs for name in unknown(command)] == []
    assert [rest for word, rest in found if word == "USER"][-1] == "tlt"
    (base,) = (rest for word, rest in found if word == "FROM")
    python = re.match(r"python:(3\.\d+)-slim-\w+$", base)
    assert python is not None
    assert f"Programming Language :: Python :: {python[1]}" in PROJECT["classifiers"]


def test_the_image_for_cpus_is_the_locked_set_up() -> None:
    """Its only step of pip is the Makefile's, which needs files that the image has copied."""
    found = instructions(ROOT / "docker" / "cpu.Dockerfile")
    runs = [rest for word, rest in found if word == "RUN"]
    assert [command for command in runs if "pip" in command] == []
    (set_up,) = (command for command in runs if command.startswith("make "))
    assert set_up.split()[1] == "setup-locked"
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\nsetup-locked:\n")[1].split("\n\n")[0]
    copied = {name for word, rest in found if word == "COPY" for name in rest.split()}
    assert {"Makefile", *re.findall(r"-r (\S+)", recipe)} <= copied
    installed = next(command for command in runs if "apt-get" in command)
    assert " make" in installed


def test_the_install_page_names_what_exists() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    table = page.split("## Extras")[1].split("## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    assert {"cpu", "gpu", "train"} <= listed <= set(PROJECT["optional-dependencies"])
    code = re.findall(r"```bash\n(.*?)```|`([^`]+)`", page, re.S)
    assert [name for found in code for text in found for name in unknown(text)] == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_issue_templates_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        return
    assert {"name", "description", "body"} <= set(form)
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in asked]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in asked)
    assert any(field.get("validations", {}).get("required") for field in asked)


def release_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_places_name_one_version() -> None:
    assert set(release_script().versions(ROOT).values()) == {PROJECT["version"]}


def test_the_notes_of_this_version_are_there() -> None:
    notes = release_script().section(
        (ROOT / "docs" / "releases.md").read_text(), PROJECT["version"]
    )
    assert len(notes.splitlines()) > 5


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """Return a folder with the files of a release as they must be when it is tagged."""
    for name in ("pyproject.toml", "CITATION.cff", "src/tlt/__init__.py", "docs/gpu-hour.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = PROJECT["version"]
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [Unreleased]\n\n## [{version}] - 2026-12-01\n\n### Added\n- Much.\n"
    )
    (tmp_path / "docs" / "releases.md").write_text(f"# Notes\n\n## {version}\nThe first.\n")
    (tmp_path / "docs" / "install.md").write_text("# Install\n")
    (tmp_path / "SECURITY.md").write_text("# Security\n")
    return tmp_path


def test_a_release_in_order_has_no_faults(released: Path) -> None:
    assert release_script().faults(f"v{PROJECT['version']}", released) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("src/tlt/__init__.py", "__version__ = ", "__version__ = '' or ", "no version"),
        ("CITATION.cff", "version: 0", "version: 1", "CITATION.cff says 1"),
        ("CHANGELOG.md", " - 2026-12-01", "", "has no section such as: ## ["),
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n- More.\n", "entries under Unreleased"),
        ("docs/releases.md", "## 0", "## 9", "docs/releases.md has no section"),
        ("docs/releases.md", "The first", "In preparation", "docs/releases.md says 'In prep"),
        ("docs/install.md", "# Install", "Not in the index yet", "docs/install.md says"),
        ("SECURITY.md", "# S", "No release has been made yet. # S", "SECURITY.md says"),
    ],
)
def test_a_release_with_a_fault_is_refused(
    released: Path, file: str, old: str, new: str, says: str
) -> None:
    text = (released / file).read_text()
    assert old in text
    (released / file).write_text(text.replace(old, new, 1))
    (fault,) = release_script().faults(f"v{PROJECT['version']}", released)
    assert says in fault


def test_sentences_that_end_with_a_release_are_known() -> None:
    """What the script looks for before a release is what the files say until then."""
    script = release_script()
    if not script.section((ROOT / "CHANGELOG.md").read_text(), "[Unreleased]"):
        pytest.skip("this is a release: the sentences are gone")
    found = "\n".join(script.faults(f"v{PROJECT['version']}", ROOT))
    for name in ("docs/releases.md", "SECURITY.md", "docs/install.md"):
        assert f"{name} says" in found


def test_links_of_the_notes_lead_out_of_the_repository() -> None:
    linked = release_script().linked
    notes = "[a](lossless.md#x), [b](https://example.org), [c](../README.md)"
    assert linked(notes, "v1", "") == notes
    assert linked(notes, "v1", "https://host/me/tlt") == (
        "[a](https://host/me/tlt/blob/v1/docs/lossless.md#x), [b](https://example.org), "
        "[c](https://host/me/tlt/blob/v1/docs/../README.md)"
    )


def test_another_tag_than_the_version_is_refused(released: Path) -> None:
    found = release_script().faults("v9.9.9", released)
    assert "pyproject.toml says" in found[0]


def test_an_image_is_built_with_little_shared_memory() -> None:
    """The build of an image has 64 MB of it, which the doctor refuses: it may not end the build."""
    steps = (ROOT / "docker" / "cpu.Dockerfile").read_text()
    assert "make setup-locked" in steps
    recipe = (ROOT / "Makefile").read_text().partition("setup-locked:\n")[2].partition("\n\n")[0]
    assert "\t-$(BIN)/tlt doctor" in recipe
    assert "tlt doctor" not in "".join(re.findall(r"^RUN .*", steps, re.M))
