"""The bill of materials fits the lock file, and the audit never takes silence for good news."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_of_materials_is_that_of_the_lock(capsys: pytest.CaptureFixture[str]) -> None:
    script("sbom").main()
    made = capsys.readouterr().out
    assert (ROOT / "sbom-cpu.cdx.json").read_text() == made, "run: make sbom"
    bill = json.loads(made)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    lines = (ROOT / "requirements-cpu.lock").read_text().splitlines()
    pins = {line.split()[0] for line in lines if "==" in line and not line.startswith("#")}
    found = {f"{each['name']}=={each['version']}" for each in bill["components"]}
    assert found - pins == {"torch==2.13.0"}
    assert pins <= found
    refs = [each["bom-ref"] for each in bill["components"]]
    assert len(set(refs)) == len(refs)
    assert bill["dependencies"][0]["dependsOn"] == refs
    for each in bill["components"]:
        assert each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}"
        hashes = each.get("externalReferences", [{"hashes": []}])[0]["hashes"]
        assert hashes or each["name"] == "torch"
        assert all(re.fullmatch("[0-9a-f]{64}", of["content"]) for of in hashes)


def test_a_bill_without_a_pinned_torch_is_refused() -> None:
    with pytest.raises(SystemExit, match="pins no torch"):
        script("sbom").bill("a==1 --hash=sha256:0\n", "", "")


@pytest.mark.parametrize(
    ("output", "errors", "code", "says"),
    [
        ("", "x\nConnectionError: no route", 0, r"SKIPPED.*ConnectionError: no route"),
        ("", "", 0, "SKIPPED.*it said nothing"),
        ("[]", "", 0, "SKIPPED"),
        ('{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}', "", 0, "1 packages, 0"),
        (
            '{"dependencies": [{"name": "a", "version": "1", "vulns": '
            '[{"id": "CVE-1", "fix_versions": ["2"]}]}]}',
            "",
            1,
            r"(?s)1 known.*a 1: CVE-1, fixed in 2",
        ),
        (
            '{"dependencies": [{"name": "a", "skip_reason": "not on PyPI"}]}',
            "",
            0,
            "SKIPPED, nothing was looked up: not on PyPI",
        ),
        (
            '{"dependencies": [{"name": "a", "skip_reason": "not on PyPI"}, '
            '{"name": "b", "version": "1", "vulns": []}]}',
            "",
            0,
            r"(?s)1 packages, 0 known.*not looked up: a",
        ),
    ],
)
def test_an_audit_says_what_it_did(output: str, errors: str, code: int, says: str) -> None:
    found, report = script("audit").verdict(output, errors)
    assert found == code
    assert re.search(says, report)
