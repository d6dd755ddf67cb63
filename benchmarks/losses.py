"""What a drafter should be trained on: several losses, equal processor time, held-out drafts.

    python benchmarks/losses.py [--seconds 45] [--seeds 2] [--losses ce agree]

A draft is accepted if it equals the policy's draw with the same noise (benchmarks/distance.py).
Every loss trains a new drafter for the policy of `tlt models words` on the same samples, for as
long by the clock of the processor, seed by seed:

- `ce`: cross-entropy with the policy's distribution,
- `agree`: minus the logarithm of the chance that both draws agree, if drawn in one stage as on
  GPUs, from the policy's 32 likeliest tokens and the sum of the others, and `stages`: in two stages
  as on CPUs, from all tokens,
- `tv`: total variation,
- `mix A`: A of `agree` and the rest of `ce`,
- `chain`: minus the logarithm of the expected tokens per draft, which multiply the agreements,
- `ce, agree`: cross-entropy for half of the time, then `agree`,
- `ce 3.1`: cross-entropy, for a drafter with the norms of EAGLE-3.1, as new drafters are: one for
  each fused state, and a normed state for the next pass. The others have neither.

Losses that are not run stay in the file. Writes benchmarks/results/losses.json: expected tokens per
draft at lengths 3 and 7, for the shares of the noise that a drafter may draw with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common import ROOT, load, parse_options, save, spread
from distance import PLACES, at_temperature, policy_and_ends, samples, two_stages
from tlt.drafter.agreement import LIKELIEST, joint_log_chances
from tlt.drafter.eagle3.model import STEP_DECAY, Eagle3Drafter
from tlt.drafter.passes import DraftPasses, Row
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
from tlt.states.captured import Captured, Offer

DEPTH = 4
"""Passes that are trained."""
ROW_TOKENS = 1024
LR = 2e-3
TRAINED, HELD_OUT = 640, 48
"""Samples to train on, and to evaluate at each temperature."""
TEMPERATURES = (0.6, 1.0)
CACHE = ROOT / "runs" / "losses" / "samples.pt"
"""Samples to train on and to evaluate on, which all drafters share."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Loss [n] of draft logits [n, V] against the policy's probabilities [n, V]."""


def agree(drafted: Tensor, policy: Tensor) -> Tensor:
    log_p, tokens = policy.clamp_min(1e-20).log().topk(LIKELIEST, -1)
    log_q = drafted.log_softmax(-1).gather(-1, tokens)
    return -joint_log_chances(log_p, log_q).logsumexp(-1)


def stages(drafted: Tensor, policy: Tensor) -> Tensor:
    return -two_stages(policy, drafted.softmax(-1)).clamp_min(1e-6).log()


def ce(drafted: Tensor, policy: Tensor) -> Tensor:
    return cross_entropy(drafted, policy, reduction="none")


def tv(drafted: Tensor, policy: Tensor) -> Tensor:
    return (drafted.softmax(-1) - policy).abs().sum(-1) / 2


def mix(share: float) -> Loss:
    return lambda drafted, policy: (
        share * agree(drafted, policy) + (1 - share) * ce(drafted, policy)
    )


LOSSES: dict[str, Loss] = {
    "ce": ce,
    "agree": agree,
    "stages": stages,
    "tv": tv,
    "mix 0.1": mix(0.1),
    "mix 0.5": mix(0.5),
    "mix 0.9": mix(0.9),
    "chain": agree,
    "ce, agree": ce,
    "ce 3.1": ce,
}


