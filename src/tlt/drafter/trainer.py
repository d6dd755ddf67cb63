"""Trains the drafter in sessions that may end at any moment.

One micro-step is one packed row and one optimizer update: bounded work, after which the state is
whole. A session asks before every pass of the drafter, forward and backward, whether to stop; what
it was doing is then dropped, so that going on later gives the very same weights as never having
stopped. New weights are published only when they beat the published ones on held-out samples.

The policy's head and embedding are not trained here; `follow` takes the new ones after every
policy update.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tlt.drafter import vocabulary
from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.eagle3.loss import Acceptance, AcceptanceMeter, Answers, unrolled_loss
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.drafter.row import Row
from tlt.hardware import compute_dtype
from tlt.states.captured import Captured

ShouldStop = Callable[[], bool]
MISSES_PER_ROW = 8
"""How many samples may fail to fit before a row counts as full."""
CHAINS_AT_ONCE = 64
"""How many distributions over the whole vocabulary are held at a time."""


class Interrupted(Exception):
    """A micro-step or a judgement was broken off; the state is as before it."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    num_draft_tokens: int = 4
    """Passes unrolled per chain: the draft length that is trained for."""
    row_tokens: int = 2048
    """Tokens of one micro-step; a longer sample's earlier ones, which are only looked at, come on
    top."""
    lr: float = 1e-3
    warmup_steps: int = 20
    temperature: float = 1.0
    """The expected acceptance length at this temperature decides what is published."""
    averaged_steps: int = 1
    """Over about so many micro-steps the mean of the weights is kept: where little is learned from,
    it drafts better than the latest weights."""
    bfloat16: bool = field(default_factory=lambda: compute_dtype() == "bfloat16")
    """Compute matrix products in bfloat16, by default where this CPU has instructions for it;
    weights and optimizer stay in float32."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out sample to judge drafters by."""

    row: Row
    answers: Answers
    """The policy's, where the chains of the row are verified."""


class SampleSource(Protocol):
    """Samples to learn from, which may come and go between calls."""

    def sizes(self) -> dict[str, int]:
        """Tokens of every sample to train on that is there now, by name."""
        ...

    def read(self, name: str) -> Captured | None:
        """A sample, or nothing when it is gone."""
        ...


