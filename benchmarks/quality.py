"""How well the tiny recipe learns: held-out rewards before and after, several seeds.

    python benchmarks/quality.py [--seeds 3] [--steps 60]

Needs models/tiny-sft (see configs/tiny_gcd_cpu.toml). That TLT changes no reward is what
`same_run.py` shows, bit by bit. Writes results/quality.json.
"""

from __future__ import annotations

import statistics

from common import ROOT, parse_options, save, trained
from tlt.observe.record import read


def held_out(seed: int, steps: int) -> list[float]:
    """Return the rewards on held-out problems, the first before training."""
    out = ROOT / "runs" / "quality" / f"off-{seed}-{steps}"
    settings = (f"run.seed={seed}", f"run.num_steps={steps}", "tlt.enabled=false")
    records = read(trained(out, "configs/tiny_gcd_cpu.toml", *settings) / "metrics.jsonl")
    return [r["eval/reward_mean"] for r in records if "eval/reward_mean" in r]


def main() -> None:
    options = parse_options(__doc__, seeds=3, steps=60)
    runs = [{"held_out": held_out(seed, options.steps)} for seed in range(options.seeds)]
    for place, when in ((0, "before"), (-1, "after")):
        print(when, statistics.fmean(run["held_out"][place] for run in runs))
    save("quality", {"seeds": options.seeds, "steps": options.steps, "runs": {"off": runs}})


if __name__ == "__main__":
    main()
