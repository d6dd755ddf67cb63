"""Look for known vulnerabilities in the packages of the lock file, by `pip-audit`.

    .venv/bin/python .ci/audit.py

`pip-audit` needs a database on the network. Without it this says SKIPPED and why, and does not
fail: no news is not good news. `pip-audit` has an environment of its own, `.venv-audit`, so that it
adds nothing to what is audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-cpu.lock"
PLACE = ROOT / ".venv-audit"
PIP_AUDIT = "pip-audit>=2.9,<3"
LIMIT_S = 600


def verdict(output: str, errors: str) -> tuple[int, str]:
    """Return the exit code and the report, from what `pip-audit --format json` said."""
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        said = errors.strip().splitlines() or ["it said nothing"]
        return 0, f"audit: SKIPPED, nothing was looked up: {said[-1][:300]}"
    found = [
        f"  {package['name']} {package['version']}: {each['id']}, fixed in "
        f"{', '.join(each['fix_versions']) or 'no version yet'}"
        for package in packages
        for each in package.get("vulns", [])
    ]
    unknown = {p["name"]: p["skip_reason"] for p in packages if "skip_reason" in p}
    if len(unknown) == len(packages):  # an index without a database answers so
        why = next(iter(unknown.values()), "it was given no package")
        return 0, f"audit: SKIPPED, nothing was looked up: {why[:300]}"
    num_known = len(packages) - len(unknown)
    lines = [f"audit: {num_known} packages, {len(found)} known vulnerabilities", *found]
    if unknown:
        lines.append(f"  not looked up: {', '.join(unknown)}")
    return int(bool(found)), "\n".join(lines)


def installed() -> Path:
    """Return a Python that has `pip-audit`."""
    python = PLACE / "bin" / "python"
    if not (PLACE / ".done").exists():
        venv.create(PLACE, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", PIP_AUDIT]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
        (PLACE / ".done").touch()
    return python


def main() -> None:
    try:
        command = [str(installed()), "-m", "pip_audit", "--requirement", str(LOCK), "--no-deps"]
        command += ["--disable-pip", "--format", "json", "--progress-spinner", "off"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.CalledProcessError as error:
        code, report = verdict("", error.stderr)
    except subprocess.TimeoutExpired:
        code, report = verdict("", f"no answer within {LIMIT_S} s")
    else:
        code, report = verdict(done.stdout, done.stderr)
    sys.stdout.write(report + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
