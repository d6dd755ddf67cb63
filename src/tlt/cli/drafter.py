"""`tlt drafter`: train and export drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tlt.cli.options import (
    Compute,
    Dtype,
    Engines,
    Gpus,
    Json,
    Lr,
    MaxTokens,
    Prompts,
    RowTokens,
    Seed,
    Temperature,
    command_line,
    named_by_options,
    number,
    print_json,
    read_prompts,
    result_table,
    say_written,
)
from tlt.cli.progress import progress_bar

app = typer.Typer(no_args_is_help=True, help="Train and export EAGLE-3 drafters.")


@app.command()
def train(
    model: Annotated[Path, typer.Option(help="Folder or Hub id of the policy.")],
    out: Annotated[Path, typer.Option(help="Folder of the run: versions, report, drafter.")],
    task: Annotated[str, typer.Option(help="Task that provides the prompts.")] = "chain_sum",
    prompts: Prompts = None,
    num_samples: Annotated[int, number("Responses to train on.", 64, 10_000_000)] = 768,
    num_held_out: Annotated[int, number("Held-out prompts to measure on.", 1, 100_000)] = 32,
    max_tokens: MaxTokens = 900,
    temperature: Temperature = 1.0,
    budget_minutes: Annotated[float, number("Time budget of the whole command.", 0)] = 20.0,
    draft_tokens: Annotated[int, number("Draft length to train for.", 1, 16)] = 4,
    draft_vocab: Annotated[
        int | None,
        number(
            "Size of the draft vocabulary; by default all tokens, or 32,768 of many.", 16, 10**7
        ),
    ] = None,
    lr: Lr = 1e-3,
    row_tokens: RowTokens = 2048,
    init: Annotated[
        Path | None, typer.Option(help="Folder or Hub id of a drafter to start from.")
    ] = None,
    engines: Engines = 2,
    gpus: Gpus = 0,
    dtype: Dtype = "bfloat16",
    compute: Compute = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a drafter on the policy's own responses, and measure its acceptance length."""
    import asyncio

    from tlt.config.rollout import EngineConfig
    from tlt.drafter.export import ExportPlan
    from tlt.drafter.export import export as export_drafter
    from tlt.drafter.trainer import TrainerSettings
    from tlt.hardware import compute_dtype
    from tlt.models.hub import local_folder
    from tlt.node.cluster import start_ray
    from tlt.observe.provenance import provenance
    from tlt.offline.drafter import DrafterPlan, train_drafter
    from tlt.report.charts import training_picture

    console = Console(stderr=as_json)
    name, model = str(model), local_folder(model, "--model")
    init = None if init is None else local_folder(init, "--init")
    with named_by_options():
        tokens = _prompts(str(model), task, prompts, num_samples + num_held_out, seed)
    head_room = draft_tokens + 1
    plan = DrafterPlan(
        engine=EngineConfig(
            model=str(model),
            num_gpus=gpus,
            engine_args={
                "enforce_eager": True,
                "dtype": dtype,
                "max_model_len": max(map(len, tokens)) + max_tokens + head_room,
                "max_num_seqs": 64,
            },
        ),
        num_engines=engines,
        prompts=tuple(tokens[num_held_out:]),
        held_out_prompts=tuple(tokens[:num_held_out]),
        out=out,
        max_tokens=max_tokens,
        temperature=temperature,
        budget_s=60 * budget_minutes,
        draft_vocab_size=draft_vocab,
        trainer=TrainerSettings(
            num_draft_tokens=draft_tokens,
            row_tokens=row_tokens,
            lr=lr,
            temperature=temperature,
            bfloat16=compute_dtype(compute) == "bfloat16",
            seed=seed,
        ),
        dtype=dtype,
        init=init,
    )
    with progress_bar(console) as show:
        show("starting Ray", 0, 1)
        start_ray(engines)
        report = asyncio.run(train_drafter(plan, show))
    report |= {"model": name, "provenance": provenance(command_line())}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.svg").write_text(training_picture(report))
    export_drafter(ExportPlan(source=out, target=model, target_name=name, out=out / "drafter"))
    if as_json:
        print_json(report)
        return
    console.print(_table(report))
    say_written(console, f"{out}/drafter, {out}/report.json and {out}/report.svg")


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(help="Folder of a training run, or folder or Hub id of a drafter.")
    ],
    model: Annotated[
        Path, typer.Option(help="Folder or Hub id of the policy that the drafter drafts for.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    form: Annotated[
        Literal["eagle3", "speculators"],
        typer.Option(
            "--format",
            help="eagle3: a drafter to serve beside its policy. speculators: one that names its "
            "policy, for `vllm serve FOLDER` and the speculators library.",
        ),
    ] = "eagle3",
    card: Annotated[
        bool, typer.Option("--card", help="Write a model card with the measured acceptance.")
    ] = False,
    model_id: Annotated[
        str | None,
        typer.Option(help="Hub id of the policy, for others to find it; by default --model."),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        number("Draft length to serve with; by default what it was trained for.", 1, 32),
    ] = None,
    moments: Annotated[
        bool, typer.Option("--moments", help="Add the optimizer's state, to go on training from.")
    ] = False,
) -> None:
    """Export a drafter as a folder that stock vLLM loads, with its provenance."""
    from tlt.drafter.export import ExportPlan
    from tlt.drafter.export import export as export_drafter
    from tlt.models.hub import hub_id, local_folder

    known = model_id or (str(model) if hub_id(model) else None)
    provenance = export_drafter(
        ExportPlan(
            source=local_folder(source, "SOURCE"),
            target=local_folder(model, "--model"),
            out=out,
            target_name=known,
            format=form,
            num_draft_tokens=draft_tokens,
            card=card,
            moments=moments,
        )
    )
    console = Console()
    drafter = provenance["drafter"]
    say_written(console, f"{out} ({drafter['sha256'][:12]}); use it with")
    use = f"vllm serve {out}"
    if form == "eagle3":
        use = (
            f'--speculative-config \'{{"method": "eagle3", "model": "{out}", '
            f'"num_speculative_tokens": {drafter["num_draft_tokens"]}}}\''
        )
    console.print(f"  {use}", markup=False, highlight=False, soft_wrap=True)


def _prompts(
    model: str, task: str, file: Path | None, count: int, seed: int
) -> list[tuple[int, ...]]:
    from tlt.models.folder import read_model
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    read_model(Path(model), "--model")
    chat = Chat(model)
    if file is None:
        return [chat.prompt(problem.question) for problem in problems(task, count, seed, "drafter")]
    texts = read_prompts(file, count, "--num-samples or --num-held-out")
    return [chat.prompt(text) for text in texts]


def _table(report: dict[str, Any]) -> Table:
    num_drafts = report["num_draft_tokens"]
    table = result_table(
        f"acceptance in the engine, {report['num_held_out_prompts']} held-out prompts, "
        f"{report['training']['steps']} optimizer steps in "
        f"{report['seconds']['train'] / 60:.1f} minutes",
    )
    table.add_column("temperature", justify="right")
    table.add_column("drafter")
    table.add_column("accept length", justify="right")
    for position in range(1, num_drafts + 1):
        table.add_column(f"up to {position}", justify="right")
    for temperature in report["acceptance"]["after"]:
        for when in ("before", "after"):
            measured = report["acceptance"][when][temperature]
            table.add_row(
                temperature,
                when,
                f"{measured['length']:.2f}",
                *(f"{share:.0%}" for share in measured["by_position"]),
            )
    return table
