"""The EAGLE-3 draft model, as vLLM computes it, in plain PyTorch for training.

Shapes: B batch, T positions, H hidden, N heads, K key-value heads, D head size, V draft vocabulary,
A fused target states (3H).

A draft chain that starts at position s predicts tokens s+2, s+3, ...: pass 0 takes the fused target
state of s and the embedding of token s+1; pass j takes the drafter's own un-normed output of pass
j-1 and the embedding of token s+1+j, at position s+j. In attention, pass j sees pass 0 of all
positions up to s (the true states) and its own chain's later passes. `unroll` computes that for
all s at once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tlt.drafter.eagle3.config import Eagle3Config


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over pass 0 of all positions plus this chain's later passes."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        n, k, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, n * d, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, k * d, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, k * d, bias=False)
        self.o_proj = nn.Linear(n * d, config.hidden_size, bias=False)

    def forward(
        self,
        x_BT2H: torch.Tensor,
        position_BT: torch.Tensor,
        mask_BTT: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """`past` holds keys and values of the earlier passes; this pass appends its own."""
        config = self.config
        b, t, _ = x_BT2H.shape
        groups = config.num_attention_heads // config.num_key_value_heads
        cos, sin = rotary(position_BT, config.head_dim, config.rope_theta, x_BT2H.dtype)
        q = rotate(self._heads(self.q_proj(x_BT2H)), cos, sin)
        k = rotate(self._heads(self.k_proj(x_BT2H)), cos, sin).repeat_interleave(groups, 1)
        v = self._heads(self.v_proj(x_BT2H)).repeat_interleave(groups, 1)
        past.append((k, v))
        scale = config.head_dim**-0.5
        first_k, first_v = past[0]
        scores = (q @ first_k.transpose(-1, -2) * scale).masked_fill(
            ~mask_BTT.unsqueeze(1), float("-inf")
        )
        chain = [(q * k_j).sum(-1, keepdim=True) * scale for k_j, _ in past[1:]]
        weights = torch.cat([scores, *chain], -1).float().softmax(-1).to(q.dtype)
        out = weights[..., :t] @ first_v
        for j, (_, v_j) in enumerate(past[1:]):
            out = out + weights[..., t + j : t + j + 1] * v_j
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Eagle3Drafter(nn.Module):
    """Trainable part of the drafter; the token embedding is the target's and stays outside.

    Parameter names are those of the checkpoint vLLM loads.
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
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # Target id of draft id i is i + d2t[i].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    def draft_token_ids(self) -> torch.Tensor:
        """Target ids of the draft vocabulary."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_draft_vocabulary(self, token_ids: torch.Tensor) -> None:
        """Restrict drafts to these target ids (sorted, `draft_vocab_size` of them)."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))

    def unroll(
        self,
        aux_BTA: torch.Tensor,
        next_embeds_BTH: torch.Tensor,
        mask_BTT: torch.Tensor,
        position_BT: torch.Tensor,
        num_steps: int,
    ) -> list[torch.Tensor]:
        """Draft logits [B, T, V] of every pass, indexed by where the chain starts.

        `next_embeds_BTH[:, s]` embeds token s+1. Pass j of the chain at s needs token s+1+j, which
        is `next_embeds` shifted left by j; entries shifted in from beyond the end are garbage and
        the caller masks them.
        """
        layer = self.midlayer
        hidden = self.fc(aux_BTA)
        embeds = next_embeds_BTH
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        logits = []
        for step in range(num_steps):
            if step:
                embeds = F.pad(embeds[:, 1:], (0, 0, 0, 1))
            residual = hidden
            x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
            hidden = residual + layer.self_attn(x, position_BT + step, mask_BTT, past)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def rotary(
    position_BT: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    exponent = torch.arange(0, head_dim, 2, device=position_BT.device).float() / head_dim
    angle = position_BT.float().unsqueeze(-1) * theta**-exponent
    angle = torch.cat([angle, angle], -1).unsqueeze(1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
