"""Does the simulator find the published speed-ups of the idea, from assumptions alone?

    python benchmarks/published.py

The TLT paper reports the end-to-end speed-up over nodes of 8 H100s: 7B 1.21, 1.45, 1.62 and 1.76 on
1, 2, 4 and 8 nodes; 32B 1.83 and 2.12 on 4 and 8. What follows is assumed, each for its own reason.
How many GPUs an engine of the 7B model had is not known here, and much hangs on it: 1, 2 and 4 are
shown.

SkyRL's documentation (examples/spec_decode) and NeMo-RL's paper (arXiv 2604.26779) give seconds of
rollouts and RL steps with and without speculation. Their acceptance is published, so these runs
test the simulator's own model of speculation. Writes results/published.json; `tlt simulate` prints
the same errors from src/tlt/simulate/published.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common import save
from tlt.config.load import apply_overrides, check
from tlt.contracts import Arm
from tlt.simulate import clock
from tlt.simulate.answer import figures, speed_ups
from tlt.simulate.cluster import Cluster, Mode, Simulation
from tlt.simulate.scenario import ScenarioConfig, cluster_of, num_nodes, workload_of
from tlt.strategy.spec import build_strategy
from tlt.timing.model import Drafting, EngineModel
from tlt.timing.profiles import MODELS, h100

Gained = dict[str, float]
"""Speed-ups of the rollout and end to end, and the seconds without speculation."""
Row = dict[str, Any]

PUBLISHED = {
    "qwen2.5-7b": {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76},
    "qwen2.5-32b": {4: 1.83, 8: 2.12},
}
ENGINE_GPUS = {"qwen2.5-7b": (1, 2, 4), "qwen2.5-32b": (4,)}
MEASURED = ("qwen2.5-32b", 4)
"""The engine that the paper's speed-ups by batch size are taken to be of."""
GPUS_PER_NODE = 8
BY_BATCH = {1: 3.22, 2: 3.08, 4: 3.01, 8: 2.73, 16: 2.67, 32: 2.48}
"""The paper's speed-up of speculation by batch size, with 16 tokens to verify."""
DRAFT_TOKENS = 16
LARGEST_BATCH = 32


@dataclass(frozen=True)
class Assumed:
    what: str
    why: str
    settings: tuple[str, ...] = ()


ASSUMED = [
    Assumed(
        "1,024 samples a step: 128 prompts, groups of 8; the same on any number of nodes",
        "the batch of the common GRPO recipes; papers scale nodes at a fixed batch",
        ("workload.prompts_per_step=128", "workload.group_size=8"),
    ),
    Assumed(
        "responses with a median of 2,500 tokens, 12,000 at 95%, at most 32,768",
        "reasoning models under a limit of 32k; the simulator's default",
    ),
    Assumed(
        "an engine of the 32B model has 4 GPUs",
        "weights take at most a quarter of the memory, the rest is for the KV cache",
    ),
    Assumed(
        "a plain engine step reads weights and KV cache at 70% of the memory's bandwidth",
        "data sheet of the H100; decoding is bound by memory",
    ),
    Assumed(
        f"engines speculate only while they run {LARGEST_BATCH} requests or fewer; the 32B model "
        "is then faster by what the paper measured for that batch size",
        "published, up to that size; drafts of 16 tokens",
    ),
    Assumed(
        "the 7B model pays as many milliseconds for drafting, and for each row verified",
        "passes of a small drafter are bound by launches and by Python, not by its size",
    ),
    Assumed(
        "the drafter stays as good as when that was measured",
        "it is adapted all the time",
        ("drafter.drift=0",),
    ),
    Assumed(
        "the weight sync goes from GPU to GPU and takes 0.1 to 0.6 s (7B), or 2.3 to 2.6 s (32B)",
        "learner and engines share GPUs, a node has one card of 200 Gbit/s: the simulator's way",
    ),
    Assumed(
        "the learner computes 10 operations per parameter and token, at half of the data sheet's "
        "peak; collectives and optimizer take 0.2 to 2.3 s (7B), or 8.6 to 9.9 s (32B), besides",
        "training (6), and a forward pass each (2) for the old and the reference policy; the "
        "simulator's model of the network",
    ),
    Assumed(
        "rewards take 10 s after the last sample",
        "answers are compared by programs; nothing published",
        ("learner.reward_s=10",),
    ),
]


