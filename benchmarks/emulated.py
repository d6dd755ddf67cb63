"""TLT in the regime of GPUs: eight engines on two cores, with the times of a node of H100s.

    python benchmarks/emulated.py [--arms off tlt] [--steps 30] [--anew]

Every arm is a `tlt train configs/words_emulated_cpu.toml` with settings of its own. A run that is
complete is not made again, unless with `--anew`, and arms that are not run stay in the file.
Everything is real but the time of the kernels, so arms need not take turns: their seconds are
emulated, and a machine that is too slow for them shows in the shares of late work.

Writes results/emulated.json: for every arm its RL steps, its speed-ups over its reference on the
rollout and end to end, in all and by thirds of the run, and whether its samples and its policy are
the reference's; then the same arms as the simulator predicts them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from common import ROOT, load, parse_options, save, trained
from tlt.config.load import apply_overrides, check, load_config
from tlt.config.train import TrainConfig
from tlt.contracts import OFF
from tlt.contracts import Arm as DraftArm
from tlt.observe.record import read_metrics
from tlt.observe.timeline import StepTimeline
from tlt.report.view import RunView, look_at
from tlt.simulate.calibrate import Calibration, calibrate
from tlt.simulate.cluster import Training
from tlt.simulate.scenario import ScenarioConfig, simulate

sys.path.append(str(Path(__file__).parent / "e2e"))
import steps

CONFIG = "configs/words_emulated_cpu.toml"
RUNS = ROOT / "runs" / "emulated"
DRAFTER = "models/words-eagle3"
ARMS_OF_GPUS = (
    '[["off", 0], ["ngram", 3], ["ngram", 7], ["eagle3", 1], ["eagle3", 3], ["eagle3", 7]]'
)
"""The default arms of engines on GPUs with a drafter."""
ADAPTIVE = f'engine.strategy={{kind="adaptive", arms={ARMS_OF_GPUS}}}'
WITH_DRAFTER = (f'engine.drafter="{DRAFTER}"', "tlt.harvest=false")
TLT = ("tlt.enabled=true", ADAPTIVE, f'engine.drafter="{DRAFTER}"', "tlt.lr=5e-4")
FAST = ("learner.lr=2e-3",)
EQUAL = ("debug.forced_lengths={median=64, p95=64, longest=64}",)


@dataclass(frozen=True, slots=True)
class Arm:
    label: str
    settings: tuple[str, ...]
    reference: str = "off"
    steps_share: float = 1.0
    """RL steps of the arm, as a share of the others'."""
    dilation: float = 16.0
    """Drafts of the model cost these cores more than other engine steps do."""

    @property
    def dilated(self) -> tuple[str, ...]:
        """Return the settings whose seconds are those of these cores."""
        return (
            f"emulate.dilation={self.dilation:g}",
            f"tlt.min_lease_s={0.2 * self.dilation:g}",
            f"tlt.session_s={0.4 * self.dilation:g}",
        )


def with_strategy(spec: str) -> tuple[str, ...]:
    return (*WITH_DRAFTER, f"engine.strategy={spec}")


ARMS = {
    "off": Arm("no speculation", (), dilation=8),
    "fixed": Arm(
        "stock: frozen drafter, always 3 tokens",
        with_strategy('{kind="fixed", drafter="eagle3", num_draft_tokens=3}'),
        steps_share=0.4,
    ),
    "fixed7": Arm(
        "stock: frozen drafter, always 7 tokens",
        with_strategy('{kind="fixed", drafter="eagle3", num_draft_tokens=7}'),
        steps_share=0.2,
    ),
    "by_batch": Arm(
        "stock: frozen drafter, length by batch size",
        with_strategy('{kind="by_batch_size", drafter="eagle3", schedule=[[4, 4], [16, 2]]}'),
        steps_share=0.4,
    ),
    "beg_mab": Arm(
        "frozen drafter, BEG-MAB",
        with_strategy(f'{{kind="beg_mab", arms={ARMS_OF_GPUS}}}'),
        steps_share=0.2,
    ),
    "ngram": Arm("n-grams, adaptive", ("tlt.enabled=true", "tlt.harvest=false"), dilation=10),
    "frozen": Arm(
        "frozen drafter, adaptive", ("tlt.enabled=true", ADAPTIVE, *WITH_DRAFTER), steps_share=0.7
    ),
    "nothing": Arm("TLT from nothing", ("tlt.enabled=true", ADAPTIVE)),
    "tlt": Arm("TLT from a drafter", TLT, steps_share=0.7),
    "fast_frozen": Arm(
        "frozen drafter, policy moves fast",
        ("tlt.enabled=true", ADAPTIVE, *WITH_DRAFTER, *FAST),
        "",
        0.4,
    ),
    "fast_tlt": Arm(
        "TLT from a drafter, policy moves fast",
        (*TLT, *FAST),
        "fast_frozen",
        0.4,
    ),
    "equal_off": Arm("no speculation, equal lengths", EQUAL, "", 0.2, dilation=8),
    "equal_tlt": Arm(
        "TLT from nothing, equal lengths", ("tlt.enabled=true", ADAPTIVE, *EQUAL), "equal_off", 0.2
    ),
}
PER_STEP = {
    "step_s": "time/step_s",
    "rollout_s": "time/rollout_s",
    "update_s": "time/update_s",
    "sync_s": "time/sync_s",
    "tokens_per_draft": "rollout/acceptance_length",
    "idle_share": "rollout/idle_share",
    "trained_s": "harvest/used_s",
    "trained_tokens": "harvest/trained_tokens",
    "published": "harvest/published",
    "reward": "reward/mean",
    "median_tokens": "response/median_tokens",
    "p99_tokens": "response/p99_tokens",
    "hit_share": "rollout/drafter_hit_share",
    "late_share": "emulate/late_share",
    "late_s_share": "emulate/late_s_share",
    "update_late_s": "emulate/update_late_s",
    "commands_late_s": "emulate/commands_late_s",
    "trainers_late_s": "harvest/late_s",
}
MODES = {"fixed": "static", "ngram": "ngram", "frozen": "frozen", "nothing": "tlt"}
"""Mode of the simulator, by arm."""
CALIBRATING = ("off", "fixed", "ngram", "frozen")
WARM_UP = 1
COSTLY = 1.75
"""Time of an engine step with three draft tokens, per step without: the middle of 1.6 to 1.9, by
the published runs of results/published.json."""


