"""`tlt models sft`: a policy's supervised start, written as a model folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlt.agents.host import HERMES, reader
from tlt.agents.worked import worked_dialogues
from tlt.contracts import Worked
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
    environment: str | None = None,
    parser: str = HERMES,
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
    made = problems(task, num_problems, settings.seed, "", sizes, parameters)
    samples: list[Worked] = []
    if environment is not None:
        samples = worked_dialogues(environment, chat, made, reader(parser, str(model)))
    for problem in made if environment is None else ():
        tokens, num_prompt = chat.answered(problem.question, problem.solution)
        samples.append((tokens, [(num_prompt, len(tokens))]))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    supervised_start(policy, samples, settings, on_step)
    policy.set_attn_implementation("sdpa")
    policy.to(save_dtype).save_pretrained(out)
    chat.tokenizer.save_pretrained(out)
    lengths = [len(token_ids) - parts[0][0] for token_ids, parts in samples]
    return {"num_problems": num_problems, **length_summary(lengths)}
