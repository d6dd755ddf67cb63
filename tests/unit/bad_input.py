"""Inputs of every command that a seed spoils: values, files, folders. `KINDS` lists them."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from damage import copied, harm_bytes, harm_file, keys, overrides, strange, written
from made_up import made_up_folder

from tlt.config.load import load_config
from tlt.config.train import TrainConfig
from tlt.drafter.checkpoint import save_drafter
from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.eagle3.model import Eagle3Drafter
from tlt.models import tiny
from tlt.simulate.scenario import ScenarioConfig
from tlt.train.folder import RunFolder

ARMS = (
    *(("off", 2.0, 16, 960, 0), ("off", 2.1, 4, 240, 0), ("ngram:2", 2.3, 8, 480, 100)),
    *(("eagle3:3", 2.4, 8, 480, 200), ("eagle3:3", 2.5, 2, 120, 50), ("off", 2.7, 1, 60, 0)),
)
SHORT = [
    *("num_steps=2", "workload.prompts_per_step=4", "workload.group_size=4"),
    *("cluster.num_engines=2", "modes=['off', 'tlt']"),
]
"""A scenario that takes little time."""
INIT = ["--hardware", "cpu", "--steps", "2"]
EVAL = ["--problems", "2", "--samples", "1", "--max-tokens", "8", "--json"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A command line, and what a refusal of it must name."""

    arguments: list[str]
    names: tuple[str, ...]
    must_fail: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """Sound inputs, to be spoilt."""

    model: Path
    drafter: Path
    run: Path
    """Folder of a run that can be reported, calibrated from, watched and resumed."""
    calibration: Path
    tree: dict[str, Any]
    """Settings of a run that would work."""

    def settings(self, folder: Path, **changes: Any) -> Path:
        """Write the settings of a run below this folder, and return their file."""
        tree = {**self.tree, "run": {"out": str(folder / "out"), "num_steps": 2}, **changes}
        path = folder / "run.toml"
        path.write_text(tomli_w.dumps(tree))
        return path

    def table(self, folder: Path, suffix: str) -> Path:
        """Write a table of problems."""
        rows = [{"question": f"{n} + 0?", "answer": n} for n in range(20)]
        path = folder / f"table{suffix}"
        if suffix == ".csv":
            lines = ["question,answer", *(f"{row['question']},{row['answer']}" for row in rows)]
        else:
            lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n")
        return path

    def ended(self, folder: Path) -> Path:
        """Write a run that has ended, and so has a policy."""
        run = folder / "ended"
        run.mkdir()
        shutil.copy(self.settings(folder), run / "config.toml")
        copied(self.model, run / "policy")
        return run

    def sound(self, folder: Path) -> Iterator[list[str]]:
        """Yield command lines that work."""
        run = copied(self.run, folder / "run")
        refresh(run)
        yield ["train", str(self.settings(folder)), "--check"]
        yield ["train", str(resumed(run)), "--check", "--resume"]
        yield ["simulate", *SHORT, "--json"]
        yield ["simulate", *SHORT, f"cluster.calibration={self.calibration}", "--json"]
        yield ["simulate", *SHORT, f"workload.trace={run / 'lengths.jsonl'}", "--json"]
        drafter = str(self.drafter)
        yield ["train", str(self.settings(folder, engine={"drafter": drafter})), "--check"]
        out = str(folder / "exported")
        yield ["drafter", "export", drafter, "--model", str(self.model), "--out", out]
        yield from (command(run, folder) for command in RUN_COMMANDS)
        model, data = str(self.model), str(self.table(folder, ".csv"))
        yield ["data", "jsonl", data, "--out", str(folder / "made" / "rows.jsonl")]
        rows = str(folder / "made" / "rows.jsonl")
        yield ["init", "--model", model, "--data", rows, *INIT, "--out", str(folder / "i.toml")]
        yield ["eval", model, "--task", rows, *EVAL]
        yield ["eval", str(self.ended(folder)), *EVAL]


