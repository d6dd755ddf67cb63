"""One rank of the learner: its shard of the policy, the optimizer, and the update.

An update is `accumulate` any number of times, then `step`. Losses are sums over tokens and ranks;
the one division happens in `step`, by what the whole batch counts, so the update does not depend on
how samples were split into rows, ranks or calls. All ranks make the same calls with the same number
of rows.

The shard is float32; FSDP hands out matrices for a layer's work in the compute dtype and adds up
gradients in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tlt.learner.batch import TrainSample, Weighting
from tlt.learner.policy import PackedPolicy, PackedRow
from tlt.learner.policy_loss import PolicyLossSettings, policy_loss

KeepStates = Callable[[TrainSample, torch.Tensor, torch.Tensor], None]
"""`keep(sample, aux_TA, final_TH)`: takes the states of one sample of the training pass."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank needs to know about the policy, the loss and the optimizer."""

    model: str
    dtype: str
    """Dtype of matrix products."""
    temperature: float
    weighting: Weighting
    loss: PolicyLossSettings
    lr: float
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    gradient_checkpointing: bool
    aux_layer_ids: tuple[int, ...] = ()
    """Layers whose input the drafter reads; empty where nothing is captured."""


@dataclass(slots=True)
class Sums:
    """What rows came to, added up over the tokens of one rank."""

    loss: float = 0.0
    tokens: float = 0.0
    """Of prompts and responses, a prompt counted for each of its samples."""
    computed_tokens: float = 0.0
    """The same, a shared prompt counted once."""
    learned_tokens: float = 0.0
    rows: float = 0.0
    clipped_tokens: float = 0.0
    capped_tokens: float = 0.0
    gap: float = 0.0
    kl: float = 0.0

    def add(self, other: Sums) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One optimizer step, the same on every rank."""

    sums: Sums
    grad_norm: float
    lr: float
    skipped: bool
    """The gradient was not finite: nothing was changed."""
    refused: bool = False
    """The gap between engines and learner was too large: nothing was changed."""


class LearnerRank:
    """Needs an initialised process group, of any size."""

    def __init__(
        self, settings: RankSettings, device: torch.device, keep_states: KeepStates | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.settings = settings
        self.device = device
        self.keep_states = keep_states
        self.num_updates = 0
        self._sums = Sums()
        self._remembers = False
        self._old_logprobs: dict[str, torch.Tensor] = {}

        def load() -> Any:
            # A floating-point model of its own on every rank; FSDP keeps one shard of it.
            return AutoModelForCausalLM.from_pretrained(self.settings.model, dtype=torch.float32)

        self._mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self._policy = self._sharded(load(), self.settings.aux_layer_ids)
        self._reference = None
        if self.settings.loss.kl_weight > 0:
            self._reference = self._sharded(load()).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=self.settings.lr,
            betas=(0.9, 0.95),
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        # Checkpoints are written beside training, so their messages need a group of their own.
        self._checkpoint_group = dist.new_group(backend="gloo")
        self._saving: Any = None

    def _sharded(self, policy: Any, aux_layer_ids: Sequence[int] = ()) -> PackedPolicy:
        if self.settings.gradient_checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": False})
        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, self.settings.dtype), reduce_dtype=torch.float32
        )
        packed = PackedPolicy(policy, self.settings.temperature, aux_layer_ids)
        for layer in policy.model.layers:
            fully_shard(layer, mesh=self._mesh, mp_policy=precision)
        fully_shard(packed, mesh=self._mesh, mp_policy=precision)
        return packed.train()

    # --- the update ---------------------------------------------------------------------------

    def accumulate(self, rows: Sequence[Sequence[TrainSample]]) -> None:
        """Forward and backward over packed rows; gradients add up until `step`."""
        for samples in rows:
            row = self._pack(samples)
            output = self._policy(row, with_states=self.keep_states is not None and bool(samples))
            old_P = output.logprob_P.detach()
            if self._remembers and samples:
                old_P = torch.cat([self._old_logprobs[s.sample_id] for s in samples])
            result = policy_loss(
                output.logprob_P,
                old_P,
                row.engine_logprob_P,
                row.advantage_P,
                row.weight_P,
                self.settings.loss,
                self._reference_logprobs(row),
            )
            # FSDP averages over ranks; losses here are sums.
            (result.total * dist.get_world_size()).backward()
            self._keep(row, output.aux_TA, output.final_TH)
            self._sums.add(
                Sums(
                    loss=result.total.item(),
                    tokens=sum(len(s) for s in samples),
                    computed_tokens=len(row.ids_T) if samples else 0,
                    learned_tokens=len(row.source_P),
                    rows=float(bool(samples)),
                    clipped_tokens=result.clipped_tokens,
                    capped_tokens=result.capped_tokens,
                    gap=result.gap_sum,
                    kl=result.kl_sum,
                )
            )

    def step(self, denominator: float, max_gap: float) -> UpdateReport:
        """Divide the gradients by what the batch counts, and change the policy.

        Samples on which engines and learner disagree by more than `max_gap` change nothing.
        """
        sums, self._sums = self._total(self._sums), Sums()
        refused = not sums.gap <= max_gap * max(1.0, sums.learned_tokens)  # or not a number
        gradients = [p.grad for p in self._policy.parameters() if p.grad is not None]
        grad_norm = 0.0
        if gradients:  # none when no sample of the batch taught anything
            torch._foreach_mul_(gradients, 1.0 / denominator)
            norm = torch.nn.utils.clip_grad_norm_(
                self._policy.parameters(), self.settings.max_grad_norm
            )
            grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        lr = self.settings.lr * min(
            1.0, (self.num_updates + 1) / max(1, self.settings.warmup_steps)
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        skipped = not math.isfinite(grad_norm)
        if gradients and not skipped and not refused:
            self._optimizer.step()
        self._optimizer.zero_grad()
        if self._reference is not None:
            # It never has a backward pass, which is where FSDP forgets the passes it has seen.
            self._reference.reset_iter_state()
        self.num_updates += 1
        sums.loss /= denominator
        return UpdateReport(sums, grad_norm, lr, skipped, refused)

    def remember_logprobs(self, rows: Sequence[Sequence[TrainSample]]) -> None:
        """Probabilities before any update of a batch that is split over several, part by part.

        Each part as it will be accumulated: a rank remembers the samples it is dealt.
        """
        self._remembers = True
        with torch.no_grad():
            for samples in rows:
                row = self._pack(samples)
                logprobs = self._policy(row).logprob_P
                lengths = [len(s.response_ids) for s in samples]
                for sample, logprob in zip(samples, logprobs.split(lengths or [0]), strict=False):
                    self._old_logprobs[sample.sample_id] = logprob

    def forget_logprobs(self) -> None:
        self._remembers = False
        self._old_logprobs.clear()

    def _pack(self, samples: Sequence[TrainSample]) -> PackedRow:
        weights = [self.settings.weighting.token_weight(len(s.response_ids)) for s in samples]
        return PackedRow.pack(samples, weights, self.device)

    @torch.no_grad()
    def _reference_logprobs(self, row: PackedRow) -> torch.Tensor | None:
        return None if self._reference is None else self._reference(row).logprob_P

    def _keep(
        self, row: PackedRow, aux_TA: torch.Tensor | None, final_TH: torch.Tensor | None
    ) -> None:
        if self.keep_states is None or aux_TA is None or final_TH is None:
            return
        if row.unshare_E is not None:
            aux_TA, final_TH = aux_TA[row.unshare_E], final_TH[row.unshare_E]
        begin = 0
        for sample, length in zip(row.samples, row.lengths, strict=True):
            part = slice(begin, begin + length)
            self.keep_states(sample, aux_TA[part], final_TH[part])
            begin += length

    def _total(self, sums: Sums) -> Sums:
        values = torch.tensor(list(asdict(sums).values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return Sums(*values.tolist())

    # --- weights and checkpoints --------------------------------------------------------------

    def full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole policy, tensor by tensor. Every rank must go through all of it."""
        for name, parameter in self._policy.named_parameters():
            tensor = parameter.detach()
            # In the dtype of the engines before it travels: half the traffic for bfloat16.
            tensor = tensor.to(dtype)
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            yield name.removeprefix("policy."), tensor

    def save(self, folder: Path) -> None:
        """Copy the state and return; `wait_saved` says when it is on disk."""
        self.wait_saved()
        self._saving = dcp.async_save(
            self._state(), checkpoint_id=folder, process_group=self._checkpoint_group
        )

    def wait_saved(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def restore(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder, process_group=self._checkpoint_group)
        dcp_state.set_state_dict(
            self._policy,
            self._optimizer,
            model_state_dict=state["policy"],
            optim_state_dict=state["optimizer"],
        )
        self.num_updates = int(state["num_updates"])

    def _state(self) -> dict[str, Any]:
        policy, optimizer = dcp_state.get_state_dict(self._policy, self._optimizer)
        return {
            "policy": policy,
            "optimizer": optimizer,
            "num_updates": torch.tensor(self.num_updates),
        }
