"""What a drafter learns from nothing in a few minutes of one core, by setting.

    python benchmarks/harvest_budget.py record --folder runs/harvest_budget
    python benchmarks/harvest_budget.py profile --folder runs/harvest_budget
    python benchmarks/harvest_budget.py train --folder runs/harvest_budget

`record` lets the policy of `words.sh` answer word problems at temperature 1, and stores the samples
with their hidden states. An eighth of them is held out.

`profile` times an optimizer step and the evaluation of a drafter, by size of the draft vocabulary,
and counts which share of the held-out tokens each vocabulary covers.

`train` trains a new drafter per setting on the recorded samples, on one core. All settings take
turns of a few seconds, so that a slow minute of the machine meets all of them. Trainer seconds are
CPU seconds of training: an idle worker has its core to itself. After each of `SECONDS`, the
drafter's weights, as harvest would publish them, are evaluated on held-out samples at draft
length 3. Results are added to benchmarks/results/harvest_budget.json by the name of the setting.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tlt.drafter import vocabulary
from tlt.drafter.evaluation import evaluate, prepare_windows, with_weights
from tlt.drafter.passes import DraftPasses
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
from tlt.observe.provenance import provenance
from tlt.states.buffer import BufferSettings, SampleBuffer
from words import solved

RESULT = Path(__file__).parent / "results" / "harvest_budget.json"
SECONDS = (20, 60, 120, 300)
"""Trainer seconds after which drafters are evaluated."""
TURN_S = 10.0
"""Trainer seconds of one setting before the next one's turn."""
DRAFT_LENGTH = 3


# --- record -------------------------------------------------------------------------------------


def record(options: argparse.Namespace) -> None:
    """Store samples of the policy with their states."""
    buffer = buffer_of(Path(options.folder))
    samples = solved(
        options.model, options.num_samples, options.seed, "drafter", options.max_tokens
    )
    for index, sample in enumerate(samples):
        buffer.put(str(index), 1, sample.states)
    print(len(buffer.entries()), "samples in", options.folder)


def buffer_of(folder: Path) -> SampleBuffer:
    return SampleBuffer(BufferSettings(str(folder / "samples"), 8 * 2**30, 4096))


# --- train --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """How a drafter is trained; the default is the one of a run."""

    lr: float = 1e-3
    row_tokens: int = 512
    passes: int = 4
    vocabulary: int | None = 4096
    """Size of the draft vocabulary; None is the policy's."""
    averaged_steps: int = 4


class Arm:
    """A drafter in training under one setting."""

    def __init__(self, name: str, setting: Setting, policy: Any, buffer: SampleBuffer) -> None:
        self.name, self.setting, self._buffer = name, setting, buffer
        head = policy.get_output_embeddings().weight.detach()
        embedding = policy.get_input_embeddings().weight.detach()
        ids = None
        if setting.vocabulary is not None:
            seen = [buffer.read(name) for name in sorted(buffer.offers())]
            counts = vocabulary.count_tokens(
                [s.token_ids_T[s.loss_mask_T] for s in seen if s is not None], len(head)
            )
            ids = vocabulary.choose(counts, setting.vocabulary)
        drafter = fresh_drafter(policy.config, head, ids)
        self._trainer = DrafterTrainer(
            drafter,
            head,
            embedding,
            TrainerSettings(
                num_draft_tokens=setting.passes,
                row_tokens=setting.row_tokens,
                lr=setting.lr,
                temperature=1.0,
                seed=0,
                averaged_steps=setting.averaged_steps,
            ),
        )
        self.drafting = DraftPasses(
            self._trainer.drafter, head, embedding, DRAFT_LENGTH, bfloat16=False
        )
        self.trained_s = 0.0
        self.points: list[dict[str, float]] = []

    def turn(self, seconds: float) -> None:
        started = time.process_time()
        self._trainer.session(
            self._buffer, lambda: False, is_over=lambda: time.process_time() - started >= seconds
        )
        self.trained_s += time.process_time() - started

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._trainer.step

    def draft_token_ids(self) -> torch.Tensor:
        return self._trainer.drafter.draft_token_ids()

    def evaluate(self, windows: Any, at_s: float) -> None:
        with with_weights(self._trainer.drafter, self._trainer.mean_weights()):
            found = evaluate(self.drafting, windows, [1.0, 0.0])
        self.points.append(
            {
                "at_s": at_s,
                "trained_s": self.trained_s,
                "steps": self._trainer.step,
                "tokens": self._trainer.tokens_seen,
                "length": found.length(1.0),
                "first": found.rates[1.0][0],
                "greedy_length": found.length(0.0),
            }
        )
        print(self.name, self.points[-1], flush=True)