def make_models() -> None:
    """Make the policy, and a drafter for it, unless they are there."""
    commands = {
        "models/words": "models words",
        DRAFTER: "drafter train --model models/words --task word_problems --draft-tokens 3 "
        "--out runs/words-small-drafter --row-tokens 512 --num-samples 768 --num-held-out 32 "
        "--max-tokens 256 --dtype float32 --lr 4e-3 --budget-minutes 5",
    }
    for folder, command in commands.items():
        if not (ROOT / folder).exists():
            run(command)
            if folder == DRAFTER:
                out = ROOT / "runs" / "words-small-drafter"
                run(f"drafter export {out} --model models/words --out {DRAFTER}")


def run(command: str) -> None:
    subprocess.run([sys.executable, "-m", "tlt", *command.split()], cwd=ROOT, check=True)


def described(arm: str, out: Path) -> dict[str, Any]:
    """Return the RL steps of an arm's run, with digests of its samples and its policy.

    Seconds are those of the emulated node.
    """
    records = [record for record in read_metrics(out / "metrics.jsonl") if record["step"] > 0]
    digests = [steps.digest(path) for path in sorted((out / "samples").glob("*.jsonl"))]
    rows = [
        {
            name: steps.rounded(record[key] / (ARMS[arm].dilation if name.endswith("_s") else 1))
            for name, key in PER_STEP.items()
            if key in record
        }
        for record in records
    ]
    return {
        "label": ARMS[arm].label,
        "dilation": ARMS[arm].dilation,
        "steps": rows,
        "samples": digests,
        "policy": steps.policy(out),
    }


def total(rows: list[Mapping[str, float]], name: str) -> float:
    return sum(row[name] for row in rows)


