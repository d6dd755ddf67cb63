"""All checks of engines on a device, and their report: a JSON file, written after every check.

On GPUs the kernels choose the order of a sum by the size of a batch, so two batches may round a
near-tie differently. Checks that compare all tokens therefore run with vLLM's batch-invariant
kernels, which promise nothing about drafts (`docs/lossless.md`). Greedy differences on a GPU are
examined: those at near-ties pass, and the report has them. The check `bfloat16` runs the kernels of
a real run.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlt.doctor import isolated, lifecycle, sameness, training
from tlt.doctor.engines import Place
from tlt.doctor.isolated import Result
from tlt.errors import ConfigError

INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
FORMAT = 2
ALL_S = 3000.0
"""Seconds for all checks: the whole report takes less than an hour."""
LEAST_S = 120.0
"""Seconds that every check gets, however long the checks before it hung."""


@dataclass(frozen=True, slots=True)
class Check:
    """A function that shows, with its own engines, that its docstring is true of a device."""

    function: Callable[[Place], dict[str, Any]]
    min_gpus: int = 0
    """GPUs without which the check is skipped."""
    invariant: bool = False
    """Whether engines on GPUs run the batch-invariant kernels."""

    @property
    def name(self) -> str:
        """The name of the check in the report."""
        return self.function.__name__

    def run(self, place: Place, limit_s: float, skip: str = "") -> Result:
        """Run the check in a separate process; skip it for a reason, or with too few GPUs."""
        if place.num_gpus < self.min_gpus:
            skip = f"needs {self.min_gpus} GPUs, found {place.num_gpus}"
        if skip:
            return Result(self.name, self.function.__doc__ or "", "skipped", error=skip)
        environment = INVARIANT if place.num_gpus and self.invariant else {}
        return isolated.run(self.function, place, limit_s=limit_s, environment=environment)


MODELS = Check(training.models)
CHECKS = (
    Check(sameness.start),
    Check(sameness.greedy, invariant=True),
    Check(sameness.sampled, invariant=True),
    Check(sameness.graphs, invariant=True, min_gpus=1),
    Check(sameness.bfloat16),
    Check(lifecycle.drafter_swap, invariant=True),
    Check(lifecycle.policy_update, invariant=True),
    Check(lifecycle.continued, invariant=True),
    Check(lifecycle.sleep, invariant=True),
    Check(lifecycle.states),
    Check(training.drafter_training),
    Check(sameness.tensor_parallel, invariant=True, min_gpus=2),
    Check(training.train),
    Check(training.train_separate, min_gpus=2),
)
"""All checks, in the order in which they run."""


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks of these names; without names, all checks."""
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]} is not a check; one of {', '.join(known)}")
    return tuple(check for check in CHECKS if not names or check.name in names)


def run_checks(
    checks: Sequence[Check],
    num_gpus: int,
    limit_s: float,
    out: Path,
    facts: dict[str, Any],
    show: Callable[[Check, Result | None], None],
) -> list[Result]:
    """Run the checks one after the other, each for up to `limit_s` seconds; return their results.

    After checks that hang, later ones get less: at least `LEAST_S`, and `ALL_S` all together.
    `num_gpus = 0` runs them on CPU engines. The report in `out` holds `facts` about the machine and
    is whole after every check. `show` is called when a check begins (None) and when it has ended.
    """
    results: list[Result] = []
    write(out, facts, results)
    ends_s = time.monotonic() + ALL_S
    with tempfile.TemporaryDirectory(prefix="tlt-doctor-", ignore_cleanup_errors=True) as folder:
        place = Place(Path(folder), num_gpus)
        for check in (MODELS, *checks):
            show(check, None)
            kept_s = LEAST_S * (len(checks) - len(results))
            left_s = max(LEAST_S, ends_s - time.monotonic() - kept_s)
            is_lacking = results and results[0].is_bad
            skip = "its models could not be made" if is_lacking else ""
            results.append(check.run(place, min(limit_s, left_s), skip))
            write(out, facts, results)
            show(check, results[-1])
    return results


def write(out: Path, facts: dict[str, Any], results: Sequence[Result]) -> None:
    """Write the report; a reader never sees half of it."""
    report = {"format": FORMAT, "verdict": verdict(results), **facts}
    report["checks"] = [asdict(result) for result in results]
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(json.dumps(report, indent=1, default=str) + "\n")
    partial.rename(out)


def verdict(results: Sequence[Result]) -> str:
    """Return the results in one sentence."""
    passed = sum(result.status == "passed" for result in results)
    bad = [result.name for result in results if result.is_bad]
    left_out = [result.name for result in results if result.status == "skipped"]
    text = f"{passed} checks passed"
    text += f", {len(bad)} did not: {', '.join(bad)}" if bad else ""
    return text + (f"; skipped: {', '.join(left_out)}" if left_out else "")