def profile(options: argparse.Namespace) -> None:
    """Time the parts of harvest's work for each size of the draft vocabulary."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = Path(options.folder)
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    buffer = buffer_of(folder)
    held_out = buffer.held_out(10**6)
    counts = vocabulary.count_tokens(
        [s.token_ids_T[s.loss_mask_T] for s in held_out], policy.config.vocab_size
    )
    rows = []
    for size in (*options.sizes, None):
        arm = Arm("", Setting(vocabulary=size), policy, buffer)
        windows = prepare_windows(arm.drafting, held_out[:2], [1.0])
        arm.turn(0.1)  # warm up
        steps, before = arm.steps, arm.trained_s
        while arm.steps < steps + options.steps:
            arm.turn(0.1)
        started = time.process_time()
        arm.evaluate(windows, 0)
        spent_s = time.process_time() - started
        num_tokens = sum(len(window.row.chains.starts) for window in windows)
        rows.append(
            {
                "vocabulary": size or policy.config.vocab_size,
                "step_s": (arm.trained_s - before) / options.steps,
                "evaluate_token_s": spent_s / num_tokens,
                "coverage": vocabulary.coverage(counts, arm.draft_token_ids()),
            }
        )
        print(rows[-1], flush=True)
        del arm
    found = read_results()
    shape = Setting()
    found["profile"] = {"rows": rows, "row_tokens": shape.row_tokens, "passes": shape.passes}
    found["samples"] = {
        "num_samples": len(buffer.entries()),
        "num_tokens": sum(entry.num_learned for entry in buffer.entries()),
        "held_out": len(held_out),
    }
    write_results(found)


def train(options: argparse.Namespace) -> None:
    """Train the named settings in turns."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = Path(options.folder)
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    buffer = buffer_of(folder)
    arms = [Arm(name, setting_of(name), policy, buffer) for name in options.settings]
    marks = [s for s in SECONDS if s <= options.seconds]
    for mark in marks:
        while any(arm.trained_s < mark for arm in arms):
            for arm in arms:
                if arm.trained_s < mark:
                    arm.turn(min(TURN_S, mark - arm.trained_s))
        windows = prepare_windows(arms[0].drafting, buffer.held_out(options.held_out_tokens), [1.0])
        for arm in arms:
            arm.evaluate(windows, mark)
        keep(options, arms)


def setting_of(name: str) -> Setting:
    """Read a setting such as `lr=3e-4,vocabulary=4096`; `default` changes nothing."""
    setting = Setting()
    for part in name.split(",") if name != "default" else ():
        key, value = part.split("=")
        setting = replace(setting, **{key: float(value) if key == "lr" else int(value)})
    return setting


def keep(options: argparse.Namespace, arms: list[Arm]) -> None:
    found = read_results()
    for arm in arms:
        found["settings"][arm.name] = {"setting": asdict(arm.setting), "points": arm.points}
    write_results(found)


def read_results() -> dict[str, Any]:
    found: dict[str, Any] = {"settings": {}}
    if RESULT.exists():
        found = json.loads(RESULT.read_text())
    return found


def write_results(found: dict[str, Any]) -> None:
    found["provenance"] = provenance("python benchmarks/harvest_budget.py")
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("--num-samples", type=int, default=256)
    recorder.add_argument("--max-tokens", type=int, default=480)
    recorder.add_argument("--seed", type=int, default=2)
    recorder.set_defaults(run=record)
    trainer = commands.add_parser("train")
    trainer.add_argument("settings", nargs="*", default=["default"])
    trainer.add_argument("--seconds", type=float, default=300)
    trainer.add_argument("--held-out-tokens", type=int, default=3000)
    trainer.set_defaults(run=train)
    profiler = commands.add_parser("profile")
    profiler.add_argument("--sizes", type=int, nargs="*", default=[2048, 4096, 8192, 16384])
    profiler.add_argument("--steps", type=int, default=2)
    profiler.set_defaults(run=profile)
    for command in (recorder, trainer, profiler):
        command.add_argument("--model", default="models/smollm2-words")
        command.add_argument("--folder", default="runs/harvest_budget")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
