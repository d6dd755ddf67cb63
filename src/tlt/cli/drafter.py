"""`tlt drafter`: train, export and compare drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tlt.cli import options as opt
from tlt.cli.bench import bench
from tlt.cli.output import Output, command_line, write_json

app = typer.Typer(no_args_is_help=True, help="Train, export and compare drafters.")
app.command()(bench)


@app.command()
def train(
    model: opt.Policy,
    out: Annotated[Path, opt.option("Folder of the run: versions, report, drafter.")],
    task: opt.Task = "chain_sum",
    prompts: opt.Prompts = None,
    num_samples: Annotated[int, opt.number("Responses to train on.", 64, 10_000_000)] = 768,
    num_held_out: Annotated[int, opt.number("Held-out prompts to measure on.", 1, 100_000)] = 32,
    max_tokens: opt.MaxTokens = 900,
    temperature: opt.Temperature = 1.0,
    budget_minutes: Annotated[float, opt.number("Time budget of the whole command.", 0)] = 20.0,
    steps: Annotated[
        int | None,
        opt.number("Optimizer steps; by default as many as the budget allows.", 1, 10_000_000),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        opt.number("Draft length to train for; by default 4, 7 with --gpus.", 1, 16),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        opt.number("Draft vocabulary; by default all tokens, or 32,768 of many.", 16, 10**7),
    ] = None,
    lr: opt.Lr = 1e-3,
    row_tokens: Annotated[int, opt.number("Tokens of a row.", 16, 10_000_000)] = 2048,
    init: Annotated[Path | None, opt.option("Folder or Hub id of a drafter to start from.")] = None,
    engines: opt.Engines = 2,
    gpus: opt.Gpus = 0,
    ranks: Annotated[
        int | None,
        opt.number("Ranks that train; by default 1, or all GPUs of the engines.", 1, 10_000),
    ] = None,
    rows: Annotated[
        int | None,
        opt.number("Rows per optimizer step; by default one per rank.", 1, 10_000),
    ] = None,
    dtype: opt.Dtype = "bfloat16",
    compute: opt.Compute = "auto",
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Train a drafter on the policy's own responses, and measure its acceptance length."""
    import asyncio
    import os

    from tlt.config.rollout import EngineConfig
    from tlt.drafter.export import ExportPlan
    from tlt.drafter.export import export as export_drafter
    from tlt.drafter.trainer import TrainerSettings
    from tlt.hardware import compute_dtype
    from tlt.models.folder import read_model
    from tlt.models.hub import local_folder
    from tlt.node.cluster import start_ray
    from tlt.observe.provenance import provenance
    from tlt.offline.drafter import train_drafter
    from tlt.offline.training import DrafterPlan, plan_ranks
    from tlt.report.charts import training_picture
    from tlt.strategy.spec import trained_draft_tokens

    output = Output(as_json)
    draft_tokens = draft_tokens or trained_draft_tokens({"kind": "adaptive"}, gpus > 0)
    cores = len(os.sched_getaffinity(0))
    num_ranks, num_rows = plan_ranks(ranks, rows, engines, gpus, cores)
    name, model = str(model), local_folder(model, "--model")
    init = None if init is None else local_folder(init, "--init")
    read_model(model, "--model")
    count, fewer = num_samples + num_held_out, "--num-samples or --num-held-out"
    with opt.named_by_options():
        tokens = opt.read_prompts(model, task, prompts, count, seed, "drafter", fewer)
    plan = DrafterPlan(
        engine=EngineConfig(
            model=str(model),
            num_gpus=gpus,
            engine_args={
                "enforce_eager": True,
                "dtype": dtype,
                "max_model_len": max(map(len, tokens)) + max_tokens + draft_tokens + 1,
                "max_num_seqs": 64,
            },
        ),
        num_engines=engines,
        num_ranks=num_ranks,
        prompts=tuple(tokens[num_held_out:]),
        held_out_prompts=tuple(tokens[:num_held_out]),
        out=out,
        max_tokens=max_tokens,
        temperature=temperature,
        budget_s=60 * budget_minutes,
        num_steps=steps,
        draft_vocab_size=draft_vocab,
        trainer=TrainerSettings(
            num_draft_tokens=draft_tokens,
            row_tokens=row_tokens,
            num_rows=num_rows,
            lr=lr,
            temperature=temperature,
            bfloat16=compute_dtype(compute, on_gpu=gpus > 0) == "bfloat16",
            seed=seed,
        ),
        dtype=dtype,
        init=init,
    )
    with output.progress() as show:
        show("starting Ray", 0, 1)
        start_ray(engines)
        report = asyncio.run(train_drafter(plan, show))
    report |= {"model": name, "provenance": provenance(command_line())}
    write_json(out / "report.json", report)
    (out / "report.svg").write_text(training_picture(report))
    export_drafter(ExportPlan(source=out, target=model, target_name=name, out=out / "drafter"))
    output.result(report)
    positions = [f">up to {position}" for position in range(1, draft_tokens + 1)]
    measurements = []
    for at in report["acceptance"]["after"]:
        for when in ("before", "after"):
            measured = report["acceptance"][when][at]
            shares = [f"{share:.0%}" for share in measured["by_position"]]
            measurements.append([at, when, f"{measured['length']:.2f}", *shares])
    output.table(
        f"acceptance in the engine, {report['num_held_out_prompts']} held-out prompts, "
        f"{report['training']['steps']} optimizer steps in "
        f"{report['training']['history'][-1]['elapsed_s'] / 60:.1f} minutes",
        (">temperature", "drafter", ">accept length", *positions),
        measurements,
    )
    output.wrote(f"{out}/drafter, {out}/report.json and {out}/report.svg")


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(help="Folder of a training run, or folder or Hub id of a drafter.")
    ],
    model: Annotated[
        Path, opt.option("Folder or Hub id of the policy that the drafter drafts for.")
    ],
    out: Annotated[Path, opt.option("Folder to write.")],
    form: Annotated[
        Literal["eagle3", "speculators"],
        opt.option(
            "eagle3: a drafter to serve beside its policy. speculators: one that names its "
            "policy, for `vllm serve FOLDER` and the speculators library.",
            "--format",
        ),
    ] = "eagle3",
    card: Annotated[
        bool, opt.option("Write a model card with the measured acceptance.", "--card")
    ] = False,
    model_id: Annotated[
        str | None,
        opt.option("Hub id of the policy, for others to find it; by default --model."),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        opt.number("Draft length to serve with; by default the length of its training.", 1, 32),
    ] = None,
    moments: Annotated[
        bool, opt.option("Add the optimizer's state, to continue training.", "--moments")
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
    drafter = provenance["drafter"]
    output = Output()
    output.wrote(f"{out} ({drafter['sha256'][:12]}); use it with")
    use = f"vllm serve {out}"
    if form == "eagle3":
        use = (
            f'--speculative-config \'{{"method": "eagle3", "model": "{out}", '
            f'"num_speculative_tokens": {drafter["num_draft_tokens"]}}}\''
        )
    output.say(f"  {use}")
