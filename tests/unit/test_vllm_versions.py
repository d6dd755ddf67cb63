"""`.ci/vllm_versions.py`: what it reads, and that engines support just the versions that passed."""

import json
import tomllib

import pytest
from script_files import ROOT, script


def test_the_script_reads_results() -> None:
    pytest.importorskip("packaging")
    versions = script(".ci/vllm_versions.py")
    assert versions.result_of('x\n{"start": "passed"}\nleaked!\n') == {"start": "passed"}
    assert versions.result_of("ImportError: no torch") == {"start": "ImportError: no torch"}


def test_engines_on_cpus_support_the_versions_that_passed() -> None:
    pytest.importorskip("torch")
    from tlt.vllm.compat import version_supported

    result = json.loads((ROOT / "benchmarks" / "results" / "vllm_versions.json").read_text())
    assert len(result["versions"]) > 3
    for version, found in result["versions"].items():
        passed = set(found["behaviours"].values()) == {"passed"}  # nothing, where not run
        assert version_supported(version, on_cpu=True) == passed, version


@pytest.mark.parametrize(("extra", "on_cpu"), [("cpu", True), ("gpu", False)])
def test_the_package_asks_for_the_versions_that_engines_support(extra: str, on_cpu: bool) -> None:
    pytest.importorskip("torch")
    requirements = pytest.importorskip("packaging.requirements")
    from tlt.vllm.compat import supported_versions, version_supported

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = requirements.Requirement(supported_versions(on_cpu))
    (asked,) = (
        need
        for need in map(requirements.Requirement, project["optional-dependencies"][extra])
        if need.name == said.name
    )
    for version in (f"0.{minor}.{patch}" for minor in range(20, 40) for patch in (0, 1)):
        supported = version_supported(version, on_cpu)
        assert asked.specifier.contains(version) == supported, version
        assert said.specifier.contains(version) == supported, version
