"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from tlt.tasks.tail import HeavyTail

LARGEST_SEED = 2**63 - 1


def option(text: str, *names: str, **settings: Any) -> Any:
    """Return an option with this help; without names, its parameter names it."""
    return typer.Option(*names, help=text, **settings)


def number(text: str, low: float, high: float = math.inf, **settings: Any) -> Any:
    """Return an option that takes numbers from `low` to `high`. Its help does not say the range."""

    def check(value: float | None) -> float | None:
        if value is not None and not low <= value <= high:  # nan, too
            most = "" if math.isinf(high) else f"<={high}"
            raise typer.BadParameter(f"{value} is not in the range {low}<=x{most}.")
        return value

    return option(text, callback=check, **settings)


Policy = Annotated[Path, option("Folder or Hub id of the policy.")]
Task = Annotated[str, option("Task that provides the prompts.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to override, as section.key=value.")
]
SAMPLING: dict[str, Any] = {"rich_help_panel": "Sampling"}
HARDWARE: dict[str, Any] = {"rich_help_panel": "Hardware"}
Temperature = Annotated[float, number("Sampling temperature.", 0, 2, **SAMPLING)]
TopP = Annotated[float, number("Probability mass of nucleus sampling.", 1e-6, 1, **SAMPLING)]
Lr = Annotated[float, number("Highest learning rate.", 1e-12, 1)]
RowTokens = Annotated[int, number("Tokens per optimizer step.", 16, 10_000_000)]
MaxTokens = Annotated[int, number("Longest response in tokens.", 1, 10_000_000, **SAMPLING)]
Engines = Annotated[int, number("Engines, each on its own core or GPU.", 1, 100_000, **HARDWARE)]
Gpus = Annotated[int, number("GPUs per engine; 0 makes CPU engines.", 0, 10_000, **HARDWARE)]
Seed = Annotated[int, number("Seed of all random choices.", 0, LARGEST_SEED)]

CheckpointStep = Annotated[
    int | None,
    number("RL step of the checkpoint; by default the newest sound one.", 1, 100_000_000),
]

Parameters = Annotated[
    list[str] | None,
    option("Parameter of the task, such as max_digits=1. Repeatable.", "--parameter"),
]
Sizes = Annotated[
    str | None,
    option("Problem sizes as median,p95,longest; by default the task's."),
]

Dtype = Annotated[Literal["float32", "bfloat16"], option("Dtype of the weights.", **HARDWARE)]
Compute = Annotated[
    Literal["auto", "float32", "bfloat16"],
    option("Dtype of products; auto: bfloat16 if the CPU has it.", **HARDWARE),
]

Json = Annotated[bool, option("Print the result as JSON; progress goes to stderr.", "--json")]

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    option("Lowest level of the lines in the log files of run.out."),
]

Prompts = Annotated[
    Path | None,
    option("File of prompts: .jsonl with a 'prompt', or one per line."),
]

EXAMPLE = '{"prompt": "Is 7 prime?"}'


def read_prompts(
    model: Path, task: str, file: Path | None, count: int, seed: int, split: str, fewer: str
) -> list[tuple[int, ...]]:
    """Return prompts of a task or a file as tokens of a model.

    `fewer` names the option that lowers their number.
    """
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    chat = Chat(str(model))
    if file is not None:
        return [chat.prompt(text) for text in _texts(file, count, fewer)]
    return [chat.prompt(problem.question) for problem in problems(task, count, seed, split)]


def _texts(file: Path, count: int, fewer: str) -> list[str]:
    from tlt.errors import ConfigError

    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        raise ConfigError(f"--prompts {file} does not exist; give a .jsonl or text file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--prompts {file} cannot be read ({error}); give a .jsonl or text file in UTF-8"
        ) from error
    if len(lines) < count:
        raise ConfigError(
            f"--prompts {file} has {len(lines)} prompts, but {count} are asked for; lower {fewer}"
        )
    if file.suffix != ".jsonl":
        return lines[:count]
    texts = []
    for place, line in enumerate(lines[:count], 1):
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, LookupError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f"{file}, line {place}: no 'prompt'; e.g. {EXAMPLE}")
        texts.append(text)
    return texts


def read_sizes(text: str | None) -> HeavyTail | None:
    """Return the problem sizes that `--sizes` names; None for those of the task."""
    from tlt.errors import ConfigError
    from tlt.tasks.tail import HeavyTail

    if text is None:
        return None
    try:
        median, p95, longest = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--sizes {text!r} is not three numbers; e.g. 6,30,60") from None
    return HeavyTail(median, p95, longest)


OPTION_OF = {
    "task.name": "--task",
    "task.path": "--task",
    "task.parameters": "--parameter",
    "task.sizes": "--sizes",
    "reward.function": "--reward",
}
"""The run's setting behind each option of commands without a TOML file."""


@contextmanager
def named_by_options(options: Mapping[str, str] = OPTION_OF) -> Iterator[None]:
    """Let errors name the options of a command, not the settings of a run's TOML file."""
    from tlt.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        text = str(error)
        for setting, option in options.items():
            text = text.replace(setting, option)
        raise ConfigError(text) from error


def local_models(model: Path, drafter: Path | None) -> tuple[Path, Path | None]:
    """Return the folders of policy and drafter, downloaded if need be; refuse damaged ones."""
    from tlt.models.folder import check_drafter, read_model
    from tlt.models.hub import local_folder

    folder = local_folder(model, "--model")
    policy = read_model(folder, "--model")
    if drafter is None:
        return folder, None
    drafter = local_folder(drafter, "--drafter")
    check_drafter(drafter, policy, "--drafter")
    return folder, drafter
