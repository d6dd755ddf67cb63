"""The adaptive strategy live and in replay (`benchmarks/strategy.sh`)."""

from __future__ import annotations

import re

from registry.core import Doc, Rows, figures, several, spread, table

ADAPTIVE = "adaptive"
BEG_MAB = "beg_mab"
"""The bandit of the TLT paper (arXiv 2511.16665)."""
SCENARIOS = {"stationary": "stays", "drifting": "drifts", "abrupt": "jumps"}
LABELS = {ADAPTIVE: "adaptive", BEG_MAB: "BEG-MAB"}
Shares = dict[str, dict[str, float]]


def is_fixed(name: str) -> bool:
    """Whether a strategy is one arm for the whole run, such as "off" or "eagle3:3"."""
    return name == "off" or re.fullmatch(r"\w+:\d+", name) is not None


def shares(d: Doc, recorded: bool) -> Shares:
    """Return throughput relative to the oracle's, by strategy and scenario."""
    (rows,) = (
        rows for name, rows in d["results"].items() if name.startswith("recorded") == recorded
    )
    found: Shares = {}
    for row in rows:
        found.setdefault(row["strategy"], {})[row["scenario"]] = row["of_oracle"]
    return found


def best_fixed(found: Shares, scenario: str) -> str:
    """The fixed arm that came out best, which is known only afterwards."""
    return max(filter(is_fixed, found), key=lambda name: found[name][scenario])


def rows_of(found: Shares) -> Rows:
    rows = [
        [LABELS.get(name, name), *(f"{of[scenario]:.3f}" for scenario in SCENARIOS)]
        for name, of in found.items()
        if not is_fixed(name)
    ]
    best = {scenario: best_fixed(found, scenario) for scenario in SCENARIOS}
    cells = [f"{found[name][scenario]:.3f} (`{name}`)" for scenario, name in best.items()]
    return [*rows, ["best fixed arm in hindsight", *cells]]


HEAD = ["share of the oracle's throughput", *(f"acceptance {how}" for how in SCENARIOS.values())]


@table("strategy.replay.recorded", "strategy/strategy")
def recorded(d: Doc) -> Rows:
    return [HEAD, *rows_of(shares(d, recorded=True))]


def above_beg_mab(d: Doc) -> str:
    """In how many scenarios the adaptive strategy is faster, with step times of an H100."""
    found = shares(d, recorded=False)
    won = sum(found[ADAPTIVE][of] > found[BEG_MAB][of] for of in SCENARIOS)
    return f"{won} of {len(SCENARIOS)}"


figures("strategy.replay", "strategy/strategy", {"above_beg_mab.h100": above_beg_mab})

LIVE = "strategy/live/rollout"


def summary(d: Doc) -> dict[str, Doc]:
    return {row["mode"]: row for row in d["summary"]}


def against(d: Doc, mode: str, base: str) -> str:
    """Tokens a second of a mode over those of another, repeat by repeat."""
    runs = {(run["mode"], run["repeat"]): run["tokens_per_s"] for run in d["runs"]}
    return several(runs[mode, r] / runs[base, r] for r in range(d["repeats"]))


def best_live(d: Doc) -> str:
    modes = summary(d)
    return max(filter(is_fixed, modes), key=lambda mode: modes[mode]["speed_vs_first"]["median"])


@table("strategy.live", LIVE)
def live(d: Doc) -> Rows:
    base, *modes = summary(d)
    rows = [["strategy", f"against `{base}`", "tokens/s"]]
    for mode in modes:
        row = summary(d)[mode]
        rows.append([LABELS.get(mode, f"`{mode}`"), spread(row["speed_vs_first"])])
        rows[-1].append(f"{row['tokens_per_s']['median']:.0f}")
    return rows


figures(
    "strategy.live",
    LIVE,
    {
        "against_best": lambda d: against(d, ADAPTIVE, best_live(d)),
        "requests": lambda d: str(d["workload"]["num_requests"]),
        "runs": lambda d: str(d["repeats"]),
    },
)

for name in ("no_drafter", "random_drafter", "random_text"):
    figures(
        f"strategy.{name}",
        f"strategy/{name}/rollout",
        {"adaptive": lambda d: spread(summary(d)[ADAPTIVE]["speed_vs_first"])},
    )


@table("strategy.cost", "decisions")
def cost(d: Doc) -> Rows:
    rows = [["running requests", "ms per engine step", "before estimates were kept", "decisions"]]
    for name, now in d["workloads"].items():
        before = d["earlier"]["workloads"][name]
        same = now["decisions"] == before["decisions"]
        label = "128 to 1" if name == "rollouts" else name
        cells = [
            f"{row['ms']:.2f} ({row['low']:.2f} to {row['high']:.2f})" for row in (now, before)
        ]
        rows.append([label, *cells, "the same" if same else "differ"])
    return rows
