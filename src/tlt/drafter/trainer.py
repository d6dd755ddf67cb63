"""Trains the drafter in sessions that may end at any moment.

One optimizer step learns a packed row or a few: bounded work, after which the state is whole. A
session asks before every pass of the drafter, forward and backward, whether to stop. It then
discards the unfinished optimizer step: a session that resumes later reaches the same weights as one
that never stopped. Ranks may share the rows of a step (`ranks`); nothing interrupts those in the
middle of a step.

The policy's head and embedding are not trained here; `follow` takes the new ones after every
policy update. `evaluation` decides whether new weights are better than the published ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tlt.drafter import vocabulary
from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.eagle3.model import Eagle3Drafter, unrolled_loss
from tlt.drafter.passes import DraftPasses, Interrupted, Row, ShouldStop, check_stop
from tlt.drafter.ranks import OneRank
from tlt.hardware import compute_dtype
from tlt.states.captured import Captured, Offer

MISSES_PER_ROW = 8
"""Samples that may fail to fit before a row counts as full."""
WARMUP_STEPS = 20
"""Optimizer steps over which the learning rate rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How a drafter is trained; `tlt` in the run's config, or options of `tlt drafter train`."""

    num_draft_tokens: int
    """Passes unrolled per chain: the draft length that is trained for."""
    row_tokens: int
    """Learned tokens of one row. The context before a window of a longer sample comes on top."""
    lr: float
    """Highest learning rate."""
    temperature: float
    """Temperature whose expected acceptance length decides what is published."""
    seed: int
    """Seed of the order in which samples are drawn."""
    num_rows: int = 1
    """Rows of one optimizer step, a multiple of the number of ranks."""
    averaged_steps: int = 1
    """Optimizer steps over which the weights are averaged; 1 turns averaging off. Where there is
    little to learn from, the mean drafts better than the latest weights."""
    bfloat16: bool = field(default_factory=lambda: compute_dtype() == "bfloat16")
    """Compute matrix products in bfloat16, by default where this CPU has instructions for it.
    Weights and optimizer stay in float32."""


class SampleSource(Protocol):
    """Samples to learn from, which may come and go between calls."""

    def offers(self) -> dict[str, Offer]:
        """Return the samples that can be trained on now, by name."""
        ...

    def read(self, name: str) -> Captured | None:
        """Return a sample, or None when it is gone."""
        ...


