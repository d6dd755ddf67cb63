"""`tlt eval`: how often a model solves problems, with intervals."""

from __future__ import annotations

from typing import Annotated

import typer

from tlt.cli import options as opt
from tlt.cli.output import Output, command_line

MAX_TOKENS = 1024


def evaluate(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="Run, or model folder or Hub id.")
    ],
    step: opt.CheckpointStep = None,
    held_out_set: Annotated[
        str | None, opt.option("Set of the run to measure, by its name in eval.sets.", "--set")
    ] = None,
    task: Annotated[
        str | None,
        opt.option(
            "Task such as gcd, or a .jsonl or .parquet file with question and answer; by "
            "default the run's held-out problems."
        ),
    ] = None,
    parameter: opt.Parameters = None,
    sizes: opt.Sizes = None,
    instruction: Annotated[
        str | None,
        opt.option(
            "Text after every question; by default the run's; for a file, how to mark the answer."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        opt.option("gym, exact, math or module:function; by default the run's."),
    ] = None,
    problems: Annotated[
        int | None, opt.number("Number of problems; by default 64, or all of a run.", 1, 1_000_000)
    ] = None,
    samples: Annotated[
        int, opt.number("Samples per problem; the largest k.", 1, 10_000, **opt.SAMPLING)
    ] = 4,
    max_tokens: Annotated[
        int | None,
        opt.number(
            f"Longest response; by default the run's, or {MAX_TOKENS}.",
            *(1, 10_000_000),
            **opt.SAMPLING,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        opt.number("Temperature; by default the run's, or 1.", 0, 2, **opt.SAMPLING),
    ] = None,
    top_p: opt.TopP = 1.0,
    engines: opt.Engines = 1,
    gpus: Annotated[
        int | None,
        opt.number("GPUs per engine; by default as in the run.", 0, 10_000, **opt.HARDWARE),
    ] = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Measure pass@k of a run's policy or of any model, with 95% intervals.

    pass@k is the share of problems that at least one of k samples solves. A run in progress is
    measured at its newest checkpoint, or at --step.
    """
    from tlt.config.load import apply_overrides
    from tlt.errors import ConfigError
    from tlt.observe.provenance import provenance
    from tlt.offline.evaluate import EvalPlan
    from tlt.offline.evaluate import evaluate as measure
    from tlt.offline.problems import Asked, chosen_problems, model_of
    from tlt.train.export import policy_at

    policy, at = context.with_resource(policy_at(target, step))
    model, run = model_of(target, policy)
    if temperature is None:
        temperature = run.sampling.temperature if run else 1.0
    if temperature == 0 and samples > 1:
        raise ConfigError(
            f"--temperature 0 makes {samples} equal samples of every problem; give --samples 1, or "
            "a temperature such as 0.6"
        )
    with opt.named_by_options():
        asked = Asked(
            task,
            apply_overrides({}, parameter or []),
            opt.read_sizes(sizes),
            instruction,
            reward,
            problems,
            seed,
            held_out_set,
        )
        chosen, function, note = chosen_problems(run, asked)
    output = Output(as_json)
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
    with output.progress() as show:
        result = measure(plan, show)
    result |= {"model": target, "problems": note, "provenance": provenance(command_line())}
    if at is not None:
        result["step"] = at
    output.result(result)
    of_run = target if at is None else f"{target} after RL step {at}"
    output.say(f"{of_run}: {note}, {samples} samples each at temperature {temperature:g}")
    rows = [
        [k, f"{of['value']:.1%}", f"{of['low']:.1%} to {of['high']:.1%}"]
        for k, of in result["pass_at"].items()
    ]
    output.table("", (">k", ">pass@k", ">95% interval"), rows)
    faults = result["faults"]
    output.say(
        f"{result['mean_tokens']:.0f} tokens per response, {result['truncated_share']:.0%} cut off "
        f"at {plan.max_tokens}; mean reward {result['reward_mean']:.3f}"
        + (f"; {faults} samples without a reward count as wrong" if faults else "")
    )