def sound_world(folder: Path) -> World:
    """Make the sound inputs in this folder."""
    model = tiny.make(folder / "tiny", hidden_size=64, num_layers=3)
    tree = {
        "policy": {"model": str(model), "dtype": "float32"},
        "task": {"name": "gcd", "sizes": {"median": 2, "p95": 2, "longest": 3}},
        "reward": {"function": "exact"},
        "sampling": {"prompts_per_step": 4, "group_size": 2, "max_tokens": 16},
        "learner": {"lr": 1e-6},
    }
    run = made_up_folder(
        folder / "run",
        arms=ARMS,
        time__rollout_s=20.0,
        learner__tokens=800.0,
        prompt__mean_tokens=50.0,
        harvest__used_s=1.0,
    )
    drafter = made_drafter(model, folder / "drafter")
    world = World(model, drafter, run, folder / "calibration.json", tree)
    (run / "config.toml").unlink()
    config = load_config(TrainConfig, world.settings(folder))
    RunFolder(run).open(config, {}, "tlt train")
    (run / "inputs.json").write_text("{}")
    (run / "summary.json").write_text("{}")
    from tlt.report.view import look_at
    from tlt.simulate.calibrate import calibrate

    calibrate([look_at(run)]).save(world.calibration)
    return world


def made_drafter(model: Path, folder: Path) -> Path:
    """Write an untrained drafter of a model."""
    from transformers import AutoConfig

    config = Eagle3Config.for_target(AutoConfig.from_pretrained(model))
    return save_drafter(Eagle3Drafter(config), folder)


def resumed(run: Path) -> Path:
    """Return the settings to resume a copy of the sound run with."""
    tree = tomllib.loads((run / "config.toml").read_text())
    tree["run"]["out"] = str(run)
    path = run.parent / "resumed.toml"
    path.write_text(tomli_w.dumps(tree))
    shutil.copy(path, run / "config.toml")
    return path


def refresh(run: Path) -> None:
    """Make the run look as if it were under way, as `tlt watch` wants it."""
    workers = {"engine-0": {"state": "generating", "running": 8}}
    now = {
        **{"at_s": time.time() + 3600, "num_steps": 4, "what": "step 2: generating"},
        **{"done": 3.0, "total": 16.0, "since_s": time.time(), "remaining_s": 7.5},
        **{"workers": workers},
        "record": json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]),
    }
    (run / "live.json").write_text(json.dumps(now))


RUN_COMMANDS: tuple[Callable[[Path, Path], list[str]], ...] = (
    lambda run, folder: ["report", str(run), "--json"],
    lambda run, folder: ["report", str(run), str(run), "--out", str(folder / "page.html")],
    lambda run, folder: ["simulate", "calibrate", str(run), "--out", str(folder / "made.json")],
    lambda run, folder: ["doctor", "--run", str(run), "--json"],
    lambda run, folder: ["watch", str(run), "--once"],
    lambda run, folder: [
        *("simulate", "num_steps=2", "--from-run", str(run), "--json", "--out", str(folder / "s")),
    ],
)


# --- values ---------------------------------------------------------------------------------------


def values(draw: random.Random, world: World, folder: Path) -> Attempt:
    """Give strange values to the settings of a run or of a scenario."""
    of_run = draw.random() < 0.5
    chosen, wrong = overrides(draw, TrainConfig if of_run else ScenarioConfig)
    if of_run:
        arguments = ["train", str(world.settings(folder)), "--check", *chosen]
    else:
        arguments = ["simulate", *SHORT, *chosen, "--json"]
    return Attempt(arguments, keys(chosen), wrong)