class DrafterTrainer:
    """A drafter, its optimizer, and the policy that it follows."""

    def __init__(
        self,
        drafter: Eagle3Drafter,
        head_VH: torch.Tensor,
        embedding_VH: torch.Tensor,
        settings: TrainerSettings,
        ranks: OneRank | None = None,
    ) -> None:
        self.drafter = drafter
        self.settings = settings
        self.ranks = ranks or OneRank()
        self.passes = DraftPasses(
            drafter, head_VH, embedding_VH, settings.num_draft_tokens, settings.bfloat16
        )
        self.step = 0
        """Optimizer steps, including those of earlier processes."""
        self.tokens_seen = 0
        """Tokens trained on since this process began."""
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._rng = random.Random(settings.seed)
        self._mean: dict[str, torch.Tensor] | None = None
        self._policy = head_VH, embedding_VH
        self._host_copies = HostCopies()
        self._use_draft_head()

    def follow(self, head_VH: torch.Tensor, embedding_VH: torch.Tensor) -> None:
        """Learn from this policy's head and embedding from now on."""
        self._policy = head_VH, embedding_VH
        self.passes.follow(*(part.to(self.drafter.d2t.device) for part in self._policy))
        self._use_draft_head()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Continue from other weights of this drafter, with the same optimizer state."""
        self.drafter.load_state_dict(weights)
        self._mean = None
        self._use_draft_head()

    def move(self, device: torch.device) -> None:
        """Move from the host to a device, with the policy's head and embedding."""
        if self.passes.device.type != device.type:
            self._hold(self._host_copies.send(self.moving_tensors(), device))
            self.follow(*self._policy)

    def park(self) -> None:
        """Wait in host memory until the next `move`.

        Gradients are dropped, and the policy's head and embedding are on the host already.
        """
        self.optimizer.zero_grad()
        self._hold(self._host_copies.fetch(self.moving_tensors()))
        self.follow(*self._policy)

    def moving_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that move with the trainer, by flat names, without copying them."""
        held = {name: t for name, t in self.tensors().items() if not name.endswith(".step")}
        return held | {f"mean.{name}": t for name, t in (self._mean or {}).items()}

    def _hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over tensors of `moving_tensors` that have moved to another device."""
        for name, tensor in self.drafter.state_dict(keep_vars=True).items():
            tensor.data = tensors[f"drafter.{name}"]
        for name, parameter in self.drafter.named_parameters():
            state = self.optimizer.state[parameter]
            state.update({k: tensors[f"optimizer.{name}.{k}"] for k in state if k != "step"})
        if self._mean is not None:
            self._mean = {name: tensors[f"mean.{name}"] for name in self._mean}

    def check_vocabulary(self, responses: Sequence[torch.Tensor]) -> bool:
        """Replace the draft vocabulary if these responses have drifted away from it.

        Return whether it was replaced.
        """
        drafter, passes = self.drafter, self.passes
        if drafter.config.drafts_all_tokens:
            return False
        counts_V = vocabulary.count_tokens(responses, drafter.config.vocab_size)
        better = vocabulary.drifted(counts_V, drafter.draft_token_ids().cpu())
        if better is None:
            return False
        vocabulary.replace(drafter, self.optimizer, passes.head_VH, better.to(passes.device))
        self._mean = None
        self._use_draft_head()
        return True

    def _use_draft_head(self) -> None:
        self._draft_head = self.passes.head_VH[self.drafter.draft_token_ids()]

    # --- learning -----------------------------------------------------------------------------

    def session(
        self,
        source: SampleSource,
        should_stop: ShouldStop,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        lr_scale: Callable[[], float] = lambda: 1.0,
        is_over: ShouldStop = lambda: False,
    ) -> int:
        """Run optimizer steps until told to stop or until there is nothing to learn from.

        `should_stop` interrupts an optimizer step, `is_over` lets it finish. Return the number of
        finished optimizer steps.
        """
        done = 0
        while True:
            is_done, scale = self.ranks.agree(should_stop() or is_over(), lr_scale())
            before = self._rng.getstate()
            rows = [] if is_done else self._draw_rows(source)
            if not rows:
                break
            try:
                loss = self.micro_step(*rows, lr_scale=scale, should_stop=should_stop)
            except Interrupted:
                self._rng.setstate(before)
                break
            done += 1
            on_step(self.step, loss)
        return done

    def draw(self, source: SampleSource) -> Row | None:
        """Draw samples by their weights and fill a row up to the token budget.

        Of a longer sample, the row learns a window of `row_tokens` anywhere in the response; the
        context before the window is only attended to, which costs little. Return None when there
        is nothing to learn from.
        """
        chosen = self._choose(source)
        return self._row(chosen) if chosen else None

    def _draw_rows(self, source: SampleSource) -> list[Row]:
        """Draw the rows of an optimizer step, and return this rank's.

        Each rank draws all rows, from the same random numbers: reading a sample only maps it.
        """
        chosen = [self._choose(source) for _ in range(self.settings.num_rows)]
        own = chosen[self.ranks.rank :: self.ranks.size]
        return [self._row(samples) for samples in own] if all(chosen) else []

    def _row(self, samples: Sequence[Captured]) -> Row:
        return Row([sample.to(self.passes.device) for sample in samples])

    def _choose(self, source: SampleSource) -> list[Captured]:
        """Draw the samples of a row."""
        offers = source.offers()
        names = sorted(offers)
        weights = [offers[name].weight for name in names]
        budget = self.settings.row_tokens
        chosen: list[Captured] = []
        used = misses = 0
        while names and misses < MISSES_PER_ROW:
            (place,) = self._rng.choices(range(len(names)), weights)
            name = names[place]
            if chosen and used + offers[name].num_tokens > budget:
                misses += 1
                continue
            names[place], weights[place] = names[-1], weights[-1]
            names.pop()
            weights.pop()
            sample = source.read(name)
            if sample is not None and sample.num_chains:
                if len(sample) > budget:
                    last = len(sample) - budget
                    begin = self._rng.randint(min(sample.first_learned, last), last)
                    sample = sample.focused(begin, begin + budget)
                chosen.append(sample)
                used += len(sample)
        return chosen

    def micro_step(
        self, *rows: Row, lr_scale: float = 1.0, should_stop: ShouldStop = lambda: False
    ) -> float:
        """Learn these rows and the other ranks' in one optimizer step; return the loss."""
        self.optimizer.zero_grad()
        mean_loss = torch.zeros((), device=self.passes.device)
        for row in rows:
            loss = self.loss(row, should_stop) / (len(rows) * self.ranks.size)
            loss.backward()
            mean_loss += loss.detach()
            self.ranks.add([*self._gradients(), mean_loss])
        self.ranks.finish([*self._gradients(), mean_loss])
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        warm = min(1.0, (self.step + 1) / WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * warm * lr_scale
        # A broken hidden state can spoil every gradient without showing in the loss.
        if math.isfinite(norm):
            if self._mean is None and self.settings.averaged_steps > 1:
                self._mean = self.weights()
            self.optimizer.step()
            if self._mean is not None:
                for name, parameter in self.drafter.named_parameters():
                    self._mean[name].lerp_(parameter.detach(), 1 / self.settings.averaged_steps)
        self.step += 1
        self.tokens_seen += sum(len(row.token_ids_T) for row in rows)
        return mean_loss.item()

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.drafter.parameters() if p.grad is not None]

    def loss(self, row: Row, should_stop: ShouldStop = lambda: False) -> torch.Tensor:
        """Return the loss of one row."""
        starts = row.chains.starts
        with self.passes.autocast():
            outputs = self.passes.unroll(row, should_stop)
            with torch.no_grad():
                # Pass j of the chain at s has the target of pass 0 of the chain at s+j.
                logits_CV = self.passes.project(row.final_TH[starts + 1], self._draft_head)
                probs_CV = logits_CV.softmax(-1)
            drafted, targets = [], []
            for step, hidden_CH in enumerate(outputs):
                learned_C = row.learned(step)
                logits_CV = self.drafter.lm_head(hidden_CH[learned_C])
                check_stop(logits_CV, should_stop)
                drafted.append(logits_CV)
                targets.append(probs_CV[torch.searchsorted(starts, starts[learned_C] + step)])
        return unrolled_loss(drafted, targets)

    # --- state --------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the drafter's weights."""
        return {name: tensor.clone() for name, tensor in self.drafter.state_dict().items()}

    def mean_weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights' mean over `averaged_steps`."""
        if self._mean is None:
            return self.weights()
        return {name: tensor.clone() for name, tensor in self._mean.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors that training changes, by flat names, without copying them."""
        state = {f"drafter.{name}": t for name, t in self.drafter.state_dict().items()}
        for name, parameter in self.drafter.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                state[f"optimizer.{name}.{key}"] = value
        return state

    def moments(self) -> dict[str, torch.Tensor]:
        """Return a copy of the optimizer's state, complete enough to continue from it."""
        state = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.tensors().items()
            if name.startswith("optimizer.")
        }
        return state | {"d2t": self.drafter.d2t.cpu().clone(), "step": torch.tensor(self.step)}

    def take_moments(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Continue with a saved `moments()`; the head's only fit the same draft vocabulary."""
        fits = torch.equal(moments["d2t"], self.drafter.d2t.cpu())
        self._set_moments({k: t for k, t in moments.items() if fits or ".lm_head." not in k})
        self.step = int(moments["step"])

    def _set_moments(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.drafter.named_parameters():
            prefix = f"optimizer.{name}."
            moments = {
                key.removeprefix(prefix): tensor.to(
                    "cpu" if key.endswith(".step") else parameter.device, copy=True
                )
                for key, tensor in tensors.items()
                if key.startswith(prefix)
            }
            if moments:
                self.optimizer.state[parameter] = moments

    def progress(self) -> dict[str, Any]:
        """Return the rest of the state as plain data."""
        return {"step": self.step, "rng": self._rng.getstate()}

    def restore(self, tensors: dict[str, torch.Tensor], progress: dict[str, Any]) -> None:
        """Continue from a saved `tensors()` and `progress()`."""
        self.load(drafter_part(tensors))
        self._set_moments(tensors)
        self.step = progress["step"]
        version, internal, gauss = progress["rng"]
        self._rng.setstate((version, tuple(internal), gauss))


class HostCopies:
    """Host memory of tensors that spend some time on a GPU.

    The memory of a tensor that went to the GPU is kept, pinned, for its way back: a copy to pinned
    memory is several times as fast as one to memory that is allocated for it. Pinning takes time,
    so it happens on the way to the GPU, where nothing waits.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def send(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Return copies of these host tensors on the device."""
        pins = device.type == "cuda"
        self._copies = {
            name: tensor.pin_memory() if pins and not tensor.is_pinned() else tensor
            for name, tensor in tensors.items()
        }
        return {
            name: tensor.to(device, non_blocking=True, copy=True)
            for name, tensor in self._copies.items()
        }

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors in host memory, complete.

        A tensor that was made on the device, such as a first moment, gets new memory.
        """
        kept, self._copies = self._copies, {}
        found = {}
        for name, tensor in tensors.items():
            host = kept.get(name)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                found[name] = tensor.to("cpu", copy=True)
            else:
                found[name] = host.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return found


def drafter_part(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the drafter's own weights among a trainer's `tensors()`."""
    return {
        name.removeprefix("drafter."): tensor
        for name, tensor in tensors.items()
        if name.startswith("drafter.")
    }


def fresh_drafter(
    target_config: Any, head_VH: torch.Tensor, token_ids: torch.Tensor | None, seed: int = 0
) -> Eagle3Drafter:
    """Return an untrained drafter whose head is the policy's.

    Its input layer starts as the mean of the fused hidden states.
    """
    torch.manual_seed(seed)
    config = Eagle3Config.for_target(target_config, None if token_ids is None else len(token_ids))
    drafter = Eagle3Drafter(config)
    if token_ids is None:
        token_ids = torch.arange(config.vocab_size)
    drafter.set_draft_vocabulary(token_ids)
    blocks = len(config.aux_layer_ids)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(head_VH[token_ids])
        drafter.fc.weight.copy_((torch.eye(config.hidden_size) / blocks).repeat(1, blocks))
    return drafter
