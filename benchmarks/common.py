"""What benchmarks share: options, result files, ratios within rounds, and runs of `tlt train`."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.observe.provenance import provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def parse_options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the options of a command line, one for each default and of its type.

    False makes a switch, a list takes several values, and None stands for a text that is missing.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in defaults.items():
        how: dict[str, Any] = {"type": str if default is None else type(default)}
        if isinstance(default, list):
            how = {"type": type(default[0]), "nargs": "+"}
        if default is False:
            how = {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    return parser.parse_args()


def save(name: str, result: Mapping[str, Any]) -> None:
    """Write a result file with its provenance; `name` is such as "quality"."""
    text = json.dumps({"provenance": provenance()} | dict(result), indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def load(name: str) -> Any:
    """Return a result, or an empty one."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """Return the ratios within each round."""
    return [a / b for a, b in zip(of, to, strict=True)]


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(0.99 * len(values))]


def trained(out: Path, config: str, *settings: str) -> Path:
    """Return the folder of a run of `tlt train`; a complete run is not repeated."""
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "tlt", "train", config, f'run.out="{out}"', *settings]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return out