class DrafterTrainer:
    def __init__(
        self,
        drafter: Eagle3Drafter,
        head_VH: torch.Tensor,
        embedding_VH: torch.Tensor,
        settings: TrainerSettings,
    ) -> None:
        self.drafter = drafter
        self.settings = settings
        self.step = 0
        self.tokens_seen = 0
        """Since this process began."""
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._rng = random.Random(settings.seed)
        self._mean: dict[str, torch.Tensor] | None = None
        self.follow(head_VH, embedding_VH)

    def follow(self, head_VH: torch.Tensor, embedding_VH: torch.Tensor) -> None:
        """Learn from this policy's head and embedding from now on."""
        # Products with a bfloat16 head would be bfloat16 ones.
        self._head_VH = head_VH.detach() if self.settings.bfloat16 else head_VH.detach().float()
        self._embedding_VH = embedding_VH.detach()
        self._use_draft_head()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go on from other weights of this drafter, with the optimizer as it is."""
        self.drafter.load_state_dict(weights)
        self._mean = None
        self._use_draft_head()

    def move(self, device: torch.device) -> None:
        """Everything to another device."""
        if self._head_VH.device.type == device.type:
            return
        self.drafter.to(device)
        if self._mean is not None:
            self._mean = {name: tensor.to(device) for name, tensor in self._mean.items()}
        for state in self.optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if k != "step"})
        self.follow(self._head_VH.to(device), self._embedding_VH.to(device))

    def _use_draft_head(self) -> None:
        self._draft_head = self._head_VH[self.drafter.draft_token_ids()]

    # --- learning -----------------------------------------------------------------------------

    def session(
        self,
        source: SampleSource,
        should_stop: ShouldStop,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        lr_scale: Callable[[], float] = lambda: 1.0,
        is_over: ShouldStop = lambda: False,
    ) -> int:
        """Micro-steps until told to stop or nothing is left to learn from; how many.

        `should_stop` breaks a micro-step off, `is_over` lets it finish.
        """
        done = 0
        while not should_stop() and not is_over():
            before = self._rng.getstate()
            row = self.draw(source)
            if row is None:
                break
            try:
                loss = self.micro_step(row, lr_scale(), should_stop)
            except Interrupted:
                self._rng.setstate(before)
                break
            done += 1
            on_step(self.step, loss)
        return done

    def draw(self, source: SampleSource) -> Row | None:
        """A row of samples drawn at random, filled up to the token budget.

        Of a longer sample a part is learned, as long as the row and anywhere in its response; what
        comes before it is only looked at, and costs little. None when there is nothing to learn
        from.
        """
        sizes = source.sizes()
        names = sorted(sizes)
        budget = self.settings.row_tokens
        chosen: list[Captured] = []
        used = misses = 0
        while names and misses < MISSES_PER_ROW:
            place = self._rng.randrange(len(names))
            name = names[place]
            if chosen and used + sizes[name] > budget:
                misses += 1
                continue
            names[place] = names[-1]
            names.pop()
            sample = source.read(name)
            if sample is not None and sample.num_chains:
                if len(sample) > budget:
                    last = len(sample) - budget
                    begin = self._rng.randint(min(sample.first_learned, last), last)
                    sample = sample.focused(begin, begin + budget)
                chosen.append(sample.to(self._head_VH.device))
                used += len(sample)
        return Row(chosen) if chosen else None

    def micro_step(
        self, row: Row, lr_scale: float = 1.0, should_stop: ShouldStop = lambda: False
    ) -> float:
        """Learn one row; its loss."""
        self.optimizer.zero_grad()
        loss = self.loss(row, should_stop)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        warm = min(1.0, (self.step + 1) / self.settings.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * warm * lr_scale
        # A broken state need not show in the loss to spoil every gradient.
        if math.isfinite(norm):
            if self._mean is None and self.settings.averaged_steps > 1:
                self._mean = self.weights()
            self.optimizer.step()
            self._take_into_mean()
        self.step += 1
        self.tokens_seen += len(row.token_ids_T)
        return loss.item()

    @torch.no_grad()
    def _take_into_mean(self) -> None:
        if self._mean is not None:
            for name, parameter in self.drafter.named_parameters():
                self._mean[name].lerp_(parameter, 1 / self.settings.averaged_steps)

    def loss(self, row: Row, should_stop: ShouldStop = lambda: False) -> torch.Tensor:
        starts = row.chains.starts
        with self._autocast():
            outputs = self._unroll(row, should_stop)
            with torch.no_grad():
                # Pass j of the chain at s has the target of pass 0 of the chain at s+j.
                probs_CV = self._project(row.final_TH[starts + 1], self._draft_head).softmax(-1)
            drafted, targets = [], []
            for step, hidden_CH in enumerate(outputs):
                learned_C = row.learned(step)
                logits_CV = self.drafter.lm_head(hidden_CH[learned_C])
                watch(logits_CV, should_stop)
                drafted.append(logits_CV)
                targets.append(probs_CV[torch.searchsorted(starts, starts[learned_C] + step)])
        return unrolled_loss(drafted, targets)

    # --- judging ------------------------------------------------------------------------------

    def questions(
        self,
        samples: Sequence[Captured],
        temperatures: Sequence[float],
        should_stop: ShouldStop = lambda: False,
    ) -> list[Question]:
        """Held-out samples with what the policy says over them. Half the work of judging is here,
        and is done once for all drafters that are compared."""
        return [self._question(s, temperatures, should_stop) for s in samples if s.num_chains]

    @torch.no_grad()
    def _question(
        self, sample: Captured, temperatures: Sequence[float], should_stop: ShouldStop
    ) -> Question:
        row = Row([sample.to(self._head_VH.device)])
        answers = []
        for final_nH in row.final_TH[row.chains.starts + 1].split(CHAINS_AT_ONCE):
            watch(final_nH, should_stop)
            with self._autocast():
                logits_nV = self._project(final_nH, self._head_VH)
            answers.append(Answers.of(logits_nV, temperatures))
        return Question(row, Answers.joined(answers))

    @torch.no_grad()
    def examine(
        self,
        questions: Sequence[Question],
        temperatures: Sequence[float],
        should_stop: ShouldStop = lambda: False,
    ) -> Acceptance:
        """How the drafter would do, against the policy's whole vocabulary."""
        meter = AcceptanceMeter(self.settings.num_draft_tokens, temperatures)
        vocabulary_V = self.drafter.draft_token_ids()
        for question in questions:
            row = question.row
            starts = row.chains.starts
            with self._autocast():
                outputs = self._unroll(row, should_stop)
                reached_C = torch.ones_like(starts, dtype=torch.bool)
                for step, hidden_CH in enumerate(outputs):
                    watch(hidden_CH, should_stop)
                    learned_C = row.learned(step)
                    draft_C = vocabulary_V[self.drafter.lm_head(hidden_CH).argmax(-1)]
                    target = torch.searchsorted(starts, starts[learned_C] + step)
                    drafted = draft_C[learned_C]
                    meter.add(
                        step,
                        drafted,
                        self._logits_of(drafted, row.final_TH[starts[target] + 1]),
                        question.answers.at(target),
                        reached_C[learned_C],
                    )
                    text_C = row.token_ids_T[(starts + 2 + step).clamp(max=row.lengths[0] - 1)]
                    reached_C = reached_C & (draft_C == text_C)
        return meter.result()

    def evaluate(self, samples: Sequence[Captured], temperatures: Sequence[float]) -> Acceptance:
        """How the drafter would do on these samples."""
        return self.examine(self.questions(samples, temperatures), temperatures)

    def better_than(
        self,
        published: dict[str, torch.Tensor],
        held_out: Sequence[Captured],
        temperatures: Sequence[float] = (),
    ) -> tuple[bool, Acceptance]:
        """Whether the current weights draft longer than `published`; how they are judged.

        Both on the same samples: what is held out changes as the policy moves.
        """
        gate = self.settings.temperature
        temperatures = [gate, *temperatures]
        questions = self.questions(held_out, temperatures)
        new = self.examine(questions, temperatures)
        with self.wearing(published):
            old = self.examine(questions, [gate])
        return new.length(gate) > old.length(gate), new

    @contextmanager
    def wearing(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The drafter with other weights for a while, to examine them."""
        own = self.weights()
        self.drafter.load_state_dict(weights)
        try:
            yield
        finally:
            self.drafter.load_state_dict(own)

    # --- state --------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the drafter's weights."""
        return {name: tensor.clone() for name, tensor in self.drafter.state_dict().items()}

    def mean_weights(self) -> dict[str, torch.Tensor]:
        """A copy of their mean over `averaged_steps`."""
        if self._mean is None:
            return self.weights()
        return {name: tensor.clone() for name, tensor in self._mean.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that changes with training, as flat named tensors, not copied."""
        state = {f"drafter.{name}": t for name, t in self.drafter.state_dict().items()}
        for name, parameter in self.drafter.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                state[f"optimizer.{name}.{key}"] = value
        return state

    def progress(self) -> dict[str, Any]:
        """The rest of the state, as plain data."""
        return {"step": self.step, "rng": self._rng.getstate()}

    def restore(self, tensors: dict[str, torch.Tensor], progress: dict[str, Any]) -> None:
        """Go on from a saved `tensors()` and `progress()`."""
        self.load(drafter_part(tensors))
        for name, parameter in self.drafter.named_parameters():
            prefix = f"optimizer.{name}."
            moments = {
                key.removeprefix(prefix): tensor.clone()
                for key, tensor in tensors.items()
                if key.startswith(prefix)
            }
            self.optimizer.state[parameter] = moments
        self.step = progress["step"]
        version, internal, gauss = progress["rng"]
        self._rng.setstate((version, tuple(internal), gauss))

    @torch.no_grad()
    def use_vocabulary(self, token_ids: torch.Tensor) -> None:
        """Draft from other tokens. What was learned of those that stay is kept, moments included;
        new ones start from the policy's head."""
        drafter = self.drafter
        old = drafter.draft_token_ids()
        place = torch.searchsorted(old, token_ids).clamp(max=len(old) - 1)
        stays = old[place] == token_ids
        weight = drafter.lm_head.weight
        fresh = self._head_VH[token_ids].to(weight.dtype)
        weight.copy_(torch.where(stays[:, None], weight[place], fresh))
        for name, moment in self.optimizer.state[weight].items():
            if name != "step":
                moment.copy_(torch.where(stays[:, None], moment[place], 0.0))
        drafter.set_draft_vocabulary(token_ids)
        self._mean = None
        self._use_draft_head()

    def check_vocabulary(self, responses: Sequence[torch.Tensor]) -> bool:
        """Change the draft vocabulary if these responses have drifted away from it."""
        config = self.drafter.config
        if config.draft_vocab_size == config.vocab_size:
            return False
        counts = vocabulary.count_tokens(responses, config.vocab_size)
        better = vocabulary.drifted(counts, self.drafter.draft_token_ids().cpu())
        if better is not None:
            self.use_vocabulary(better.to(self._head_VH.device))
        return better is not None

    # --- parts --------------------------------------------------------------------------------

    def _unroll(self, row: Row, should_stop: ShouldStop = lambda: False) -> list[torch.Tensor]:
        embeds_TH = self._embedding_VH[row.token_ids_T.roll(-1)].float()
        return self.drafter.unroll(
            row.aux_TA.float(),
            embeds_TH,
            row.position_T,
            row.chains,
            self.settings.num_draft_tokens,
            lambda hidden: watch(hidden, should_stop),
        )

    def _project(self, final: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return (final.to(head.dtype) @ head.T).float()

    def _logits_of(self, token_ids_n: torch.Tensor, final_nH: torch.Tensor) -> torch.Tensor:
        """The policy's logits of one token each, rounded as those of all tokens are."""
        head_nH = self._head_VH[token_ids_n]
        return torch.bmm(final_nH.to(head_nH.dtype)[:, None], head_nH[:, :, None]).flatten().float()

    def _autocast(self) -> torch.autocast:
        device = self._head_VH.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.settings.bfloat16)


def watch(tensor: torch.Tensor, should_stop: ShouldStop) -> None:
    """Break off here if told to, and when the backward pass comes by."""

    def check(_: object = None) -> None:
        if should_stop():
            raise Interrupted

    check()
    if tensor.requires_grad:
        tensor.register_hook(check)


def drafter_part(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The drafter's own weights among a trainer's `tensors()`."""
    return {
        name.removeprefix("drafter."): tensor
        for name, tensor in tensors.items()
        if name.startswith("drafter.")
    }


def fresh_drafter(
    target_config: Any, head_VH: torch.Tensor, token_ids: torch.Tensor | None, seed: int = 0
) -> Eagle3Drafter:
    """An untrained drafter that starts from the policy: its head, the mean of the fused states."""
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