def by_length(tokens: float, draft_tokens: int = 3) -> tuple[float, ...]:
    """Return acceptance rates that fall by one factor, for an acceptance length."""
    powers = [*[1.0] * draft_tokens, 1 - tokens]
    (rate,) = (float(r.real) for r in np.roots(powers) if r.real > 0 and abs(r.imag) < 1e-9)
    return tuple(rate**i for i in range(1, draft_tokens + 1))


@dataclass(frozen=True)
class Run:
    """A published run with a fixed draft length: speed-ups, acceptance, and what is assumed."""

    name: str
    published: dict[str, float]
    """Speed-ups of the rollout and end to end; on H100s also the seconds without speculation."""
    rates: tuple[float, ...]
    """Share of drafts accepted at least up to each position."""
    nodes: int
    assumed: list[Assumed]
    model: str = "qwen3-8b"
    operations: int = 10
    """Operations of the learner per parameter and token."""


SKYRL = [
    Assumed(
        "256 samples a step, 32 prompts with groups of 8, of at most 8,192 tokens; 8 engines of "
        "one H100; 3 draft tokens, accepted in 88.6, 77.0 and 66.3% of the drafts",
        "published",
        ("workload.prompts_per_step=32", "workload.group_size=8"),
    ),
    Assumed(
        "Qwen3-8B stands for Qwen3.5-9B",
        "the modelled policy nearest in size; in three of four layers of Qwen3.5 no KV cache grows",
    ),
    Assumed(
        "responses with a median of 1,707 tokens, and 8,192 at 95%",
        "not published; the simulator's shape, shrunk to the limit as for a recipe",
        ("workload.lengths={median=1707, p95=8192, longest=8192}",),
    ),
    Assumed(
        "a pass of the MTP head costs as much as one of an EAGLE-3 drafter",
        "both are one layer and the policy's head",
    ),
    Assumed(
        "an engine step takes 2 ms besides weights and KV cache",
        "the simulator's default; the run's script switches CUDA graphs off, so it took longer",
    ),
    Assumed(
        "the learner computes 8 operations per parameter and token; rewards take no time",
        "training (6) and the old policy (2); the script has no reference policy",
    ),
    Assumed("the drafter stays as good", "it is trained in every step", ("drafter.drift=0",)),
]
NEMO = [
    Assumed(
        "32 GPUs in nodes of 4; 3 draft tokens; acceptance lengths of 2.77 (RL-Think) and 3.32 "
        "(RL-Zero), with rates that fall by the same factor at each position",
        "published, read from a summary of the paper's tables; the rates by position are not",
        ("cluster.gpus_per_node=4",),
    ),
    Assumed(
        "H100s stand for GB200s",
        "the simulator knows no others; operations per byte of memory differ by 6%, but launches "
        "weigh more on the faster GPU",
    ),
    Assumed(
        "2,048 samples a step, 64 prompts with groups of 32",
        "not published; NeMo-RL's recipe for 8B (grpo_math_8B.yaml)",
        ("workload.prompts_per_step=64", "workload.group_size=32"),
    ),
    Assumed(
        "responses with a median of 2,500 tokens, 12,000 at 95%, at most 32,768; an engine has one "
        "GPU",
        "not published; the simulator's default",
    ),
    Assumed(
        "the learner computes 10 operations per parameter and token; rewards take no time",
        "training (6), the old and the reference policy (2 each); the published stages have no "
        "rewards",
    ),
    Assumed(
        "the drafter stays as good", "the published acceptance is a run's", ("drafter.drift=0",)
    ),
]
SKYRL_FOUND = {"rollout": 2.03, "end_to_end": 1.62, "rollout_s": 310.1, "step_s": 400.7}
RUNS = [
    Run("SkyRL", SKYRL_FOUND, (0.886, 0.77, 0.663), 1, SKYRL, operations=8),
    Run("NeMo-RL, RL-Think", {"rollout": 1.54, "end_to_end": 1.35}, by_length(2.77), 8, NEMO),
    Run("NeMo-RL, RL-Zero", {"rollout": 1.77, "end_to_end": 1.41}, by_length(3.32), 8, NEMO),
]


