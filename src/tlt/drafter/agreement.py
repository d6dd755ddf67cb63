"""The chance that a draft equals the policy's draw when both are drawn with the same noise.

An engine draws a token as `argmax(log p + g)` from the policy's distribution p, and a draft as
`argmax(log q + g)` from the drafter's distribution q, with the same Gumbel noise g. Both are token
i with the chance

    1 / sum over j of max(p_j / p_i, q_j / q_i)

and the sum over i is the chance that the draft is accepted. Here it is taken over the policy's
likeliest tokens, and all other tokens count as one: what it leaves out is the chance that both draw
the same unlikely token. Engines on CPUs draw in two stages, which changes little.

Shapes: n positions, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import torch

DRAFT_NOISE = 0.85
"""Share of the policy's noise that a drafter draws with: `argmax(log q + share * g)`.

That is a draw with all of the noise from a q whose logits are `1 / share` times as large. A drafter
that knows little of the policy drafts best with less of the noise, because its q is flatter than p;
0.85 is within 1% of the best share after 40 s and after five minutes of training
(`benchmarks/losses.py`, `distance.py`). No share changes any sample, because the policy's draw does
not depend on drafts."""
LIKELIEST = 32
"""Likeliest tokens of the policy that are told apart."""
_LEAST = 1e-8
"""Least probability of all other tokens together: rounding may leave none."""


def joint_log_chances(log_p_nK: torch.Tensor, log_q_nK: torch.Tensor) -> torch.Tensor:
    """Return the log of the chance that both draws are each of the likeliest tokens.

    `log_p_nK` and `log_q_nK` are log-probabilities of these tokens. A token that the drafter lacks
    has a log-probability of minus infinity.
    """
    log_p, log_q = _with_others(log_p_nK), _with_others(log_q_nK)
    ratio_p_nKK = log_p[..., None, :] - log_p[..., :-1, None]
    ratio_q_nKK = log_q[..., None, :] - log_q[..., :-1, None]
    return -torch.maximum(ratio_p_nKK, ratio_q_nKK).logsumexp(-1)


def _with_others(log_nK: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all other tokens."""
    log_nK = log_nK.clamp_min(-80.0)  # the difference of two infinities is not a number
    others_n = (1 - log_nK.exp().sum(-1)).clamp_min(_LEAST).log()
    return torch.cat([log_nK, others_n[..., None]], -1)
