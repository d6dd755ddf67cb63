"""Does the simulator find the published scaling of the idea, from assumptions alone?

    python benchmarks/published.py

The TLT paper reports the end-to-end speed-up over nodes of 8 H100s: 7B 1.21, 1.45, 1.62 and 1.76 on
1, 2, 4 and 8 nodes; 32B 1.83 and 2.12 on 4 and 8. What follows is assumed, each for its own reason.
How many GPUs an engine of the 7B model had is not known here, and much hangs on it: 1, 2 and 4 are
shown. Writes results/published.json.
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
from tlt.simulate.cluster import Mode, Simulation
from tlt.simulate.model import EngineModel
from tlt.simulate.profiles import MODELS, h100
from tlt.simulate.scenario import ScenarioConfig, cluster_of, workload_of
from tlt.strategy.spec import build_strategy

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
        "the weight sync takes 0.6 s (7B) or 2.6 s (32B) for every node",
        "one network card of 200 Gbit/s sends the policy to each of them; the simulator's default",
    ),
    Assumed(
        "the learner computes 10 operations per parameter and token, at half of the data sheet's "
        "peak",
        "training (6), and a forward pass each (2) for the old and the reference policy",
    ),
    Assumed(
        "rewards take 10 s after the last sample",
        "answers are compared by programs; nothing published",
        ("learner.reward_s=10",),
    ),
]


def scenario(model: str, nodes: int, parallel: int) -> ScenarioConfig:
    changes = [change for assumed in ASSUMED for change in assumed.settings]
    changes += [
        "num_steps=20",
        f'cluster.model="{model}"',
        f"cluster.tensor_parallel={parallel}",
        f"cluster.num_engines={nodes * GPUS_PER_NODE // parallel}",
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


def run(config: ScenarioConfig) -> dict[str, list[dict[str, float]]]:
    cluster = cluster_of(config)
    arm = Arm("eagle3", DRAFT_TOKENS)
    cluster = replace(
        cluster,
        engine=as_measured(cluster.engine, cluster.drafting.tokens(arm)),
        learner=replace(cluster.learner, tokens_per_s=cluster.learner.tokens_per_s * 6 / 10),
    )
    schedule = [[LARGEST_BATCH, DRAFT_TOKENS]]
    small = {"kind": "by_batch_size", "drafter": "eagle3", "schedule": schedule}
    modes = [
        Mode("off", lambda: build_strategy({"kind": "off"})),
        Mode("tlt", lambda: build_strategy(small)),
    ]
    return {
        mode.name: clock.run(
            Simulation(cluster, workload_of(config), mode, config.seed).run(config.num_steps)
        )
        for mode in modes
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for model, by_nodes in PUBLISHED.items():
        for parallel in ENGINE_GPUS[model]:
            for nodes, published in by_nodes.items():
                records = run(scenario(model, nodes, parallel))
                gained = speed_ups({name: figures(of) for name, of in records.items()})["tlt"]
                rows.append(
                    {
                        "model": model,
                        "gpus_per_engine": parallel,
                        "nodes": nodes,
                        "published": published,
                        "simulated": round(gained["end_to_end"], 3),
                        "off_by": round(gained["end_to_end"] / published - 1, 3),
                    }
                )
                print(rows[-1], flush=True)
    assumed = [{"what": each.what, "why": each.why} for each in ASSUMED]
    save("published", {"assumed": assumed, "rows": rows})


if __name__ == "__main__":
    main()
