"""The speculators format, in which drafters are published: its config and its names of tensors.

A folder of this format names the model that it drafts for: `vllm serve FOLDER` serves both, and the
vLLM project's `speculators` library loads it. Inside TLT a drafter has the plain layout of
`eagle3.config`; this module translates both ways. Tensors stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tlt.drafter.eagle3.config import SWITCHES, Eagle3Config
from tlt.errors import ConfigError

VERSION = "0.9.0"
"""Version of the `speculators` library whose format is written."""
LAYER, OUR_LAYER = "layers.0.", "midlayer."
NOT_OURS = ("embed_tokens.", "verifier_", "t2d")
"""Tensors of the target, or that follow from others."""


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is of the speculators format."""
    return "speculators_model_type" in config or "speculators_config" in config


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of either format in the plain layout, as vLLM understands it."""
    if not is_speculators(config):
        return dict(config)
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise ConfigError(
            f"this drafter has speculators_model_type = {kind!r}, and TLT drafts with 'eagle3'; "
            "take an EAGLE-3 drafter, or make one with `tlt drafter train`"
        )
    plain: dict[str, Any] = dict(config["transformer_layer_config"])
    names = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    plain |= {name: config.get(name) for name in (*names, *SWITCHES)}
    plain["norm_before_residual"] = config.get("norm_before_residual", True)  # vLLM's default
    return plain


def speculators_config(
    config: Eagle3Config,
    dtype: str,
    target: str,
    architectures: Sequence[str],
    num_draft_tokens: int,
) -> dict[str, Any]:
    """Return the `config.json` of a drafter in the speculators format.

    `target` is the Hub id or folder from which vLLM loads the model that it drafts for.
    """
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        **{name: getattr(config, name) for name in SWITCHES},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": config.layer_hf(dtype),
    }


def plain_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors under the names of the plain layout, without the target's."""
    plain = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix("model.")
        if not ours.startswith(NOT_OURS):
            known = ours.startswith(LAYER)
            plain[OUR_LAYER + ours.removeprefix(LAYER) if known else ours] = tensor
    return plain


def speculators_tensors(
    tensors: Mapping[str, torch.Tensor], config: Eagle3Config
) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors under the names of the speculators format."""
    named = {
        LAYER + name.removeprefix(OUR_LAYER) if name.startswith(OUR_LAYER) else name: tensor
        for name, tensor in tensors.items()
    }
    if (d2t := tensors.get("d2t")) is not None:
        named["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        named["t2d"][torch.arange(len(d2t)) + d2t] = True
    return named
