"""`tlt eval`: how often a model solves problems, with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tlt.cli.options import (
    Engines,
    Json,
    Parameters,
    Seed,
    Sizes,
    TopP,
    command_line,
    named_by_options,
    number,
    print_json,
    read_sizes,
    result_table,
)
from tlt.cli.progress import progress_bar

if TYPE_CHECKING:
    from tlt.config.train import TaskConfig, TrainConfig

FILES = (".jsonl", ".parquet")
MAX_TOKENS = 1024


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="Run, or model folder or Hub id.")
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task of reasoning-gym, such as gcd, or a .jsonl or .parquet file with question "
            "and answer; by default the held-out problems of the run."
        ),
    ] = None,
    parameter: Parameters = None,
    sizes: Sizes = None,
    instruction: Annotated[
        str | None,
        typer.Option(
            help="Text after every question; by default that of the run, or for a file "
            "how to mark the answer."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="gym, exact, math or module:function; by default that of the run."),
    ] = None,
    problems: Annotated[
        int | None, number("Number of problems; by default 64, or all of a run.", 1, 1_000_000)
    ] = None,
    samples: Annotated[int, number("Samples per problem; the largest k.", 1, 10_000)] = 4,
    max_tokens: Annotated[
        int | None,
        number(f"Longest response; by default that of the run, or {MAX_TOKENS}.", 1, 10_000_000),
    ] = None,
    temperature: Annotated[
        float | None, number("Sampling temperature; by default that of the run, or 1.", 0, 2)
    ] = None,
    top_p: TopP = 1.0,
    engines: Engines = 1,
    gpus: Annotated[
        int | None,
        number("GPUs per engine; by default those of the run, or 0: CPU cores.", 0, 10_000),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure pass@k of a run's policy or of any model, with 95% intervals.

    pass@k is the share of problems of which at least one of k samples is right.
    """
    from tlt.errors import ConfigError
    from tlt.observe.provenance import provenance
    from tlt.offline.evaluate import EvalPlan
    from tlt.offline.evaluate import evaluate as measure

    model, run = _model(target)
    if temperature is None:
        temperature = run.sampling.temperature if run else 1.0
    if temperature == 0 and samples > 1:
        raise ConfigError(
            f"--temperature 0 makes {samples} equal samples of every problem; give --samples 1, or "
            "a temperature such as 0.6"
        )
    with named_by_options():
        chosen, function, note = _problems(
            run, task, parameter or [], sizes, instruction, reward, problems, seed
        )
    console = Console(stderr=as_json)
    plan = EvalPlan(
        model=str(model),
        problems=chosen,
        reward=function,
        num_samples=samples,
        max_tokens=max_tokens or (run.sampling.max_tokens if run else MAX_TOKENS),
        temperature=temperature,
        top_p=top_p,
        num_engines=engines,
        num_gpus=(run.engine.num_gpus if run else 0) if gpus is None else gpus,
        reward_workers=run.reward.num_workers if run else 1,
        reward_timeout_s=run.reward.timeout_s if run else 10.0,
        seed=seed,
    )
    with progress_bar(console) as show:
        result = measure(plan, show)
    result |= {"model": target, "problems": note, "provenance": provenance(command_line())}
    if as_json:
        print_json(result)
        return
    console.print(
        f"{target}: {note}, {samples} samples each at temperature {temperature:g}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(_table(result))
    rest = (
        f"{result['mean_tokens']:.0f} tokens per response, {result['truncated_share']:.0%} cut off "
        f"at {plan.max_tokens}; mean reward {result['reward_mean']:.3f}"
    )
    if result["faults"]:
        rest += f"; {result['faults']} samples without a reward count as wrong"
    console.print(rest, highlight=False, soft_wrap=True)


def _model(target: str) -> tuple[Path, TrainConfig | None]:
    """Return the model folder of a run or a model, and the settings of the run."""
    from tlt.config.load import check, read_toml
    from tlt.config.train import TrainConfig
    from tlt.errors import ConfigError
    from tlt.models.folder import read_model
    from tlt.models.hub import local_folder

    folder = Path(target)
    if not (folder / "config.toml").exists():
        if folder.is_dir() and not (folder / "config.json").exists():
            raise ConfigError(
                f"{target} is neither a run (no config.toml) nor a model (no config.json); give "
                "the folder that run.out named, a model folder, or a Hub id"
            )
        folder = local_folder(target, "RUN_OR_MODEL")
        read_model(folder, "RUN_OR_MODEL")
        return folder, None
    path = folder / "config.toml"
    run = check(TrainConfig, read_toml(path), str(path))
    if not (folder / "policy").exists():
        raise ConfigError(
            f"{target} holds no policy yet: the run has not ended; wait for it, or give the model "
            f"it started from, {run.policy.model}"
        )
    read_model(folder / "policy", "RUN_OR_MODEL")
    return folder / "policy", run


def _problems(
    run: TrainConfig | None,
    task: str | None,
    parameters: list[str],
    sizes: str | None,
    instruction: str | None,
    reward: str | None,
    count: int | None,
    seed: int,
) -> tuple[list[Any], Any, str]:
    """Return the problems, their reward function, and in words which problems they are."""
    from tlt.config.load import apply_overrides
    from tlt.config.train import SizesConfig, TaskConfig
    from tlt.errors import ConfigError
    from tlt.tasks.file import read_problems
    from tlt.tasks.rewards import reward_function
    from tlt.tasks.source import open_source

    if task is None:
        if run is None:
            raise ConfigError(
                "--task is missing: a model alone has no problems; e.g. --task gcd, or "
                "--task problems.jsonl"
            )
        if parameters or sizes:
            raise ConfigError(
                "--parameter and --sizes go with --task; without it, the run's own problems count"
            )
        return _held_out(run, instruction, reward, count)
    from_file = Path(task).suffix.lower() in FILES
    # A run on a file says how to ask and score another file; one on a task, how to score a task.
    like = run if run is not None and (run.task.path is not None) == from_file else None
    name = like.reward.function if like else "math" if from_file else "auto"
    function = reward_function(reward or name, from_file)
    if from_file:
        if parameters or sizes:
            raise ConfigError(
                "--parameter and --sizes go with a task's name, not with a file; leave them out"
            )
        config = _of_file(task, like)
        text = config.instruction if instruction is None else instruction
        rows = read_problems(config)[: count or None]
        asked = [_with(row, text) for row in rows]
        return asked, function, f"{len(rows)} problems of {task}"
    tail = read_sizes(sizes)
    config = TaskConfig(
        name=task,
        parameters=apply_overrides({}, parameters),
        instruction=(like.task.instruction if like else "") if instruction is None else instruction,
        sizes=SizesConfig(median=tail.median, p95=tail.p95, longest=tail.longest) if tail else None,
    )
    made = open_source(config, seed, 0).held_out(count or 64)
    return made, function, f"{len(made)} problems of {task}"


def _held_out(
    run: TrainConfig, instruction: str | None, reward: str | None, count: int | None
) -> tuple[list[Any], Any, str]:
    from tlt.errors import ConfigError
    from tlt.tasks.rewards import reward_function
    from tlt.tasks.source import open_source

    from_file = run.task.path is not None
    held_out = run.eval.num_problems if run.eval.every_steps or not from_file else 0
    if not held_out:
        raise ConfigError(
            "the run held out no problems (eval.every_steps = 0): all of its file were trained on; "
            "give others, e.g. --task test.jsonl"
        )
    if from_file and count is not None and count > held_out:
        raise ConfigError(
            f"--problems {count} is more than the {held_out} that the run held out; give at most "
            f"{held_out}, or others with --task"
        )
    change = {} if instruction is None else {"instruction": instruction}
    task = run.task.model_copy(update=change)
    made = open_source(task, run.run.seed, held_out).held_out(count or held_out)
    function = reward_function(reward or run.reward.function, from_file)
    return made, function, f"{len(made)} held-out problems of the run"


def _of_file(path: str, run: TrainConfig | None) -> TaskConfig:
    """Return how to read a file's problems and ask them: as a run does, or as is usual."""
    from tlt.config.train import TaskConfig
    from tlt.tasks.file import columns, task_of

    if run is None:
        return TaskConfig(**task_of(path, "--task")["task"])
    own = run.task.model_copy(update={"path": path, "id_key": None})
    if {own.question_key, own.answer_key} <= {*columns(Path(path))}:
        return own
    usual = TaskConfig(**task_of(path, "--task")["task"])
    return usual.model_copy(update={"instruction": own.instruction})


def _with(problem: Any, instruction: str) -> Any:
    from dataclasses import replace

    return replace(problem, question=f"{problem.question}\n{instruction}")


def _table(result: dict[str, Any]) -> Table:
    table = result_table("")
    for heading in ("k", "pass@k", "95% interval"):
        table.add_column(heading, justify="right")
    for k, of in result["pass_at"].items():
        table.add_row(k, f"{of['value']:.1%}", f"{of['low']:.1%} to {of['high']:.1%}")
    return table