def gained(of: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many times as fast as its reference an arm is."""
    mine, theirs = of["steps"][WARM_UP:], reference["steps"][WARM_UP:]
    count = min(len(mine), len(theirs))
    cuts = [count * third // 3 for third in range(4)]
    found: dict[str, Any] = {
        "same_samples": of["samples"][:count] == reference["samples"][:count],
        "same_policy": of["policy"] == reference["policy"],
    }
    for measure, name in {"end_to_end": "step_s", "rollout": "rollout_s"}.items():
        found[measure] = total(theirs[:count], name) / total(mine[:count], name)
        found[f"{measure}_thirds"] = [
            total(theirs[a:b], name) / total(mine[a:b], name) for a, b in pairwise(cuts)
        ]
    return found


def undilated(arm: str) -> RunView:
    """Return a run in the seconds of the emulated node."""
    view, d = look_at(RUNS / arm), ARMS[arm].dilation
    records = [
        {k: v / d if k.startswith("time/") or k == "harvest/used_s" else v for k, v in r.items()}
        for r in view.records
    ]
    timelines = [
        StepTimeline(
            of.step,
            of.start_s / d,
            of.end_s / d,
            [(stage, start_s / d, end_s / d) for stage, start_s, end_s in of.stages],
            {
                name: [replace(s, start_s=s.start_s / d, end_s=s.end_s / d) for s in spans]
                for name, spans in of.rows.items()
            },
        )
        for of in view.timelines
    ]
    return replace(view, records=records, timelines=timelines)


def learned(frozen: RunView, nothing: RunView) -> tuple[float, Training]:
    """Fit how a new drafter's acceptance rates approach those of the frozen one, as powers of them.

    Returns the power at the start, and the training.
    """
    share = "rollout/drafter_hit_share"
    base = log(fmean(r[share] for r in frozen.records if r.get(share)))
    steps = [r for r in nothing.records if 0 < r.get(share, 0.0) < 1]
    tokens = [r["harvest/trained_tokens"] for r in steps]
    powers = [log(r[share]) / base for r in steps]

    def error(choice: Training) -> float:
        expected = [powers[0]]
        for count in tokens[:-1]:
            left = (expected[-1] - choice.best_power) * exp(-count / choice.tokens)
            expected.append(choice.best_power + left)
        return sum((a - b) ** 2 for a, b in zip(powers, expected, strict=True))

    used_s = sum(r.get("harvest/used_s", 0.0) for r in nothing.records)
    choices = (
        Training(drift=0.0, tokens=10 ** (3 + size / 10), best_power=best / 50)
        for size in range(41)
        for best in range(25, 201)
    )
    return powers[0], replace(min(choices, key=error), tokens_per_s=sum(tokens) / used_s)


def simulated(num_steps: int) -> dict[str, Any]:
    """Return the speed-ups that the simulator predicts for arms, from the runs' own figures.

    `costly` has the same for drafts that cost what published runs imply: an engine step with three
    draft tokens takes `COSTLY` times as long as one without.
    """
    views = {arm: undilated(arm) for arm in (*CALIBRATING, "nothing")}
    power, training = learned(views["frozen"], views["nothing"])
    found = calibrate([views[arm] for arm in CALIBRATING])
    found = replace(found, training=training)
    engine, drafted, batch, context = found.engine, DraftArm("eagle3", 3), 4, 100
    more_s = COSTLY * engine.step_s(OFF, batch, context) - engine.step_s(drafted, batch, context)
    dear = replace(engine, draft_pass=engine.draft_pass + float(more_s) / 3)
    return {
        "start_power": power,
        "as_emulated": predicted(found, power, num_steps),
        "costly": predicted(replace(found, engine=dear), power, num_steps),
    }


def predicted(calibration: Calibration, power: float, num_steps: int) -> dict[str, Any]:
    """Return the simulated speed-ups; only TLT from nothing begins with a drafter that lags."""
    file = RUNS / "calibration.json"
    calibration.save(file)
    settings = [
        f"num_steps={num_steps}",
        'static_drafter="eagle3"',
        "static_draft_tokens=3",
        "cluster.num_engines=8",
        f'cluster.calibration="{file}"',
        "workload.prompts_per_step=32",
        "workload.group_size=4",
        f'workload.trace="{RUNS / "off" / "lengths.jsonl"}"',
        "tlt.min_lease_s=0.2",
        "tlt.session_s=0.4",
    ]
    records: dict[str, Any] = {}
    for modes, start in ((["off", "static", "ngram", "frozen"], 1.0), (["tlt"], power)):
        own = [*settings, f"modes={json.dumps(modes)}", f"drafter.start_power={start}"]
        records |= simulate(check(ScenarioConfig, apply_overrides({}, own), "scenario"))
    names = {"end_to_end": "time/step_s", "rollout": "time/rollout_s"}
    seconds = {
        mode: {measure: total(of[WARM_UP:], name) for measure, name in names.items()}
        for mode, of in records.items()
    }
    return {
        arm: {measure: seconds["off"][measure] / seconds[mode][measure] for measure in names}
        for arm, mode in MODES.items()
    }


def main() -> None:
    options = parse_options(__doc__, arms=[*ARMS], steps=30, anew=False)
    make_models()
    for name in options.arms:
        if options.anew:
            shutil.rmtree(RUNS / name, ignore_errors=True)
        print(name, flush=True)
        num_steps = round(options.steps * ARMS[name].steps_share)
        trained(
            RUNS / name,
            CONFIG,
            f"run.num_steps={num_steps}",
            "metrics.keep_samples=1000000",
            *ARMS[name].dilated,
            *ARMS[name].settings,
        )
    before = load("emulated")
    done = [name for name in ARMS if (RUNS / name / "summary.json").exists()]
    found = before.get("arms", {}) | {name: described(name, RUNS / name) for name in done}
    found = {name: found[name] for name in ARMS if name in found}
    for name in found:
        if (reference := ARMS[name].reference) in found and reference != name:
            found[name]["gained"] = {"reference": reference}
            found[name]["gained"] |= gained(found[name], found[reference])
            print(name, found[name]["gained"])
    result = before | {"emulated": load_config(TrainConfig, ROOT / CONFIG).emulate.label(8)}
    result["arms"] = found
    if {*CALIBRATING, "nothing"} <= {*done}:
        result["simulated"] = simulated(options.steps)
        print(result["simulated"])
    result.pop("provenance", None)
    save("emulated", result)


if __name__ == "__main__":
    main()