def scenario(
    model: str, nodes: int, parallel: int, assumed: list[Assumed] = ASSUMED
) -> ScenarioConfig:
    changes = [change for each in assumed for change in each.settings]
    of_node = next(
        (int(c.partition("=")[2]) for c in changes if "gpus_per_node" in c), GPUS_PER_NODE
    )
    changes += [
        "num_steps=20",
        f'cluster.model="{model}"',
        f"cluster.tensor_parallel={parallel}",
        f"cluster.num_engines={nodes * of_node // parallel}",
    ]
    return check(ScenarioConfig, apply_overrides({}, changes), "scenario")


def as_measured(engine: EngineModel, tokens: float) -> EngineModel:
    """The engine with such costs of drafting, and of each row, that one of 32B is as fast as the
    paper says."""
    model, parallel = MEASURED
    plain_s = h100(*MODELS[model], parallel).step
    rows = np.array([[1.0, DRAFT_TOKENS * batch] for batch in BY_BATCH])
    costs = np.array([tokens / gained - 1 for gained in BY_BATCH.values()])
    (fixed, per_row), *_ = np.linalg.lstsq(rows, costs, rcond=None)
    return replace(
        engine,
        drafting=float(fixed) * plain_s,
        draft_pass=0.0,
        row=float(per_row) * plain_s,
        dense_row=0.0,
    )


def paper(config: ScenarioConfig) -> Gained:
    """Simulate the paper's system: its own speed-up of a batch, in small batches only."""
    cluster = cluster_of(config)
    arm = Arm("eagle3", DRAFT_TOKENS)
    engine = as_measured(cluster.engine, cluster.drafting.tokens(arm))
    schedule = [[LARGEST_BATCH, DRAFT_TOKENS]]
    small = {"kind": "by_batch_size", "drafter": "eagle3", "schedule": schedule}
    return gained(config, replace(cluster, engine=engine), small, 10)


def other(config: ScenarioConfig, of: Run) -> Gained:
    """Simulate a run that always drafts, with the simulator's own engine."""
    cluster = replace(cluster_of(config), drafting=Drafting({"eagle3": of.rates}))
    always = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": len(of.rates)}
    return gained(config, cluster, always, of.operations)


def gained(
    config: ScenarioConfig, cluster: Cluster, strategy: dict[str, Any], operations: int
) -> Gained:
    """Return the speed-ups of a strategy over no speculation."""
    speed = cluster.learner.tokens_per_s * 6 / operations
    cluster = replace(cluster, learner=replace(cluster.learner, tokens_per_s=speed))
    modes = [
        Mode("off", lambda: build_strategy({"kind": "off"})),
        Mode("tlt", lambda: build_strategy(strategy)),
    ]
    found = {}
    for mode in modes:
        simulation = Simulation(cluster, workload_of(config), mode, config.seed)
        found[mode.name] = figures(clock.run(simulation.run(config.num_steps)))
    seconds = {name: found["off"][name] for name in ("rollout_s", "step_s")}
    return speed_ups(found)["tlt"] | seconds


def row(name: str, figure: str, config: ScenarioConfig, published: float, of: Gained) -> Row:
    cluster = config.cluster
    return {
        "run": name,
        "figure": figure,
        "model": cluster.model,
        "gpus_per_engine": cluster.tensor_parallel,
        "nodes": num_nodes(cluster),
        "published": published,
        "simulated": round(of[figure], 3),
        "off_by": round(of[figure] / published - 1, 3),
    }


def main() -> None:
    rows: list[Row] = []
    for model, by_nodes in PUBLISHED.items():
        for parallel in ENGINE_GPUS[model]:
            for nodes, published in by_nodes.items():
                config = scenario(model, nodes, parallel)
                rows.append(row("TLT paper", "end_to_end", config, published, paper(config)))
                print(rows[-1], flush=True)
    for each in RUNS:
        config = scenario(each.model, each.nodes, 1, each.assumed)
        found = other(config, each)
        for figure, published in each.published.items():
            length = {"acceptance_length": round(1 + sum(each.rates), 3)}
            rows.append(row(each.name, figure, config, published, found) | length)
            print(rows[-1], flush=True)
    assumed = {
        name: [{"what": each.what, "why": each.why} for each in of]
        for name, of in {"TLT paper": ASSUMED, "SkyRL": SKYRL, "NeMo-RL": NEMO}.items()
    }
    save("published", {"assumed": assumed, "rows": rows})


if __name__ == "__main__":
    main()
