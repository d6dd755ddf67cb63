"""Which model and which problems `tlt eval` measures: from a run, a file, or a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tlt.config.load import check, read_toml
from tlt.config.tasks import SizesConfig, TaskConfig
from tlt.config.train import TrainConfig
from tlt.errors import ConfigError
from tlt.models.folder import read_model
from tlt.models.hub import local_folder
from tlt.tasks.file import columns, task_of
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import open_set
from tlt.tasks.rewards import RewardFunction, reward_function
from tlt.tasks.source import fixed_problems, open_source
from tlt.tasks.tail import HeavyTail

FILES = (".jsonl", ".parquet")

Chosen = tuple[list[Problem], RewardFunction, str]
"""Problems, their reward function, and in words which problems they are."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of `tlt eval` that name problems; None takes the run's."""

    task: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sizes: HeavyTail | None = None
    instruction: str | None = None
    reward: str | None = None
    count: int | None = None
    seed: int = 0
    held_out_set: str | None = None
    """One of the run's `eval.sets`, by its name."""


def model_of(target: str, policy: Path | None = None) -> tuple[Path, TrainConfig | None]:
    """Return the model folder of a run or a model, and the settings of the run.

    `policy` replaces the run's final policy.
    """
    folder = Path(target)
    path = folder / "config.toml"
    if path.exists():
        run = check(TrainConfig, read_toml(path), str(path))
        folder = policy or folder / "policy"
    else:
        run = None
        if folder.is_dir() and not (folder / "config.json").exists():
            raise ConfigError(
                f"{target} is neither a run (no config.toml) nor a model (no config.json); give "
                "the folder that run.out named, a model folder, or a Hub id"
            )
        folder = local_folder(target, "RUN_OR_MODEL")
    read_model(folder, "RUN_OR_MODEL")
    return folder, run


def chosen_problems(run: TrainConfig | None, asked: Asked) -> Chosen:
    """Return the problems to solve: the run's held-out ones, unless others are named."""
    if asked.held_out_set is not None:
        return _own_set(run, asked, asked.held_out_set)
    if asked.task is None:
        if run is None:
            raise ConfigError(
                "--task is missing: a model alone has no problems; e.g. --task gcd, or "
                "--task problems.jsonl"
            )
        return _held_out(run, asked)
    from_file = Path(asked.task).suffix.lower() in FILES
    # A run on a file says how to ask and score another file; one on a task, how to score a task.
    like = run if run is not None and (run.task.path is not None) == from_file else None
    usual = "math" if from_file else "auto"
    function = reward_function(asked.reward or (like.reward.function if like else usual), from_file)
    if from_file:
        _refuse_parameters(asked, "a task's name, not with a file; leave them out")
        config = _file_task(asked.task, like.task if like else None)
        if asked.instruction is not None:
            config = config.model_copy(update={"instruction": asked.instruction})
    else:
        usual = like.task.instruction if like else ""
        config = TaskConfig(
            name=asked.task,
            parameters=dict(asked.parameters),
            instruction=usual if asked.instruction is None else asked.instruction,
            system_prompt=like.task.system_prompt if like else "",
            sizes=SizesConfig(**asdict(asked.sizes)) if asked.sizes else None,
        )
    found = fixed_problems(config, asked.seed, asked.count)
    return found, function, f"{len(found)} problems of {asked.task}"


def _file_task(path: str, like: TaskConfig | None) -> TaskConfig:
    """Return how to read a file's problems and ask them: as a run does, or as is usual."""
    if like is not None:
        own = like.model_copy(update={"path": path, "id_key": None})
        if {own.question_key, own.answer_key} <= {*columns(Path(path))}:
            return own
    usual = TaskConfig(**task_of(path, "--task")["task"])
    kept = ("instruction", "system_prompt")
    return usual.model_copy(update={key: getattr(like, key) for key in kept} if like else {})


def _own_set(run: TrainConfig | None, asked: Asked, name: str) -> Chosen:
    """Return a set of `eval.sets`."""
    sets = {each.name: each for each in run.eval.sets} if run else {}
    if run is None or name not in sets or asked.task is not None:
        known = ", ".join(sets) or "none"
        raise ConfigError(
            f"--set {name} is the name of one of the run's eval.sets ({known}), and takes no "
            "--task; e.g. --task test.jsonl without --set"
        )
    _refuse_parameters(asked, "--task; a set has its own parameters")
    chosen = sets[name]
    task = {} if asked.instruction is None else {"instruction": asked.instruction}
    change = {"task": chosen.task.model_copy(update=task), "reward": asked.reward or chosen.reward}
    count = asked.count or chosen.num_problems
    found = open_set(run, chosen.model_copy(update=change | {"num_problems": count}))
    return list(found.problems), found.reward, f"{len(found.problems)} problems of set {name}"


def _held_out(run: TrainConfig, asked: Asked) -> Chosen:
    _refuse_parameters(asked, "--task; without it, the run's own problems count")
    if run.task.environment is not None:
        raise ConfigError(
            f"the run's problems need its tools (task.environment = {run.task.environment!r}), and "
            "this command has none; eval/reward_mean of the run is their reward, or name problems "
            "to solve without tools, e.g. --task test.jsonl"
        )
    from_file = run.task.path is not None
    held_out = run.eval.num_problems if run.eval.every_steps or not from_file else 0
    if not held_out:
        key = "eval.num_problems" if run.eval.every_steps else "eval.every_steps"
        other = [f"--set {each.name}" for each in run.eval.sets] or ["--task test.jsonl"]
        raise ConfigError(
            f"the run held out no problems ({key} = 0): it trained on all of its file; "
            f"give others, e.g. {other[0]}"
        )
    if from_file and asked.count is not None and asked.count > held_out:
        raise ConfigError(
            f"--problems {asked.count} is more than the {held_out} that the run held out; give at "
            f"most {held_out}, or others with --task"
        )
    change = {} if asked.instruction is None else {"instruction": asked.instruction}
    source = open_source(run.task.model_copy(update=change), run.run.seed, held_out)
    found = source.held_out(asked.count or held_out)
    function = reward_function(asked.reward or run.reward.function, from_file)
    return found, function, f"{len(found)} held-out problems of the run"


def _refuse_parameters(asked: Asked, rest: str) -> None:
    if asked.parameters or asked.sizes:
        raise ConfigError(f"--parameter and --sizes go with {rest}")
