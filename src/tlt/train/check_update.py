"""Checks of a run's update before any engine starts: lengths, adapters, advantage and loss."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

from tlt.config.train import TrainConfig
from tlt.errors import ConfigError


def check_learner(config: TrainConfig) -> None:
    """Refuse forced lengths and numbers of updates that do not fit the samples."""
    forced = config.debug.forced_lengths
    if forced is not None and forced.longest > config.sampling.max_tokens:
        raise ConfigError(
            f"debug.forced_lengths.longest = {forced.longest} is more than sampling.max_tokens = "
            f"{config.sampling.max_tokens}; set it to {config.sampling.max_tokens} or less"
        )
    if forced is not None and config.sampling.max_extra_prompts:
        raise ConfigError(
            f"sampling.max_extra_prompts = {config.sampling.max_extra_prompts} replaces groups by "
            "their rewards, which mean nothing with debug.forced_lengths; set it to 0"
        )
    updates, prompts = config.learner.updates_per_step, config.sampling.prompts_per_step
    if updates > prompts:
        raise ConfigError(
            f"learner.updates_per_step = {updates} is more than sampling.prompts_per_step = "
            f"{prompts}: an update needs a group; e.g. learner.updates_per_step = 1"
        )


def check_lora(config: TrainConfig) -> None:
    """Refuse adapters of layers that the policy lacks."""
    lora = config.learner.lora
    if not lora.rank:
        return
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f"learner.lora.rank = {lora.rank} needs peft: pip install 'tlt-rl[train]', or set it "
            "to 0 to train all weights"
        )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tlt.learner.lora import linear_layers

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.policy.model))
    if getattr(model.config, "num_experts", 0):
        raise ConfigError(
            f"learner.lora.rank = {lora.rank}: mixtures of experts cannot have adapters; set it to "
            "0 to train all weights, or use a dense model"
        )
    there = linear_layers(model)
    if unknown := [name for name in lora.target_modules if name not in there]:
        raise ConfigError(
            f"learner.lora.target_modules: the policy's decoder layers have no linear layer "
            f"{unknown[0]!r}; they have {', '.join(there)}; e.g. {there[:2]}, or leave it out for "
            "all of them"
        )


def check_algorithm(config: TrainConfig) -> None:
    """Import the advantage and the loss, and call functions of the user's own once."""
    import torch

    from tlt.learner.advantage import ADVANTAGES, advantage_function
    from tlt.learner.policy_loss import loss_function

    algorithm, size = config.algorithm, config.sampling.group_size
    if algorithm.overlong_tokens > config.sampling.max_tokens:
        raise ConfigError(
            f"algorithm.overlong_tokens = {algorithm.overlong_tokens} is more than "
            f"sampling.max_tokens = {config.sampling.max_tokens}; e.g. "
            f"{max(1, config.sampling.max_tokens // 5)}"
        )
    over_step = algorithm.advantage_over == "step"
    if over_step and algorithm.advantage in ADVANTAGES:
        raise ConfigError(
            f"algorithm.advantage_over = 'step', but {algorithm.advantage!r} compares the samples "
            "of a group; set it to 'group', or name a function of all groups, e.g. "
            "algorithm.advantage = 'my_algorithm:advantage'"
        )
    if over_step and config.sampling.max_extra_prompts:
        raise ConfigError(
            f"sampling.max_extra_prompts = {config.sampling.max_extra_prompts} replaces a group as "
            "soon as it is complete, and with algorithm.advantage_over = 'step' its advantages are "
            "not known then; set max_extra_prompts to 0"
        )
    advantage: Callable[[Any], Any] = advantage_function(algorithm.advantage)
    loss = loss_function(algorithm.loss)
    what = f"algorithm.advantage = {algorithm.advantage!r} must return a finite number per reward"
    what += ", in a list per group" if over_step else ""
    example = "grpo"
    try:
        groups = [[0.0] * (size - 1) + [1.0], [1.0] * size]
        for found in advantage(groups) if over_step else map(advantage, groups):
            finite = [each for each in map(float, found) if math.isfinite(each)]
            assert len(finite) == size, found
        what = f"algorithm.loss = {algorithm.loss!r} must return a tensor of a number per token"
        example = "clipped"
        logprob_T, old_T = torch.zeros(3, requires_grad=True), torch.zeros(3)
        loss_T = loss(logprob_T, old_T, torch.ones(3), algorithm)
        assert loss_T.shape == old_T.shape, tuple(loss_T.shape)
        loss_T.sum().backward()
    except Exception as error:
        raise ConfigError(f"{what}, as {example!r} does: {error!r}; e.g. {example!r}") from error
