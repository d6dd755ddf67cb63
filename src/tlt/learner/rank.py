"""One rank of the learner: its shard of the policy, the optimizer, and the update.

An update is any number of calls of `accumulate`, then one of `step`. Losses are sums over tokens
and ranks. Only `step` divides them, by the denominator of the whole batch, so that the update does
not depend on how samples were split into rows, ranks or calls. All ranks make the same calls with
the same number of rows.

The shard is float32. FSDP gathers a layer's weights in the compute dtype and reduces gradients in
float32. With LoRA only the adapters are float32, and only they have gradients and optimizer state
and are in checkpoints.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tlt.config.train import AlgorithmConfig, LearnerConfig
from tlt.learner import lora
from tlt.learner.batch import TrainSample, Weighting
from tlt.learner.experts import by_expert
from tlt.learner.packed_attention import has_kernel
from tlt.learner.policy import PackedPolicy, PackedRow
from tlt.learner.policy_loss import loss_function, policy_loss

KeepStates = Callable[[PackedRow, torch.Tensor, torch.Tensor], None]
"""`keep(row, aux_TA, final_TH)` stores the hidden states of a row of the training pass."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of a rank: policy, loss and optimizer."""

    model: str
    dtype: str
    """Dtype of matrix products."""
    temperature: float
    weighting: Weighting
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    aux_layer_ids: tuple[int, ...] = ()
    """Layers whose input the drafter reads; none if the learner captures no hidden states."""
    seed: int = 0
    """Seed of new adapters."""


