"""The emulated node: what each arm gains in the regime of GPUs, and what the simulator says."""

from __future__ import annotations

from collections.abc import Sequence
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


def over(d: Doc, arm: str, other: str, measure: str = "rollout_s") -> str:
    """How many times as fast as another arm, over the RL steps that both made."""
    mine, theirs = (d["arms"][name]["steps"][WARM_UP:] for name in (arm, other))
    count = min(len(mine), len(theirs))
    return f"{total(theirs[:count], measure) / total(mine[:count], measure):.2f}x"


def total(rows: Sequence[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows)


def reward(d: Doc, third: int) -> float:
    """The mean reward of a third of the RL steps."""
    rows = d["arms"]["off"]["steps"]
    return fmean(
        row["reward"] for row in rows[len(rows) * third // 3 : len(rows) * (third + 1) // 3]
    )


def rollout_share(of: Doc) -> float:
    rows = of["steps"][WARM_UP:]
    return total(rows, "rollout_s") / total(rows, "step_s")


def fell(d: Doc, arm: str) -> str:
    """By how much the tokens per draft fell from the first third to the last."""
    rows = d["arms"][arm]["steps"][WARM_UP:]
    first = fmean(row["hit_share"] for row in rows[: len(rows) // 3])
    last = fmean(row["hit_share"] for row in rows[2 * len(rows) // 3 :])
    return percent(1 - last / first)


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
            f"costly.{arm}": lambda d, arm=arm: f"{d['simulated']['costly'][arm]['rollout']:.2f}x"
            for arm in ("frozen", "nothing", "ngram")
        },
        **{
            f"nothing.last.{measure}": lambda d, measure=measure: last(d, "nothing", measure)
            for measure in ("rollout", "end_to_end")
        },
        **{
            f"frozen.over_{other}": lambda d, other=other: over(d, "frozen", other)
            for other in ("fixed", "fixed7", "by_batch", "beg_mab")
        },
        "tlt.over_frozen": lambda d: over(d, "tlt", "frozen"),
        "tlt.over_frozen.steps": lambda d: over(d, "tlt", "frozen", "step_s"),
        "tokens.nothing": lambda d: f"{last_third(d['arms']['nothing'], 'tokens_per_draft'):.2f}",
        "tokens.frozen": lambda d: f"{last_third(d['arms']['frozen'], 'tokens_per_draft'):.2f}",
        "tokens.ngram": lambda d: f"{last_third(d['arms']['ngram'], 'tokens_per_draft'):.2f}",
        "median_tokens": lambda d: f"{mean(d['arms']['off'], 'median_tokens'):.0f}",
        "p99_tokens": lambda d: f"{mean(d['arms']['off'], 'p99_tokens'):.0f}",
        "reward.first": lambda d: f"{reward(d, 0):.2f}",
        "reward.last": lambda d: f"{reward(d, 2):.2f}",
        "rollout_share": lambda d: percent(rollout_share(d["arms"]["off"])),
        "nothing.over_ngram": lambda d: last_over(d, "nothing", "ngram"),
        "fast": ratio("fast_tlt", "rollout"),
        "fast.last": lambda d: last(d, "fast_tlt", "rollout"),
        "fast.fell": lambda d: fell(d, "fast_frozen"),
        "equal": ratio("equal_tlt", "end_to_end"),
        "late_steps": lambda d: late(d, "late_share"),
        "late_s": lambda d: late(d, "late_s_share"),
        "steps": lambda d: str(len(d["arms"]["off"]["steps"])),
    },
)
