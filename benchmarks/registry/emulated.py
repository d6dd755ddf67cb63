"""The emulated node: what each arm gains in the regime of GPUs, and what the simulator says."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from registry.core import Doc, Rows, figures, percent, table

WARM_UP = 1


def late(d: Doc, name: str) -> str:
    """The largest share over arms, each the mean over its RL steps."""
    return f"{max(mean(of, name) for of in d['arms'].values()):.1%}"


def mean(of: dict[str, Any], name: str) -> float:
    found = [row[name] for row in of["steps"][WARM_UP:] if name in row]
    return fmean(found) if found else 0.0


def last_third(of: dict[str, Any], name: str) -> float:
    rows = of["steps"][WARM_UP:]
    return fmean(row[name] for row in rows[2 * len(rows) // 3 :])


@table("emulated", "emulated")
def arms(d: Doc) -> Rows:
    rows = [["emulated; against no speculation", "RL steps", "rollout", "its last third"]]
    rows[0] += ["end to end", "tokens per draft, last third", "idle", "trained per RL step"]
    for name, of in d["arms"].items():
        gained = of.get("gained", {"reference": "", "rollout_thirds": [1, 1, 1]})
        if name != "off" and gained["reference"] != "off":
            continue
        ratios = [
            gained.get("rollout", 1),
            gained["rollout_thirds"][2],
            gained.get("end_to_end", 1),
        ]
        cells = [of["label"], str(len(of["steps"])), *(f"{ratio:.2f}x" for ratio in ratios)]
        cells += [f"{last_third(of, 'tokens_per_draft'):.2f}", percent(mean(of, "idle_share"))]
        trained = mean(of, "trained_s")
        rows.append([*cells, f"{trained:.1f} s" if trained else ""])
    return rows


@table("emulated.simulated", "emulated")
def simulated(d: Doc) -> Rows:
    rows = [["against no speculation", "rollout, emulated", "simulated", "off by"]]
    rows[0] += ["end to end, emulated", "simulated", "off by"]
    for arm, predicted in d["simulated"]["as_emulated"].items():
        gained = d["arms"][arm]["gained"]
        cells = [d["arms"][arm]["label"]]
        for measure in ("rollout", "end_to_end"):
            found, said = gained[measure], predicted[measure]
            cells += [f"{found:.2f}x", f"{said:.2f}x", f"{round(100 * (said / found - 1)):+d}%"]
        rows.append(cells)
    return rows


def ratio(arm: str, measure: str) -> Any:
    return lambda d: f"{d['arms'][arm]['gained'][measure]:.2f}x"


def last(d: Doc, arm: str, measure: str) -> str:
    """How many times as fast as its reference an arm is in the last third."""
    return f"{d['arms'][arm]['gained'][f'{measure}_thirds'][2]:.2f}x"


def last_over(d: Doc, arm: str, other: str) -> str:
    """How many times as fast as another arm the rollouts of the last third are."""
    found, theirs = (d["arms"][name]["gained"]["rollout_thirds"][2] for name in (arm, other))
    return f"{found / theirs:.2f}x"


def over(d: Doc, arm: str, other: str) -> str:
    """How many times as fast as another arm's rollouts, over the RL steps that both made."""
    mine, theirs = (d["arms"][name]["steps"][WARM_UP:] for name in (arm, other))
    count = min(len(mine), len(theirs))
    seconds, of_other = (sum(row["rollout_s"] for row in rows[:count]) for rows in (mine, theirs))
    return f"{of_other / seconds:.2f}x"


figures(
    "emulated",
    "emulated",
    {
        "what": lambda d: d["emulated"].removeprefix("emulated: "),
        **{
            f"{arm}.{measure}": ratio(arm, measure)
            for arm in ("frozen", "nothing", "tlt", "ngram")
            for measure in ("rollout", "end_to_end")
        },
        **{
            f"{name}.{arm}": lambda d, of=of, arm=arm: f"{d['simulated'][of][arm]['rollout']:.2f}x"
            for name, of in (("simulated", "as_emulated"), ("costly", "costly"))
            for arm in ("frozen", "nothing", "ngram")
        },
        "nothing.last.end_to_end": lambda d: last(d, "nothing", "end_to_end"),
        **{
            f"frozen.over_{other}": lambda d, other=other: over(d, "frozen", other)
            for other in ("fixed", "fixed7", "by_batch", "beg_mab")
        },
        "tlt.over_frozen": lambda d: over(d, "tlt", "frozen"),
        "nothing.over_ngram": lambda d: last_over(d, "nothing", "ngram"),
        "fast": ratio("fast_tlt", "rollout"),
        "fast.last": lambda d: last(d, "fast_tlt", "rollout"),
        "equal": ratio("equal_tlt", "end_to_end"),
        "late_steps": lambda d: late(d, "late_share"),
        "late_s": lambda d: late(d, "late_s_share"),
    },
)
