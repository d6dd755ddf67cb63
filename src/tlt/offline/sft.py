"""`tlt sft`: a policy's supervised start, written as a model folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlt.learner.sft import SftSettings, SftStep, supervised_start
from tlt.models.folder import read_model
from tlt.models.hub import local_folder
from tlt.tasks.chat import Chat
from tlt.tasks.gym import problems
from tlt.tasks.tail import HeavyTail, length_summary


def train_policy(
    model: Path,
    out: Path,
    *,
    task: str,
    num_problems: int,
    sizes: HeavyTail | None,
    parameters: Mapping[str, Any],
    dtype: str,
    settings: SftSettings,
    on_step: Callable[[SftStep], None],
) -> dict[str, Any]:
    """Train `model` on worked solutions, save it, and return a summary of the data."""
    import torch
    from transformers import AutoModelForCausalLM

    save_dtype = getattr(torch, dtype)
    model = local_folder(model, "--model")
    read_model(model, "--model")
    chat = Chat(str(model))
    samples = [
        chat.answered(problem.question, problem.solution)
        for problem in problems(task, num_problems, settings.seed, "", sizes, parameters)
    ]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    supervised_start(policy, samples, settings, on_step)
    policy.set_attn_implementation("sdpa")
    policy.to(save_dtype).save_pretrained(out)
    chat.tokenizer.save_pretrained(out)
    lengths = [len(token_ids) - num_prompt for token_ids, num_prompt in samples]
    return {"num_problems": num_problems, **length_summary(lengths)}