def odd_overrides(draw: random.Random, world: World, folder: Path) -> Attempt:
    text = draw.choice(
        (
            *("=", "a", "a=", "=1", ".=1", "a..b=1", "run=1", "run.out.x=1", "learner.lr=1\nb=2"),
            *("learner.lr=" + "[" * 5000, "learner.lr=" + "9" * 5000, "learner.lr=1e999"),
            *("a." * 2000 + "b=1", "learner.lr=2024-13-45", "learner.lr='", 'run.out="\\u0000"'),
            *(f"run.out={'n' * 300}", "run.out=a\0b", "task.path=a\0b", "policy.model=a\0b"),
        )
    )
    if draw.random() < 0.3:
        sweep = draw.choice((text, "cluster.num_engines=", "num_steps=1,x", "seed=-1,1", "=,"))
        arguments = ["simulate", *SHORT, "--sweep", sweep, "--json"]
        return Attempt(arguments, ("--sweep", *re.split("[.=]", sweep)[:1]))
    path = str(world.settings(folder))
    names = ("override", *text.partition("=")[0].split(".")[:2])
    return Attempt(["train", path, "--check", text], names)


def engine(draw: random.Random, world: World, folder: Path) -> Attempt:
    """Spoil the arguments of vLLM or the strategy."""
    args = (
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"),
        *("data_parallel_size", "speculative_config", "gpu_memory_utilization", "dtype"),
        *("logprobs_mode", "async_scheduling", "logits_processors", "no_such_argument", "seed"),
        "compilation_config",
    )
    kinds = ("off", "fixed", "by_batch_size", "random", "adaptive", "beg_mab", "often")
    name = draw.choice(args)
    chosen = [f"engine.engine_args.{name}={written(strange(draw))}"]
    if draw.random() < 0.5:
        name = "strategy"
        chosen = [f"engine.strategy.kind={draw.choice(kinds)}"]
        for key in draw.sample(("drafter", "num_draft_tokens", "arms", "schedule", "epsilon"), 2):
            chosen.append(f"engine.strategy.{key}={written(strange(draw))}")
        chosen += draw.choice(([], ["engine.num_gpus=1", "learner.num_gpus=1"]))
    arguments = ["train", str(world.settings(folder)), "--check", *chosen]
    return Attempt(arguments, (name, "strategy", "engine"), name == "no_such_argument")


# --- files ----------------------------------------------------------------------------------------


def config_file(draw: random.Random, world: World, folder: Path) -> Attempt:
    path = world.settings(folder)
    harm_file(draw, path)
    sections = tuple(TrainConfig.model_fields)
    return Attempt(["train", str(path), "--check"], (path.name, *sections))


def scenario_files(draw: random.Random, world: World, folder: Path) -> Attempt:
    """Spoil a scenario, a calibration or a trace."""
    scenario = folder / "given.toml"
    scenario.write_text("[cluster]\nnum_engines = 2\n\n[workload.lengths]\nmedian = 50\n")
    kinds = {scenario: "", world.calibration: "cluster.calibration="}
    kinds[world.run / "lengths.jsonl"] = "workload.trace="
    source = draw.choice(list(kinds))
    path = Path(shutil.copy(source, folder / f"copy{source.suffix}"))
    harm_file(draw, path)
    arguments = (
        [f"{kinds[source]}{path}", *SHORT]
        if source == scenario
        else [*SHORT, f"{kinds[source]}{path}"]
    )
    return Attempt(["simulate", *arguments, "--json"], (path.name, "cluster", "workload"))


def model_folder(draw: random.Random, world: World, folder: Path) -> Attempt:
    model = copied(world.model, folder / "model")
    path = draw.choice(sorted(model.iterdir()))
    if path.name == "chat_template.jinja" and draw.random() < 0.7:
        path.write_text(draw.choice(TEMPLATES))
    else:
        harm_file(draw, path)
    settings = world.settings(folder, policy={"model": str(model), "dtype": "float32"})
    return Attempt(["train", str(settings), "--check"], ("policy.model",))


TEMPLATES = (
    *("{{ raise_exception('no') }}", "{% for m in messages %}", "{{ messages.nothing.at.all }}"),
    *("", "{% for i in range(999999999) %}x{% endfor %}", "{{ 'x' * 100000 }}"),
    *("{{ messages | no_such_filter }}", "{% include 'x' %}", "{{ ''.__class__.__mro__ }}"),
)