class Trainer(DrafterTrainer):
    """A trainer with a loss of its own."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__(*args)
        self.name = name

    def loss(self, row: Row, *_: Any) -> Tensor:
        starts = row.chains.starts
        probs = self.passes.project(row.final_TH[starts + 1], self._draft_head).softmax(-1)
        alive, weights = torch.zeros(len(starts)), 0.0
        gained = torch.ones(len(starts))
        total = torch.zeros(())
        for step, hidden in enumerate(self.passes.unroll(row)):
            learned = row.learned(step)
            target = probs[torch.searchsorted(starts, starts[learned] + step)]
            losses = LOSSES[self.name](self.drafter.lm_head(hidden[learned]), target)
            weights += STEP_DECAY**step
            total = total + STEP_DECAY**step * losses.mean()
            # Log of the chance that the draft is accepted up to here; none beyond the response.
            alive = alive.masked_scatter(learned, alive[learned] - losses)
            gained = gained + torch.where(learned, alive.exp(), 0.0)
        return -gained.log().mean() if self.name == "chain" else total / weights


class Samples:
    """Samples to train on, all with the weight of their length."""

    def __init__(self, found: Sequence[Captured]) -> None:
        self._found = {str(number): sample for number, sample in enumerate(found)}

    def offers(self) -> dict[str, Offer]:
        return {name: Offer(len(of), float(of.num_chains)) for name, of in self._found.items()}

    def read(self, name: str) -> Captured:
        return self._found[name]


def trained(task: tuple[str, int, float]) -> dict[str, Any]:
    """Train a drafter on one core, and return its tokens per draft by temperature and length."""
    name, seed, seconds = task
    torch.set_num_threads(1)
    policy, head, embedding = policy_and_ends()
    cached = torch.load(CACHE, weights_only=False)
    source = Samples(cached["train"])
    settings = TrainerSettings(
        num_draft_tokens=DEPTH,
        row_tokens=ROW_TOKENS,
        lr=LR,
        temperature=1.0,
        seed=seed,
        bfloat16=False,
    )
    drafter = fresh_drafter(policy.config, head, None, seed)
    if name != "ce 3.1":
        weights = drafter.state_dict()
        drafter = Eagle3Drafter(replace(drafter.config, fc_norm=False, norm_output=False))
        drafter.load_state_dict(weights, strict=False)
    trainer = Trainer(name, drafter, head, embedding, settings)
    began_s = time.process_time()
    while (spent_s := time.process_time() - began_s) < seconds:
        row = trainer.draw(source)
        assert row is not None
        if name == "ce, agree" and spent_s > seconds / 2:
            trainer.name = "agree"
        # The last fifth of the time lowers the learning rate, as `tlt drafter train` does.
        trainer.micro_step(row, lr_scale=min(1.0, 5 * (1 - spent_s / seconds)))
    passes = DraftPasses(trainer.drafter, head, embedding, PLACES, bfloat16=False)
    of = {f"{t:g}": at_temperature(passes, t, cached[t]) for t in TEMPERATURES}
    tokens = {t: values["tokens_per_draft"] for t, values in of.items()}
    for t, by_length in tokens.items():
        shown = {way: round(value, 3) for way, value in by_length["3"].items()}
        print(name, seed, trainer.step, t, shown, flush=True)
    return {"optimizer_steps": trainer.step, "tokens": tokens}


def summary(runs: Sequence[Any]) -> dict[str, Any]:
    """Return the spread over seeds."""
    first = runs[0]["tokens"]
    return {
        "optimizer_steps": spread([run["optimizer_steps"] for run in runs]),
        "tokens_per_draft": {
            t: {
                length: {way: spread([run["tokens"][t][length][way] for run in runs]) for way in of}
                for length, of in first[t].items()
            }
            for t in first
        },
    }


def main() -> None:
    options = parse_options(__doc__, seconds=45.0, seeds=2, losses=[*LOSSES])
    policy, _, _ = policy_and_ends()
    cached: dict[str | float, Any] = {"train": samples(policy, 1.0, TRAINED, "train")}
    cached |= {t: samples(policy, t, HELD_OUT, "distance") for t in TEMPERATURES}
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    torch.save(cached, CACHE)
    tasks = [
        (name, seed, options.seconds) for seed in range(options.seeds) for name in options.losses
    ]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        runs = list(zip(tasks, pool.map(trained, tasks), strict=True))
    found = {
        name: summary([run for task, run in runs if task[0] == name]) for name in options.losses
    }
    found = {**load("losses").get("losses", {}), **found}
    save("losses", {"seconds": options.seconds, "seeds": options.seeds, "losses": found})


if __name__ == "__main__":
    main()