@dataclass(slots=True)
class Sums:
    """Statistics of rows, summed over the tokens of one rank."""

    loss: float = 0.0
    tokens: float = 0.0
    """Tokens of prompts and responses, with a shared prompt counted for each of its samples."""
    computed_tokens: float = 0.0
    """Tokens of prompts and responses, with a shared prompt counted once."""
    learned_tokens: float = 0.0
    rows: float = 0.0
    clipped_tokens: float = 0.0
    capped_tokens: float = 0.0
    gap: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0

    def add(self, other: Sums) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of one optimizer step, the same on every rank."""

    sums: Sums
    grad_norm: float
    lr: float
    skipped: bool
    """The gradient was not finite, and the policy did not change."""
    refused: bool = False
    """The gap between engines and learner was too large, and the policy did not change."""


def sharded(
    policy: Any,
    settings: RankSettings,
    mesh: DeviceMesh,
    aux_layer_ids: Sequence[int] = (),
    attention_kernel: bool = False,
) -> PackedPolicy:
    """Return the policy ready to train, with its layers sharded over the ranks of the mesh."""
    if settings.learner.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    if settings.learner.lora.rank:
        lora.add_adapters(policy, settings.learner.lora, settings.seed)
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, settings.dtype), reduce_dtype=torch.float32
    )
    packed = PackedPolicy(policy, settings.temperature, aux_layer_ids, attention_kernel)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(packed, mesh=mesh, mp_policy=precision)
    return packed.train()


class LearnerRank:
    """One rank's shard of the policy. Needs an initialised process group of any size."""

    def __init__(
        self, settings: RankSettings, device: torch.device, keep_states: KeepStates | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.settings = settings
        self.device = device
        self.keep_states = keep_states
        self.num_updates = 0
        self._token_loss = loss_function(settings.algorithm.loss)
        self._sums = Sums()
        self._remembers = False
        self._old_logprobs: dict[str, torch.Tensor] = {}

        self._lora = settings.learner.lora
        dtype = getattr(torch, settings.dtype) if self._lora.rank else torch.float32

        def load() -> Any:
            # Every rank loads the whole model; FSDP then keeps one shard of it.
            return AutoModelForCausalLM.from_pretrained(self.settings.model, dtype=dtype)

        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        kernel = has_kernel(device, getattr(torch, settings.dtype))
        self._policy = sharded(load(), settings, mesh, settings.aux_layer_ids, kernel)
        self._reference = None
        if self.settings.algorithm.kl_weight > 0 and not self._lora.rank:
            self._reference = sharded(load(), settings, mesh, (), kernel).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            [p for p in self._policy.parameters() if p.requires_grad],
            lr=self.settings.learner.lr,
            betas=(0.9, 0.95),
            weight_decay=self.settings.learner.weight_decay,
            fused=True,
        )
        # Checkpoints are written while training continues, so they need their own process group.
        self._checkpoint_group = dist.new_group(backend="gloo")
        self._saving: Any = None

    # --- the update ---------------------------------------------------------------------------

    def accumulate(self, rows: Sequence[Sequence[TrainSample]]) -> None:
        """Run forward and backward over packed rows; gradients add up until `step`."""
        for samples in rows:
            row = self._pack(samples)
            reference_P = self._reference_logprobs(row)
            keeps = self.keep_states is not None and bool(samples)
            output = self._policy(row, with_states=keeps, with_entropy=True)
            if self.keep_states and output.aux_TA is not None and output.final_TH is not None:
                # Before the backward pass, during which the states leave the device.
                self.keep_states(row, output.aux_TA, output.final_TH)
            old_P = output.logprob_P.detach()
            if self._remembers and samples:
                old_P = torch.cat([self._old_logprobs[s.sample_id] for s in samples])
            result = policy_loss(
                output.logprob_P,
                old_P,
                row.engine_logprob_P,
                row.advantage_P,
                row.weight_P,
                self.settings.algorithm,
                reference_P,
                self._token_loss,
            )
            # FSDP averages gradients over ranks, while the loss is a sum.
            (result.total * dist.get_world_size()).backward()
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
                    entropy=output.entropy_sum,
                )
            )

    def step(self, denominator: float, max_gap: float) -> UpdateReport:
        """Divide the gradients by the batch's denominator, and make one optimizer step.

        The policy does not change if the mean gap between engines and learner exceeds `max_gap`.
        """
        sums, self._sums = self._total(self._sums), Sums()
        refused = not sums.gap <= max_gap * max(1.0, sums.learned_tokens)  # true for a NaN
        gradients = [p.grad for p in self._policy.parameters() if p.grad is not None]
        grad_norm = 0.0
        if gradients:  # there are none if no sample of the batch was learned from
            torch._foreach_mul_(gradients, 1.0 / denominator)
            norm = torch.nn.utils.clip_grad_norm_(
                self._policy.parameters(), self.settings.learner.max_grad_norm
            )
            grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        learner = self.settings.learner
        lr = learner.lr * min(1.0, (self.num_updates + 1) / max(1, learner.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        skipped = not math.isfinite(grad_norm)
        if gradients and not skipped and not refused:
            self._optimizer.step()
        self._optimizer.zero_grad()
        if self._reference is not None:
            # FSDP resets its state in the backward pass, which the reference policy never has.
            self._reference.reset_iter_state()
        self.num_updates += 1
        sums.loss /= denominator
        return UpdateReport(sums, grad_norm, lr, skipped, refused)

    def remember_logprobs(self, rows: Sequence[Sequence[TrainSample]]) -> None:
        """Keep the log-probabilities from before the first update, if a batch has several updates.

        A call takes the rows of one `accumulate`: a rank remembers the samples that it trains on.
        """
        self._remembers = True
        with torch.no_grad():
            for samples in rows:
                row = self._pack(samples)
                logprobs = self._policy(row).logprob_P
                lengths = [len(s.drawn()) for s in samples]
                for sample, logprob in zip(samples, logprobs.split(lengths or [0]), strict=False):
                    self._old_logprobs[sample.sample_id] = logprob

    def forget_logprobs(self) -> None:
        self._remembers = False
        self._old_logprobs.clear()

    def _pack(self, samples: Sequence[TrainSample]) -> PackedRow:
        weights = [self.settings.weighting.token_weight(len(s.drawn())) for s in samples]
        return PackedRow.pack(samples, weights, self.device)

    @torch.no_grad()
    def _reference_logprobs(self, row: PackedRow) -> torch.Tensor | None:
        if self.settings.algorithm.kl_weight == 0:
            return None
        if self._reference is not None:
            return self._reference(row).logprob_P
        with lora.without_adapters(self._policy):
            return self._policy(row).logprob_P

    def _total(self, sums: Sums) -> Sums:
        values = torch.tensor(list(asdict(sums).values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return Sums(*values.tolist())

    # --- weights and checkpoints --------------------------------------------------------------

    def shapes(self) -> list[tuple[str, list[int]]]:
        """Return the name and shape of every tensor of `full_weights`, in its order."""
        shapes = []
        for name, found in lora.parts(self._policy):
            outline = torch.empty(found[0].shape, device="meta")
            named = by_expert(name.removeprefix("policy."), outline)
            shapes += [(own, list(tensor.shape)) for own, tensor in named]
        return shapes

    def full_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole policy as its checkpoint has it, with adapters merged.

        Every rank must iterate to the end.
        """
        for name, found in lora.parts(self._policy):
            if len(found) == 1:
                # Cast to the engines' dtype first: bfloat16 halves the traffic between ranks.
                tensor = _whole(found[0].detach().to(dtype))
            else:
                tensor = lora.merged(tuple(_whole(p.detach()) for p in found), self._lora, dtype)
            yield from by_expert(name.removeprefix("policy."), tensor)

    def adapter(self) -> dict[str, torch.Tensor]:
        """Return the adapters whole, on every rank; none without LoRA. All ranks must call it."""
        return {
            name.removeprefix("policy."): _whole(p.detach()).cpu()
            for name, p in self._policy.named_parameters()
            if lora.is_adapter(name)
        }

    def save(self, folder: Path) -> None:
        """Copy the state and return; `wait_saved` returns once the copy is on disk."""
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
            options=dcp_state.StateDictOptions(strict=not self._lora.rank),
        )
        self.num_updates = int(state["num_updates"])

    def _state(self) -> dict[str, Any]:
        policy, optimizer = dcp_state.get_state_dict(self._policy, self._optimizer)
        if self._lora.rank:
            policy = {name: tensor for name, tensor in policy.items() if lora.is_adapter(name)}
        return {
            "policy": policy,
            "optimizer": optimizer,
            "num_updates": torch.tensor(self.num_updates),
        }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