def data_file(draw: random.Random, world: World, folder: Path) -> Attempt:
    path = folder / draw.choice(("data.jsonl", "data.parquet"))
    cells = (None, True, -1, 2.5, math.nan, "", " ", [1], {"a": 1}, b"\xff")
    row = {"question": "1 + 0?", "answer": 1}
    if path.suffix == ".jsonl":
        path.write_text((json.dumps(row) + "\n") * 20)
    else:
        import pyarrow
        import pyarrow.parquet

        if draw.random() < 0.4:
            row = {"question": draw.choice(cells), "answer": draw.choice(cells)}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 20), path)
    harm_file(draw, path)
    settings = world.settings(folder, task={"path": str(path)})
    return Attempt(["train", str(settings), "--check"], (path.name, "task.path"))


def reward_module(draw: random.Random, world: World, folder: Path) -> Attempt:
    name = f"fuzzed_{draw.randrange(10**9)}"
    body = draw.choice(
        (
            *("raise SystemExit", "class Odd(BaseException): pass\nraise Odd", "def score("),
            *("score = 3", "", "import no_such_module", "score = lambda problem, text: 1"),
            *("\0", "score = type('X', (), {'__call__': 1})()"),
        )
    )
    Path.cwd().joinpath(f"{name}.py").write_text(body)
    function = draw.choice(
        (*(f"{name}:score",) * 3, f"{name}:", f"{name}:score.x", ".:x", "a..b:c")
    )
    path = world.settings(folder, reward={"function": function})
    return Attempt(["train", str(path), "--check"], ("reward.function",))


def run_folder(draw: random.Random, world: World, folder: Path) -> Attempt:
    run = copied(world.run, folder / draw.choice(("run", "run", "r[/]un", 'r"un', "r un")))
    refresh(run)
    files = ("metrics.jsonl", "timeline.json", "config.toml", "lengths.jsonl", "live.json")
    names = tuple(draw.sample(files, draw.choice((1, 1, 1, 2))))
    for name in names:
        harm_file(draw, run / name)
    return Attempt(draw.choice(RUN_COMMANDS)(run, folder), (*files, run.name, "workload"))


def resumed_run(draw: random.Random, world: World, folder: Path) -> Attempt:
    run = copied(world.run, folder / "run")
    settings = resumed(run)
    path = run / draw.choice(("config.toml", "config.toml", "inputs.json", "versions.json"))
    harm_file(draw, path)
    return Attempt(
        ["train", str(settings), "--check", "--resume"], ("run.out", path.name, str(run))
    )


def odd_paths(draw: random.Random, world: World, folder: Path) -> Attempt:
    """Name a place that is no run, no scenario, no model."""
    made = folder / "file"
    made.write_bytes(harm_bytes(draw, b"text"))
    text = draw.choice(
        (str(made), str(folder), "nowhere", "n" * 300, "/proc/self/mem", "", "a/" * 3000, "[/x]")
    )
    path = Path(text)
    arguments = draw.choice(
        (
            *(command(path, folder) for command in RUN_COMMANDS),
            ["train", text, "--check"],
            ["simulate", text, "--json"],
            ["report", str(world.run), "--out", text],
            ["simulate", "calibrate", str(world.run), "--out", text],
            ["drafter", "export", text, "--model", str(world.model), "--out", str(folder / "d")],
            ["eval", text, "--task", "gcd", *EVAL],
            ["eval", str(world.model), "--task", f"{text}.jsonl", *EVAL],
            ["init", "--model", text, "--data", "gcd", *INIT, "--out", str(folder / "i.toml")],
            ["data", "jsonl", text, "--out", str(folder / "rows.jsonl")],
            ["demo", "--out", str(made)],
        )
    )
    return Attempt(arguments, (text[:40] or ".", path.name, "file", "config.toml"))


