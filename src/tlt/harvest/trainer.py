"""The trainer beside an engine: trains the drafter on the engine's device while it holds a lease.

Every piece of work names its lease, and breaks off within one pass of the drafter when that lease
ends. The trained weights stay in this process for the next lease. `end` and `export` may come from
other threads: a trainer that joins a round in the middle wants the weights that the round began
with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from tlt.config.train import TltConfig
from tlt.drafter.checkpoint import load_drafter, read_moments
from tlt.drafter.evaluation import HeldOutWindow, evaluate, prepare_windows, with_weights
from tlt.drafter.passes import Interrupted
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings
from tlt.hardware import compute_dtype
from tlt.harvest.contract import Evaluation, Trained, Weights
from tlt.harvest.leases import Holder
from tlt.harvest.published import Tensors, head_and_embedding, is_new, read_embed_and_head
from tlt.logs import LogSettings
from tlt.states.buffer import BufferSettings, SampleBuffer
from tlt.states.captured import Captured
from tlt.timing.node import Node

DRAFTER_LR, NEW_DRAFTER_LR = 1e-4, 1e-3
AVERAGED_STEPS, NEW_AVERAGED_STEPS = 32, 4
"""Learning rate and averaged steps of trained drafters, and of new ones, which learn more."""
HELD_OUT_WINDOW = 256
"""Tokens of a held-out sample in one evaluation pass; few, so the pass is short."""
BETTER = 1.0
"""Standard errors by which a drafter must be better to be published. Training mostly helps:
publishing a drafter that only seems better costs less than keeping back one that is better."""
WORSE = 2.0
"""Standard errors by which a drafter must be worse for its trainer to restart from the published
one."""
VOCABULARY_TOKENS = 100_000
"""Tokens of recent and long samples from which a vocabulary is chosen."""
DOUBT_TOKENS = 0.1
"""Prior standard deviation of one window's gain, in tokens: it counts while windows are few."""
SURE = 3.0
"""Standard errors after which no further window would change that a drafter is better."""
MIN_WINDOWS = 4
"""Held-out windows that every evaluation takes, however little time it has."""
WINDOWS_AT_ONCE = 2
"""Held-out windows between two checks of the clock and of the difference so far."""


@dataclass(frozen=True, slots=True)
class HarvestTrainerSettings:
    """Settings of a trainer beside an engine."""

    drafter: str
    """Folder of the drafter that the engines start with."""
    policy: str
    """Folder of the policy that the engines start with."""
    buffer: BufferSettings
    trainer: TrainerSettings
    held_out_tokens: int
    """Tokens of the policy on which a drafter is evaluated."""
    untrained: bool = False
    """Whether the drafter is new: its vocabulary is then chosen from the policy's samples."""
    emulate: dict[str, Any] | None = None
    """The GPU to emulate, as `EmulateConfig`; None emulates nothing."""
    log: LogSettings | None = None
    """Log settings of the trainers; None leaves logging unchanged."""


def trainer_settings(
    drafter: Path,
    policy: str,
    buffer: BufferSettings,
    tlt: TltConfig,
    *,
    num_draft_tokens: int,
    new: bool,
    temperature: float,
    seed: int,
    on_gpu: bool,
    emulate: dict[str, Any] | None = None,
    log: LogSettings | None = None,
) -> HarvestTrainerSettings:
    """Return the settings of the trainers of a drafter, which is `new` or was trained elsewhere.

    `num_draft_tokens` is the draft length to train for where `tlt` does not say it.
    """
    return HarvestTrainerSettings(
        drafter=str(drafter),
        policy=policy,
        buffer=buffer,
        trainer=TrainerSettings(
            num_draft_tokens=tlt.num_draft_tokens or num_draft_tokens,
            row_tokens=tlt.row_tokens,
            lr=tlt.lr or (NEW_DRAFTER_LR if new else DRAFTER_LR),
            averaged_steps=NEW_AVERAGED_STEPS if new else AVERAGED_STEPS,
            temperature=temperature,
            bfloat16=compute_dtype(on_gpu=on_gpu) == "bfloat16",
            seed=seed,
        ),
        held_out_tokens=tlt.held_out_tokens,
        untrained=is_new(drafter),
        emulate=emulate,
        log=log,
    )


