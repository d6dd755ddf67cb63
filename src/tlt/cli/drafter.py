"""`tlt drafter`: make drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

app = typer.Typer(no_args_is_help=True, help="Make EAGLE-3 drafters.")


@app.callback()
def group() -> None:
    pass


@app.command()
def warmup(
    model: Annotated[Path, typer.Option(help="Folder of the policy.")],
    out: Annotated[Path, typer.Option(help="Folder to write the drafter to.")],
    num_samples: Annotated[int, typer.Option(help="Responses to sample and train on.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Longest response.")] = 256,
    temperature: Annotated[float, typer.Option(help="Temperature of the samples.")] = 1.0,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Size of the draft vocabulary; all tokens by default.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the samples.")] = 4,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    engines: Annotated[int, typer.Option(help="Engines that sample, one core each.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of prompts and training.")] = 0,
) -> None:
    """Train a first drafter on the policy's own answers to small word problems."""
    from tlt.bench.workload import arithmetic_prompts, tokenize_chat
    from tlt.config.rollout import EngineConfig
    from tlt.drafter.warmup import WarmupSettings
    from tlt.run.warmup import warm_up_drafter

    prompts = tokenize_chat(str(model), arithmetic_prompts(num_samples, seed))
    longest = max(map(len, prompts)) + max_tokens
    engine = EngineConfig(
        model=str(model),
        engine_args={
            "enforce_eager": True,
            "dtype": dtype,
            "max_model_len": longest,
            "max_num_seqs": 64,
        },
    )
    console = Console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("starting", total=None)
        agreement = warm_up_drafter(
            engine,
            prompts,
            out,
            max_tokens=max_tokens,
            temperature=temperature,
            num_engines=engines,
            settings=WarmupSettings(draft_vocab_size=draft_vocab, epochs=epochs, lr=lr, seed=seed),
            dtype=dtype,
            on_stage=lambda text: progress.update(bar, description=text),
            on_step=lambda step, total, loss, a: progress.update(
                bar,
                completed=step,
                total=total,
                description=f"training, loss {loss:.2f}, agreement {a[0]:.0%}",
            ),
        )
    positions = ", ".join(f"{value:.0%}" for value in agreement)
    console.print(f"[green]wrote[/] {out}; agreement with the policy by position: {positions}")