def starters(draw: random.Random, world: World, folder: Path) -> Attempt:
    """Spoil what `tlt init`, `tlt data` and `tlt eval` are given."""
    odd = written(strange(draw)).replace("\0", "")
    model, out = str(world.model), str(folder / draw.choice(("i.toml", "i.toml", "i", "é.toml")))
    hardware = draw.choice(("cpu", "here", "8x80", "9999x999x9999", "1x1", "0x0", odd))
    table = world.table(folder, draw.choice((".csv", ".jsonl")))
    harm_file(draw, table)
    rows = str(folder / "rows.jsonl")
    arguments = draw.choice(
        (
            ["init", "--model", model, "--data", "gcd", "--hardware", hardware, "--out", out],
            ["init", "--model", model, "--data", odd, *INIT, "--out", out],
            ["init", "--model", model, "--data", str(table), *INIT, "--out", out],
            ["data", "jsonl", str(table), "--out", rows],
            ["data", "jsonl", str(table), "--question", odd, "--out", rows],
            ["eval", model, "--task", str(table), *EVAL],
            ["eval", model, "--task", "gcd", "--parameter", f"max_value={odd}", *EVAL],
            ["eval", model, "--task", "gcd", "--reward", odd, *EVAL],
        )
    )
    options = [each for each in arguments if each.startswith("--")]
    names = (*options, *(each.removeprefix("--") for each in options), table.name, "host", odd[:40])
    return Attempt(arguments, names)


def ended_run(draw: random.Random, world: World, folder: Path) -> Attempt:
    """Spoil a run that `tlt eval` measures."""
    run = world.ended(folder)
    policy = sorted(path for path in (run / "policy").iterdir() if path.suffix == ".json")
    path = draw.choice((run / "config.toml", run / "config.toml", *policy))
    harm_file(draw, path)
    names = ("config.toml", "RUN_OR_MODEL", "ended", *TrainConfig.model_fields, "--")
    return Attempt(["eval", str(run), *EVAL], names)


def drafter_folder(draw: random.Random, world: World, folder: Path) -> Attempt:
    """Spoil a drafter, for a run and for its export."""
    drafter = copied(world.drafter, folder / "drafter")
    path = draw.choice(sorted(drafter.iterdir()))
    harm_file(draw, path)
    if draw.random() < 0.5:
        settings = world.settings(folder, engine={"drafter": str(drafter)})
        return Attempt(["train", str(settings), "--check"], ("engine.drafter",))
    out = str(folder / "exported")
    arguments = ["drafter", "export", str(drafter), "--model", str(world.model), "--out", out]
    return Attempt(arguments, (str(drafter),))


OPTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("models", "sft", "--out", "out"): (
        *("--lr", "--steps", "--num-problems", "--row-tokens", "--sizes"),
    ),
    ("drafter", "train", "--out", "out"): (
        *("--num-samples", "--max-tokens", "--temperature", "--draft-tokens", "--draft-vocab"),
        *("--lr", "--row-tokens", "--engines", "--gpus", "--seed", "--num-held-out"),
    ),
}
"""Options that take numbers or files, by command."""


def options(draw: random.Random, world: World, folder: Path) -> Attempt:
    """Give an option a value that it cannot have; were it taken, `--model` would be refused."""
    command = draw.choice(sorted(OPTIONS))
    option = draw.choice(OPTIONS[command])
    value = draw.choice(("nan", "inf", "-inf", "-1", "1e308", str(10**30), "x", "", "1,2", "[]"))
    arguments = [*command, "--model", "nowhere", option, value]
    names = (option, option.removeprefix("--"), value or ".")
    return Attempt(arguments, names, must_fail=True)


KINDS: dict[str, tuple[Callable[[random.Random, World, Path], Attempt], float]] = {
    "values": (values, 0.25),
    "odd_overrides": (odd_overrides, 0.05),
    "engine": (engine, 0.05),
    "config_file": (config_file, 0.05),
    "scenario_files": (scenario_files, 0.08),
    "model_folder": (model_folder, 0.08),
    "drafter_folder": (drafter_folder, 0.04),
    "options": (options, 0.04),
    "data_file": (data_file, 0.06),
    "reward_module": (reward_module, 0.04),
    "run_folder": (run_folder, 0.14),
    "resumed_run": (resumed_run, 0.04),
    "odd_paths": (odd_paths, 0.06),
    "starters": (starters, 0.06),
    "ended_run": (ended_run, 0.04),
}
"""Every kind of input, and its share of all inputs."""