class _Scored:
    """Weights of a drafter, and their expected tokens per draft in the first held-out windows."""

    def __init__(self, weights: Tensors) -> None:
        self.weights = weights
        self.lengths: list[float] = []

    def same_as(self, weights: Tensors) -> bool:
        return all(torch.equal(tensor, weights[name]) for name, tensor in self.weights.items())


class HarvestTrainer:
    def __init__(self, settings: HarvestTrainerSettings, device: torch.device) -> None:
        self._held_out_tokens = settings.held_out_tokens
        self._gate = settings.trainer.temperature
        self._device = device
        self._node = Node.of(settings.emulate)
        self._holder = Holder()
        self._buffer = SampleBuffer(settings.buffer)
        self._trainer = DrafterTrainer(
            load_drafter(Path(settings.drafter)),
            *head_and_embedding(read_embed_and_head(Path(settings.policy))),
            settings.trainer,
        )
        if (state := read_moments(Path(settings.drafter))) is not None:
            self._trainer.take_moments(state)
        self._initial = self._trainer.mean_weights()
        self._published = _Scored(self._initial)
        self._own: _Scored | None = None
        """The trainer's own weights while they are evaluated; None once they have changed."""
        self._at_start: dict[str, torch.Tensor] | None = None
        """While the trainer trains or evaluates, the weights that it began with."""
        self._check_vocabulary = settings.untrained
        """Whether the policy's text may have moved away from the draft vocabulary."""
        self._parts: list[Captured] | None = None
        """Windows of held-out samples on which all drafters are evaluated, one after the other."""
        self._held_out: list[HeldOutWindow] = []
        """The first of these windows, with the policy's output."""

    # --- leases -------------------------------------------------------------------------------

    def begin(self, lease: int, seconds: float) -> bool:
        """Take up a lease; return False if it has been called back already."""
        held = self._holder.begin(lease, seconds, time.monotonic())
        if held:
            with self._moving():
                self._trainer.move(self._device)
        return held

    def end(self, lease: int) -> None:
        """Break off the work under this lease; may be called from any thread."""
        self._holder.end(lease)

    def release(self) -> None:
        """Leave the device to the engine; work that comes late under this lease does nothing."""
        self._holder.end_current()
        with self._moving():
            if self._device.type == "cuda":
                self._forget_held_out()
                self._trainer.park()
                torch.cuda.empty_cache()

    def _ended(self, lease: int) -> bool:
        return not self._holder.holds(lease, time.monotonic())

    # --- work under a lease -------------------------------------------------------------------

    def take(
        self,
        base: Weights | None = None,
        published: Weights | None = None,
        policy: Weights | None = None,
    ) -> None:
        """Continue from `base`, compare with `published`, follow `policy`; None changes nothing."""
        if policy is not None:
            # With a new policy came new samples: evaluate on those.
            self._forget_held_out()
            self._check_vocabulary = True
            self._trainer.follow(*head_and_embedding(policy.blob))
        if published is not None:
            blob = published.blob if published.version else self._initial
            if self._own is not None and self._own.same_as(blob):
                self._published = self._own
            else:
                self._published = _Scored({name: t.clone() for name, t in blob.items()})
        if base is not None:
            self._load(base.blob if base.version else self._initial)

    def train(self, lease: int, seconds: float) -> Trained:
        """Train on the node's buffer for `seconds`, or until the lease ends."""
        until_s = time.monotonic() + seconds
        self._choose_vocabulary(lease)
        own, self._own = self._own, None
        losses: list[float] = []
        seen = self._trainer.tokens_seen
        late_s = self._late_s()
        started_s, counted = time.perf_counter(), seen

        def learned(step: int, loss: float) -> None:
            nonlocal started_s, counted
            losses.append(loss)
            self._wait(lease, started_s, self._trainer.tokens_seen - counted)
            started_s, counted = time.perf_counter(), self._trainer.tokens_seen

        self._at_start = self._trainer.mean_weights()
        try:
            num_steps = self._trainer.session(
                self._buffer,
                lambda: self._ended(lease),
                learned,
                is_over=lambda: time.monotonic() >= until_s,
            )
        finally:
            self._at_start = None
        if not num_steps:
            self._own = own  # continue the evaluation that was interrupted
        if losses and not all(map(math.isfinite, losses)):
            self._trainer.load(self._published.weights)
            raise FloatingPointError(
                "the drafter's loss is not finite; it restarts from the published one"
            )
        return Trained(
            num_steps=num_steps,
            num_tokens=self._trainer.tokens_seen - seen,
            loss=sum(losses) / max(1, len(losses)),
            starved=not self._buffer.offers(),
            late_s=self._late_s() - late_s,
        )

    def evaluate(self, lease: int, seconds: float) -> Evaluation | None:
        """Compare with the published drafter; return None if interrupted, or with no held-out data.

        Both are evaluated window by window, which gives the standard error of their difference.
        That ends when the difference is clear, or after `seconds`.
        """
        if self._own is None:
            self._own = _Scored(self._trainer.mean_weights())
        try:
            new, old, sizes = self._compare(lease, self._own, self._published, seconds)
        except Interrupted:
            return None
        if not new:
            return None
        gain, error = difference(new, old, sizes)
        if gain < -WORSE * error:
            self._load(self._published.weights)
        return Evaluation(gain > BETTER * error, fmean(new, sizes), fmean(old, sizes))

    def merge(
        self,
        lease: int,
        others: Sequence[tuple[Tensors, float]],
        own_weight: float,
        seconds: float,
    ) -> bool:
        """Average with the others' weights, unless the average is worse on held-out samples."""
        alone = _Scored(self.export())
        merged = averaged([(alone.weights, own_weight), *others])
        if merged is None:
            return False
        together = _Scored(merged)
        try:
            new, old, sizes = self._compare(lease, together, alone, seconds)
        except Interrupted:
            return False
        taken = bool(new) and fmean(new, sizes) >= fmean(old, sizes)
        if taken:
            self._load(merged)
        self._own = together if taken else alone
        return taken

    def export(self) -> dict[str, torch.Tensor]:
        """Return the drafter's weights; during work, the weights from its start."""
        weights = self._at_start or self._trainer.mean_weights()
        return {name: tensor.cpu() for name, tensor in weights.items()}

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state, for a checkpoint."""
        return self._trainer.moments()

    # --- parts --------------------------------------------------------------------------------

    def _wait(self, lease: int, started_s: float, num_tokens: float) -> None:
        """Let training on these tokens take as long as on the emulated GPU."""
        if (node := self._node) is not None:
            seconds = num_tokens / node.trainer_tokens_per_s
            node.pace.wait(started_s, seconds, lambda: self._ended(lease))

    def _moving(self) -> AbstractContextManager[None]:
        """Let the way to or from the emulated GPU take its time."""
        return nullcontext() if self._node is None else self._node.commands.takes(self._node.park_s)

    def _late_s(self) -> float:
        return 0.0 if self._node is None else self._node.pace.late_s

    def _load(self, weights: Tensors) -> None:
        self._trainer.load(weights)
        self._own = None

    def _forget_held_out(self) -> None:
        self._parts, self._held_out, self._own = None, [], None
        self._published = _Scored(self._published.weights)

    def _compare(
        self, lease: int, new: _Scored, old: _Scored, seconds: float
    ) -> tuple[list[float], list[float], list[int]]:
        """Evaluate two drafters on the same windows until their difference is clear.

        Return the expected tokens per draft of both, window by window, and the windows' sizes.
        Windows that a drafter has been evaluated on are not computed again.
        """
        until_s = time.monotonic() + seconds
        if self._parts is None:
            samples = self._buffer.held_out(self._held_out_tokens)
            parts = [
                sample.focused(begin, begin + HELD_OUT_WINDOW)
                for sample in samples
                for begin in range(0, len(sample), HELD_OUT_WINDOW)
            ]
            self._parts = [part for part in parts if part.num_chains]
        count, sizes = 0, [part.num_chains for part in self._parts]
        while count < len(sizes):
            if count >= MIN_WINDOWS:
                gain, error = difference(new.lengths[:count], old.lengths[:count], sizes[:count])
                is_clear = gain > SURE * error or gain < -WORSE * error
                if is_clear or time.monotonic() >= until_s:
                    break
            count = min(count + WINDOWS_AT_ONCE, len(sizes))
            missing = self._parts[len(self._held_out) : count]
            self._held_out += prepare_windows(
                self._trainer.passes, missing, [self._gate], lambda: self._ended(lease)
            )
            for scored in (new, old):
                self._score(lease, scored, count)
        return new.lengths[:count], old.lengths[:count], sizes[:count]

    def _score(self, lease: int, scored: _Scored, count: int) -> None:
        """Evaluate a drafter on the first `count` windows."""
        missing = self._held_out[len(scored.lengths) : count]
        if not missing:
            return
        self._at_start = self._trainer.mean_weights()
        try:
            with with_weights(self._trainer.drafter, scored.weights):
                for window in missing:
                    started_s = time.perf_counter()
                    found = evaluate(
                        self._trainer.passes, [window], [self._gate], lambda: self._ended(lease)
                    )
                    scored.lengths.append(found.length(self._gate))
                    self._wait(lease, started_s, len(window.row.token_ids_T) / 3)  # no backward
        finally:
            self._at_start = None

    def _choose_vocabulary(self, lease: int) -> None:
        """Choose the vocabulary before the first training, and again when the text has moved.

        Trainers that choose differently are not merged in that round; in the next, all start from
        the same weights and vocabulary.
        """
        if not self._check_vocabulary or self._trainer.drafter.config.drafts_all_tokens:
            return
        offers = self._buffer.offers()
        seen: list[torch.Tensor] = []
        num_tokens = 0
        for name in sorted(offers, key=lambda name: (-offers[name].weight, name)):
            if self._ended(lease):
                return
            if num_tokens >= VOCABULARY_TOKENS:
                break
            if (sample := self._buffer.read(name)) is not None:
                seen.append(sample.token_ids_T[sample.loss_mask_T])
                num_tokens += len(seen[-1])
        if seen:
            self._check_vocabulary = False
            if self._trainer.check_vocabulary(seen):
                self._own = None


def difference(
    new: Sequence[float], old: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Return the mean gain in draft length over the same windows, and its standard error."""
    gains = [a - b for a, b in zip(new, old, strict=True)]
    gain, size = fmean(gains, weights), fmean(weights, weights)
    squares = sum((w * (g - gain)) ** 2 for g, w in zip(gains, weights, strict=True))
    return gain, math.sqrt(squares + (size * DOUBT_TOKENS) ** 2) / sum(weights)


def averaged(members: Sequence[tuple[Tensors, float]]) -> dict[str, torch.Tensor] | None:
    """Return the weighted mean of several drafters; None unless two or more fit together.

    Drafters that are not finite, or that draft from another vocabulary than the first one, are left
    out.
    """
    first, _ = members[0]
    fitting = [
        (weights, share)
        for weights, share in members
        if share > 0
        and torch.equal(weights["d2t"], first["d2t"])
        and all(tensor.isfinite().all() for tensor in weights.values())
    ]
    if len(fitting) < 2:
        return None
    total = sum(share for _, share in fitting)
    return {
        name: tensor.clone()
        if name == "d2t"
        else torch.stack([weights[name] * (share / total) for weights, share in fitting]).sum(0)
        for name, tensor in first.items()
    }
