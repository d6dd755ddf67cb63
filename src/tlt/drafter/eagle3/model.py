"""The EAGLE-3 draft model, as vLLM computes it, in plain PyTorch for training.

Shapes: T positions of a packed row, C draft chains, H hidden, N heads, K key-value heads, D head
size, A fused target states (3H).

A draft chain that starts at position s predicts tokens s+2, s+3, ...: pass 0 takes the fused target
state of s and the embedding of token s+1; pass j takes the drafter's own un-normed output of pass
j-1 and the embedding of token s+1+j, at position s+j. In attention, pass j sees pass 0 of all
positions up to s (the true states) and its own chain's later passes. `unroll` computes that for all
chains of a row together. Positions where no chain starts give keys and values, nothing else.
`unrolled_loss` compares the passes with the policy's own distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tlt.drafter.eagle3.config import Eagle3Config, Llama3Rope

KeysValues = tuple[torch.Tensor, torch.Tensor]

STEP_DECAY = 0.8
"""Weight of each pass in the loss, relative to the pass before it."""
QUERY_BLOCK = 256
"""Queries of one attention block. It bounds the memory of scores and skips keys that no query
sees."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over pass 0 of the own sample plus the own chain's later passes."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        n, k, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, n * d, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, k * d, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, k * d, bias=False)
        self.o_proj = nn.Linear(n * d, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def queries(self, x_T2H: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        """Compute queries [N, T, D]."""
        return self._rotated(self.q_norm(self._heads(self.q_proj(x_T2H))), position_T)

    def keys_values(self, x_T2H: torch.Tensor, position_T: torch.Tensor) -> KeysValues:
        """Compute keys and values [N, T, D]."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        key = self._rotated(self.k_norm(self._heads(self.k_proj(x_T2H))), position_T)
        value = self._heads(self.v_proj(x_T2H))
        return key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)

    def forward(
        self,
        x_C2H: torch.Tensor,
        position_C: torch.Tensor,
        row: Sequence[KeysValues],
        chains: Chains,
        later: Sequence[Sequence[KeysValues]],
    ) -> torch.Tensor:
        """Attend from the chains of a row.

        `row` holds the keys and values of pass 0 of each sample, `later` the keys and values of the
        chains' own later passes, by block.
        """
        scale = self.config.head_dim**-0.5
        query = self.queries(x_C2H, position_C) * scale
        attended = []
        for index, (block, q) in enumerate(
            zip(chains.blocks, query.split(chains.block_sizes, 1), strict=True)
        ):
            key, value = (part[:, : block.num_seen] for part in row[block.sample])
            own = [passed[index] for passed in later]
            scores = [(q @ key.transpose(-1, -2)).masked_fill(block.unseen, float("-inf"))]
            scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
            weights = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
            out = weights[..., : block.num_seen] @ value
            for place, (_, v) in enumerate(own, block.num_seen):
                out = out + weights[..., place : place + 1] * v
            attended.append(out)
        return self.o_proj(torch.cat(attended, 1).transpose(0, 1).flatten(1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(0, 1)

    def _rotated(self, heads: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        config = self.config
        wave_D = frequencies(config.head_dim, config.rope_theta, config.rope_scaling, heads.device)
        return rotate(heads, *rotary(position, wave_D, heads.dtype))


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring chains of one sample, attended together."""

    sample: int
    num_seen: int
    """Positions of the sample up to the start of the block's last chain."""
    unseen: torch.Tensor
    """True for positions after the chain's start [chains, num_seen]."""


class Chains:
    """The starts of a packed row's draft chains, and the positions that each chain may see."""

    def __init__(self, starts_C: torch.Tensor, lengths: Sequence[int]) -> None:
        """Take the sorted `starts_C`, and the lengths of the row's samples in order."""
        self.starts = starts_C
        self.lengths = list(lengths)
        ends = torch.tensor(self.lengths, device=starts_C.device).cumsum(0)
        self.ends = ends[torch.searchsorted(ends, starts_C, right=True)]
        """One past the last position of each chain's sample."""
        self.blocks: list[Block] = []
        self.block_sizes: list[int] = []
        begin = first = 0
        for sample, (length, last) in enumerate(
            zip(self.lengths, torch.searchsorted(starts_C, ends).tolist(), strict=True)
        ):
            for local_C in (starts_C[first:last] - begin).split(QUERY_BLOCK):
                if len(local_C):
                    num_seen = int(local_C[-1]) + 1
                    unseen = torch.arange(num_seen, device=starts_C.device) > local_C[:, None]
                    self.blocks.append(Block(sample, num_seen, unseen))
                    self.block_sizes.append(len(local_C))
            begin, first = begin + length, last

    def by_sample(self, parts: KeysValues) -> list[KeysValues]:
        """Split keys and values of a row [N, T, D] by sample."""
        return _split(parts, self.lengths)

    def by_block(self, parts: KeysValues) -> list[KeysValues]:
        """Split keys and values of the chains [N, C, D] by block."""
        return _split(parts, self.block_sizes)


def _split(parts: KeysValues, sizes: list[int]) -> list[KeysValues]:
    key, value = parts
    return list(zip(key.split(sizes, 1), value.split(sizes, 1), strict=True))


class MLP(nn.Module):
    """Gated feed-forward part of the layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The drafter's one decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Eagle3Drafter(nn.Module):
    """Trainable part of the drafter; the token embedding is the target's and stays outside.

    Parameter names are the names in the checkpoint that vLLM loads.
    """

    d2t: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(
            len(config.aux_layer_ids) * config.hidden_size, config.hidden_size, bias=False
        )
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        fused, eps = len(config.aux_layer_ids), config.rms_norm_eps
        self.input_norm = (
            RMSNorm(fused * config.hidden_size, eps) if config.norm_before_fc else nn.Identity()
        )
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.hidden_size, eps) for _ in range(fused if config.fc_norm else 0)
        )
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # Target id of draft id i is i + d2t[i].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    def draft_token_ids(self) -> torch.Tensor:
        """Return the target ids of the draft vocabulary."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_draft_vocabulary(self, token_ids: torch.Tensor) -> None:
        """Restrict drafts to these target ids (sorted, `draft_vocab_size` of them)."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))

    def fuse(self, aux_TA: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states fused into one [T, H]."""
        aux_TA = self.input_norm(aux_TA)
        if self.fc_norm:
            parts = aux_TA.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            aux_TA = torch.cat(normed, -1)
        return self.fc(aux_TA)

    def unroll(
        self,
        aux_TA: torch.Tensor,
        next_embeds_TH: torch.Tensor,
        position_T: torch.Tensor,
        chains: Chains,
        num_steps: int,
        after_pass: Callable[[torch.Tensor], None] = lambda hidden: None,
    ) -> list[torch.Tensor]:
        """Return the normed states [C, H] that the head reads, of every pass.

        `next_embeds_TH[s]` embeds token s+1. Where a chain runs past the end of its sample, its
        states are garbage that touches no other chain; the caller leaves them out. `after_pass`
        receives the state of every pass and may interrupt the computation by raising.
        """
        layer, config = self.midlayer, self.config
        fused = self.fuse(aux_TA)
        normed = layer.hidden_norm(fused)
        inputs = torch.cat([layer.input_layernorm(next_embeds_TH), normed], -1)
        row = chains.by_sample(layer.self_attn.keys_values(inputs, position_T))
        residual_TH = normed if config.norm_before_residual else fused
        x, hidden = inputs[chains.starts], residual_TH[chains.starts]
        position = position_T[chains.starts]
        later: list[list[KeysValues]] = []
        outputs = []
        for step in range(num_steps):
            if step:
                place = (chains.starts + step).clamp(max=len(position_T) - 1)
                embeds = layer.input_layernorm(next_embeds_TH[place])
                normed = layer.hidden_norm(hidden)
                x = torch.cat([embeds, normed], -1)
                hidden = normed if config.norm_before_residual else hidden
                later.append(chains.by_block(layer.self_attn.keys_values(x, position + step)))
            hidden = hidden + layer.self_attn(x, position + step, row, chains, later)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            after_pass(hidden)
            outputs.append(self.norm(hidden))
            hidden = outputs[-1] if config.norm_output else hidden
        return outputs


def unrolled_loss(
    draft_logits: Sequence[torch.Tensor], target_probs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the cross-entropy of draft logits against the policy's distributions.

    Both sequences hold one tensor [n_j, V] per pass j: over the draft vocabulary, for the token
    that the pass predicts. Later passes weigh less because a draft is only as long as its first
    mistake.
    """
    total = draft_logits[0].new_zeros((), dtype=torch.float32)
    weight_sum = 0.0
    for step, (drafted, target) in enumerate(zip(draft_logits, target_probs, strict=True)):
        if not len(drafted):
            continue
        weight = STEP_DECAY**step
        total = total + weight * F.cross_entropy(drafted.float(), target)
        weight_sum += weight
    return total / max(weight_sum, 1.0)


def frequencies(
    head_dim: int, theta: float, scaling: Llama3Rope | None, device: torch.device
) -> torch.Tensor:
    """Return the rotary embedding's angle per position [D / 2]."""
    exponent = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    wave_D = theta**-exponent
    if scaling is None:
        return wave_D
    # Short waves stay, long waves are stretched, and waves in between are mixed.
    turns_D = scaling.original_max_position_embeddings * wave_D / (2 * torch.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_D = ((turns_D - low) / (high - low)).clamp(0, 1)
    return wave_D * (share_D + (1 - share_D) / scaling.factor)


def rotary(
    position_T: torch.Tensor, wave_D: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    angle = position_T.float().unsqueeze(-1) * wave_D
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
