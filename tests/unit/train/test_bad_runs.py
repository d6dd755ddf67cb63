"""Runs that cannot work are refused before any engine starts.

Every message names the key or file at fault and a way out. The checks are those of
`tlt train --check`.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

pytest.importorskip("torch")
pytest.importorskip("reasoning_gym")

from tlt.config.load import load_config
from tlt.config.train import MetricsConfig, TrainConfig, resolve_defaults
from tlt.errors import ConfigError
from tlt.hardware import Machine
from tlt.models import tiny
from tlt.observe.sinks import open_sinks
from tlt.train import preflight
from tlt.train.folder import RunFolder
from tlt.train.preflight import prepare

ROW = {"question": "2 + 2?", "answer": "4"}


@dataclass
class Attempt:
    """A run that would work, until a case spoils it."""

    folder: Path
    """Folder of the attempt, in which it is started."""
    tree: dict[str, dict[str, Any]]
    overrides: list[str] = field(default_factory=list)
    resume: bool = False

    @property
    def path(self) -> Path:
        return self.folder / "run.toml"

    @property
    def model(self) -> Path:
        return Path(self.tree["policy"]["model"])

    def check(self) -> None:
        """Check the run as `tlt train --check` does."""
        config = load_config(TrainConfig, self.path, self.overrides)
        RunFolder(Path(config.run.out)).check(config, self.resume)
        prepare(config)

    def own_model(self) -> Path:
        """Return a copy of the model, to be broken."""
        copy = self.folder / "model"
        shutil.copytree(self.model, copy)
        self.overrides.append(f"policy.model={copy}")
        return copy


Spoil = Callable[[Attempt], None]


def settings(*overrides: str) -> Spoil:
    """Override settings."""
    return lambda attempt: attempt.overrides.extend(overrides)


def run_toml(change: Callable[[str], str | bytes | None]) -> Spoil:
    """Change the TOML file, or remove it."""

    def spoil(attempt: Attempt) -> None:
        text = change(attempt.path.read_text())
        if text is None:
            attempt.path.unlink()
        else:
            attempt.path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return spoil


def model_file(name: str, change: Callable[[bytes], bytes | None]) -> Spoil:
    """Change a file of the model folder, or remove it."""

    def spoil(attempt: Attempt) -> None:
        path = attempt.own_model() / name
        content = change(path.read_bytes() if path.exists() else b"")
        path.unlink() if content is None else path.write_bytes(content)

    return spoil


def template(text: bytes) -> Spoil:
    """Give the tokenizer another chat template."""
    return model_file("chat_template.jinja", lambda b: text)


def model_config(**changes: Any) -> Spoil:
    return model_file("config.json", lambda b: json.dumps(json.loads(b) | changes).encode())


def drafter(config: bytes | None, weights: bool = True) -> Spoil:
    """Name a drafter folder with this config.json."""

    def spoil(attempt: Attempt) -> None:
        folder = attempt.folder / "drafter"
        folder.mkdir()
        if config is not None:
            (folder / "config.json").write_bytes(config)
        if weights:
            (folder / "model.safetensors").write_bytes(b"")
        attempt.overrides.append(f"engine.drafter={folder}")

    return spoil


def data(content: bytes | None, *overrides: str, name: str = "data.jsonl") -> Spoil:
    """Train on a file with this content, or on a missing one."""

    def spoil(attempt: Attempt) -> None:
        if content is not None:
            (attempt.folder / name).write_bytes(content)
        attempt.tree["task"] = {"path": str(attempt.folder / name)}
        attempt.path.write_text(tomli_w.dumps(attempt.tree))
        attempt.overrides += ["reward.function=exact", *overrides]

    return spoil


def reward(name: str, body: str, *overrides: str) -> Spoil:
    """Use a reward function of a module with this name."""

    def spoil(attempt: Attempt) -> None:
        code = f"import time\n\ndef score(problem, text):\n    {body}\n"
        (attempt.folder / f"{name}.py").write_text(code)
        attempt.overrides += [f"reward.function={name}:score", *overrides]

    return spoil


def reward_module(name: str, code: str) -> Spoil:
    """Use a reward function of a module with this code."""

    def spoil(attempt: Attempt) -> None:
        (attempt.folder / f"{name}.py").write_text(code)
        attempt.overrides.append(f"reward.function={name}:score")

    return spoil


def begun(*overrides: str, resume: bool, damage: str | None = None) -> Spoil:
    """Start from a folder that holds a run."""

    def spoil(attempt: Attempt) -> None:
        config = load_config(TrainConfig, attempt.path)
        out = RunFolder(Path(config.run.out))
        out.open(config, {}, "tlt train")
        if damage is not None:
            (out.path / "config.toml").write_text(damage)
        attempt.resume = resume
        attempt.overrides += overrides

    return spoil


def no_run_to_resume(attempt: Attempt) -> None:
    attempt.resume = True


def out_is_a_file(attempt: Attempt) -> None:
    Path(attempt.tree["run"]["out"]).write_text("")


def out_below_a_file(attempt: Attempt) -> None:
    attempt.overrides.append(f"run.out={attempt.path}/run")


def strategy_spec(spec: str) -> Spoil:
    return settings(f"engine.strategy={spec}")


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


TWENTY = lines(*[{"question": f"{n} + 0?", "answer": n} for n in range(20)])
GPU = ("engine.num_gpus=2", "pool.num_engines=4")
NGRAM = '{kind = "fixed", drafter = "ngram", num_draft_tokens = 2}'

# name, how to make it wrong, what the message says of the key or file, and of the way out
WRONG: list[tuple[str, Spoil, str, str]] = [
    # the file and its overrides
    ("no config file", run_toml(lambda t: None), r"run\.toml does not exist", r"tlt init"),
    (
        "a TOML mistake",
        run_toml(lambda t: t + "\nlr = = 3\n"),
        r"run\.toml is not valid TOML: .*line \d+",
        r"look like num_steps = 100",
    ),
    ("not UTF-8", run_toml(lambda t: b"# \xe4\n"), r"run\.toml is not UTF-8", r"save it as UTF-8"),
    ("an empty config", run_toml(lambda t: ""), r"\bpolicy is missing", r"\[policy\] with model ="),
    (
        "an override without a value",
        settings("learner.lr"),
        r"override 'learner\.lr'",
        r"e\.g\. learner\.lr=1e-6",
    ),
    (
        "an override below a value",
        settings("learner.lr.max=3"),
        r"override 'learner\.lr\.max=3': lr is a value",
        r"set lr itself",
    ),
    ("an unknown key", settings("learner.lrr=1e-6"), r"learner\.lrr is not", r"did you mean lr\?"),
    (
        "an unknown section",
        settings("leaner.lr=1e-6"),
        r"leaner is not a setting",
        r"did you mean learner\?",
    ),
    ("a key nothing is like", settings("run.zzz=1"), r"run\.zzz is not", r"known here: out, num"),
    (
        "a value for a section",
        settings("learner=3"),
        r"learner is a section",
        r"e\.g\. \[learner\]",
    ),
    (
        "a missing key",
        run_toml(lambda t: re.sub(r"num_steps = \d+\n", "", t)),
        r"run\.num_steps is missing",
        r"e\.g\. 100",
    ),
    # values
    (
        "a negative length",
        settings("sampling.max_tokens=-5"),
        r"sampling\.max_tokens = -5",
        r"greater than or equal to 1; e\.g\. 1024",
    ),
    (
        "no steps",
        settings("run.num_steps=0"),
        r"run\.num_steps = 0",
        r"greater than or equal to 1; e\.g\. 100",
    ),
    (
        "empty groups",
        settings("sampling.group_size=0"),
        r"sampling\.group_size = 0",
        r"greater than or equal to 2; e\.g\. 8",
    ),
    (
        "groups of one",
        settings("sampling.group_size=1"),
        r"sampling\.group_size = 1",
        r"greater than or equal to 2; e\.g\. 8",
    ),
    (
        "a text for a number",
        settings("learner.num_ranks=many"),
        r"learner\.num_ranks = 'many'",
        r"valid integer.*; e\.g\. 1",
    ),
    (
        "a number for a switch",
        settings("capture.enabled=7"),
        r"capture\.enabled = 7",
        r"boolean.*; e\.g\. false",
    ),
    (
        "a text for a table",
        settings("engine.strategy=off"),
        r"engine\.strategy = 'off'",
        r"e\.g\. \{ kind = 'off' \}",
    ),
    (
        "an unknown advantage",
        settings("algorithm.advantage=ppo"),
        r"algorithm\.advantage = 'ppo'",
        r"'grpo', 'dr_grpo' or 'rloo'",
    ),
    ("no learning rate", settings("learner.lr=0"), r"learner\.lr = 0", r"greater than 0; e\.g\. 1"),
    ("a negative one", settings("learner.lr=-1"), r"learner\.lr = -1", r"greater than 0; e\.g\. 1"),
    ("one that is none", settings("learner.lr=nan"), r"learner\.lr = nan", r"e\.g\. 1e-06"),
    (
        "a clip below no probability",
        settings("algorithm.clip_low=1.5"),
        r"algorithm\.clip_low = 1\.5",
        r"less than 1; e\.g\. 0\.2",
    ),
    (
        "a clip of nothing",
        settings("algorithm.clip_high=0"),
        r"algorithm\.clip_high = 0",
        r"greater than 0; e\.g\. 0\.28",
    ),
    (
        "temperature 0",
        settings("sampling.temperature=0"),
        r"sampling\.temperature = 0",
        r"greater than 0; e\.g\. 1\.0",
    ),
    (
        "a port there is not",
        settings("metrics.prometheus_port=99999"),
        r"metrics\.prometheus_port = 99999",
        r"less than or equal to 65535",
    ),
    # the model
    (
        "no model folder",
        settings("policy.model=nowhere"),
        r"policy\.model = 'nowhere' holds no config\.json",
        r"tlt models",
    ),
    (
        "a model that is a file",
        lambda a: a.overrides.append(f"policy.model={a.path}"),
        r"policy\.model = .*run\.toml' holds no config\.json",
        r"tlt models",
    ),
    (
        "a model without weights",
        model_file("model.safetensors", lambda b: None),
        r"policy\.model = .*/model' holds no \*\.safetensors",
        r"save_pretrained",
    ),
    (
        "a model with a missing shard",
        model_file(
            "model.safetensors.index.json", lambda b: b'{"weight_map": {"x": "2.safetensors"}}'
        ),
        r"policy\.model = .*/model' holds no 2\.safetensors",
        r"download it again",
    ),
    (
        "a model with a broken config",
        model_file("config.json", lambda b: b[:40]),
        r"policy\.model: .*/config\.json is not JSON",
        r"tlt models",
    ),
    (
        "a model with an empty config",
        model_file("config.json", lambda b: b"[]"),
        r"policy\.model: .*/config\.json holds no settings",
        r"tlt models",
    ),
    (
        "a sliding window",
        model_config(sliding_window=64),
        r"policy\.model: llama attends in a sliding window",
        r"use a model with full attention",
    ),
    (
        "no tokenizer",
        model_file("tokenizer.json", lambda b: None),
        r"policy\.model .*/model has no tokenizer",
        r"save_pretrained",
    ),
    (
        "a tokenizer without a chat template",
        model_file("chat_template.jinja", lambda b: None),
        r"policy\.model .*/model: its tokenizer has no chat template",
        r"chat_template",
    ),
    (
        "a tokenizer of another model",
        model_config(vocab_size=50),
        r"policy\.model = .*/model': its tokenizer makes token \d+",
        r"save the model's own tokenizer",
    ),
    *(
        (
            f"a chat template that fails: {name}",
            template(text),
            r"policy\.model .*/model: its chat template .*" + says,
            r"put chat_template",
        )
        for name, text, says in (
            ("raises", b"{{ raise_exception('no system role') }}", "no system role"),
            ("a loop without end", b"{% for m in messages %}", "TemplateSyntaxError"),
            ("a division", b"{{ 1 / 0 }}", "ZeroDivisionError"),
            ("another key", b"{{ messages[3]['content'] }}", "UndefinedError"),
            ("nothing", b"{{ '' }}", "makes an empty prompt"),
        )
    ),
    (
        "a tokenizer with a damaged setting",
        model_file(
            "tokenizer_config.json",
            lambda b: json.dumps(json.loads(b) | {"model_max_length": "many"}).encode(),
        ),
        r"policy\.model .*/model: its chat template or tokenizer fails",
        r"put chat_template and tokenizer_config\.json right",
    ),
    (
        "a damaged tokenizer",
        model_file("tokenizer.json", lambda b: b[: len(b) // 2]),
        r"policy\.model .*/model has no tokenizer",
        r"save_pretrained",
    ),
    (
        "weights that were cut off",
        model_file("model.safetensors", lambda b: b[:-100]),
        r"policy\.model: .*/model\.safetensors is damaged \(\d+ bytes instead of \d+\)",
        r"download it again",
    ),
    (
        "weights that were cut off early",
        model_file("model.safetensors", lambda b: b[:40]),
        r"policy\.model: .*/model\.safetensors is damaged \(40 bytes are less",
        r"download it again",
    ),
    (
        "empty weights",
        model_file("model.safetensors", lambda b: b""),
        r"policy\.model: .*/model\.safetensors is damaged \(0 bytes are less",
        r"download it again",
    ),
    (
        "weights that are something else",
        model_file("model.safetensors", lambda b: b"\x04" + bytes(7) + b"text" + bytes(90)),
        r"policy\.model: .*/model\.safetensors is damaged \(it has no list",
        r"download it again",
    ),
    (
        "an index that lists nothing",
        model_file("model.safetensors.index.json", lambda b: b'{"weight_map": [1]}'),
        r"policy\.model: .*index\.json lists no files",
        r"download the model again",
    ),
    (
        "a model of no size",
        model_config(hidden_size="64"),
        r"policy\.model: .*/config\.json says hidden_size = '64', which is no size",
        r"tlt models",
    ),
    (
        "more heads than numbers",
        model_config(num_attention_heads=128),
        r"policy\.model: .*/config\.json says num_attention_heads = 128, more than",
        r"tlt models",
    ),
    (
        "a context too short",
        settings("engine.engine_args.max_model_len=80"),
        r"engine\.engine_args\.max_model_len = 80 .* sampling\.max_tokens",
        r"set it to \d+ or more, or lower",
    ),
    (
        "a context too short for drafts",
        settings("engine.engine_args.max_model_len=80", f"engine.strategy={NGRAM}"),
        r"engine\.engine_args\.max_model_len = 80 .* 3 for drafts",
        r"set it to \d+ or more, or lower",
    ),
    (
        "a context in words",
        settings('engine.engine_args.max_model_len="4k"'),
        r"engine: engine_args\.max_model_len = '4k' should be int",
        r"remove it",
    ),
    (
        "more tokens than the model takes",
        settings("sampling.max_tokens=5000"),
        r"policy\.model takes 4096 .*sampling\.max_tokens \(5000\)",
        r"lower sampling\.max_tokens to \d{4}\b",
    ),
    # the engine
    (
        "no drafter folder",
        settings("engine.drafter=nowhere"),
        r"engine\.drafter = 'nowhere' holds no config\.json",
        r"tlt drafter train",
    ),
    (
        "a drafter with a broken config",
        drafter(b"{"),
        r"engine\.drafter: .*config\.json is not JSON",
        r"tlt drafter train",
    ),
    (
        "a drafter without weights",
        drafter(b"{}", weights=False),
        r"engine\.drafter = .*/drafter' holds no \*\.safetensors",
        r"tlt drafter train",
    ),
    (
        "a drafter of another model",
        drafter(b'{"hidden_size": 128, "vocab_size": 260}'),
        r"engine\.drafter = .* of another model: hidden_size is 128",
        r"train one for this model",
    ),
    (
        "a drafter that was cut off",
        drafter(b'{"hidden_size": 64, "vocab_size": 260}'),
        r"engine\.drafter: .*model\.safetensors is damaged",
        r"tlt drafter train",
    ),
    (
        "an argument that vLLM does not have",
        settings("engine.engine_args.max_num_seq=8"),
        r"engine: engine_args\.max_num_seq is no argument of vLLM",
        r"did you mean max_num_seqs\?",
    ),
    (
        "an argument of another type",
        settings('engine.engine_args.enforce_eager="yes"'),
        r"engine: engine_args\.enforce_eager = 'yes' should be bool",
        r"remove it",
    ),
    (
        "an argument of no number",
        settings("engine.engine_args.gpu_memory_utilization=inf"),
        r"engine: engine_args\.gpu_memory_utilization = inf should be float",
        r"remove it",
    ),
    (
        "no workers at all",
        settings("engine.engine_args.tensor_parallel_size=0"),
        r"engine: engine_args\.tensor_parallel_size = 0 should be a number from 1",
        r"remove it",
    ),
    (
        "drafts longer than an engine verifies",
        strategy_spec('{kind = "fixed", drafter = "ngram", num_draft_tokens = 100000}'),
        r"engine: strategy drafts up to 100000 tokens",
        r"e\.g\. num_draft_tokens = 4",
    ),
    (
        "a strategy of no numbers",
        strategy_spec('{kind = "adaptive", margin = "x"}'),
        r"engine: strategy\.margin = 'x' should be a number",
        r"leave it out",
    ),
    (
        "eagle3 without a drafter",
        strategy_spec('{kind = "fixed", drafter = "eagle3", num_draft_tokens = 2}'),
        r"engine: strategy uses .*engine\.drafter is not set",
        r"name the folder",
    ),
    (
        "an unknown strategy",
        strategy_spec('{kind = "often"}'),
        r"engine: strategy\.kind",
        r"one of.*off",
    ),
    (
        "a strategy that lacks a key",
        strategy_spec('{kind = "fixed"}'),
        r"engine: strategy of kind 'fixed'",
        r"needs the key 'drafter'",
    ),
    (
        "a strategy that makes no sense",
        strategy_spec('{kind = "by_batch_size", drafter = "ngram", schedule = [4]}'),
        r"engine\.strategy = .*schedule",
        r"e\.g\. \{ kind = ",
    ),
    (
        "drafts longer than allowed",
        settings(f"engine.strategy={NGRAM}", "engine.max_draft_tokens=1"),
        r"engine\.max_draft_tokens = 1",
        r"set it to 2",
    ),
    (
        "a lossy speculative_config",
        settings('engine.engine_args.speculative_config={posterior_threshold=0.1, method="ngram"}'),
        r"engine_args\.speculative_config\.posterior_threshold",
        r"allowed are .*num_speculative_tokens",
    ),
    (
        "lossy acceptance",
        settings('engine.engine_args.speculative_config={rejection_sample_method="typical"}'),
        r"engine_args\.speculative_config\.rejection_sample_method",
        r"use 'standard'",
    ),
    (
        "another scheduler",
        settings("engine.engine_args.scheduler_cls=my.Scheduler"),
        r"engine_args\.scheduler_cls",
        r"remove it",
    ),
    (
        "two dtypes",
        settings("engine.engine_args.dtype=float16"),
        r"engine\.engine_args\.dtype = 'float16' is not policy\.dtype",
        r"remove it",
    ),
    (
        "probabilities of another temperature",
        settings("sampling.temperature=0.7", "engine.engine_args.logprobs_mode=raw_logprobs"),
        r"engine\.engine_args\.logprobs_mode = 'raw_logprobs'",
        r"remove it",
    ),
    # places
    (
        "more engines than cores",
        settings("pool.num_engines=1000"),
        r"pool\.num_engines x engine\.num_cores \(1000\)",
        r"e\.g\. pool\.num_engines = \d+",
    ),
    (
        "more engines and ranks than cores",
        settings("placement.kind=separate", "learner.num_ranks=1000"),
        r"learner\.num_ranks x num_cores \(1000\)",
        r"e\.g\. pool\.num_engines = \d+",
    ),
    (
        "more ranks than cores",
        settings("learner.num_ranks=1000"),
        r"learner\.num_ranks x learner\.num_cores = 1000",
        r"e\.g\. learner\.num_ranks = 1",
    ),
    (
        "more updates than prompts",
        settings("learner.updates_per_step=5"),
        r"learner\.updates_per_step = 5 .* sampling\.prompts_per_step = 4",
        r"e\.g\. learner\.updates_per_step = 1",
    ),
    (
        "colocated ranks without their GPUs",
        settings(*GPU, "learner.num_gpus=1", "learner.num_ranks=2"),
        r"learner\.num_ranks = 2",
        r"set it to 8, or placement\.kind = 'separate'",
    ),
    (
        "colocated, but on different devices",
        settings(*GPU, "learner.num_ranks=8"),
        r"learner\.num_gpus = 0 with engine\.num_gpus = 2",
        r"set learner\.num_gpus = 1",
    ),
    (
        "colocated with CPU engines, on a GPU",
        settings("learner.num_gpus=1"),
        r"learner\.num_gpus = 1 with engine\.num_gpus = 0",
        r"set learner\.num_gpus = 0",
    ),
    (
        "no capture folder",
        settings("capture.enabled=true", "capture.folder=nowhere"),
        r"capture\.folder = 'nowhere'",
        r"e\.g\. '/dev/shm'",
    ),
    (
        "a capture larger than memory",
        settings("capture.enabled=true", "capture.capacity_gib=1e6"),
        r"capture\.capacity_gib = 1e\+06",
        r"e\.g\. \d+\.\d\d",
    ),
    (
        "a capture by engines that compute no such states",
        settings("capture.enabled=true", "capture.by=engines"),
        r"capture\.by = 'engines' needs .* harvest",
        r"e\.g\. 'learner'",
    ),
    (
        "a capture of too few layers",
        settings("capture.enabled=true"),
        r"capture\.enabled: .* has 2 layers",
        r"set it to false",
    ),
    # tasks and data
    (
        "both a task and a file",
        settings("task.path=x.jsonl"),
        r"task\.name or task\.path must be set, both are",
        r"e\.g\. task\.name = 'chain_sum'",
    ),
    (
        "neither a task nor a file",
        run_toml(lambda t: re.sub(r"\[task\]\n(?s:.*?)\n\[", "[task]\n\n[", t)),
        r"task\.name or task\.path must be set, neither is",
        r"e\.g\. task\.name = 'chain_sum'",
    ),
    ("an unknown task", settings("task.name=gdc"), r"task\.name: .*'gdc'", r"e\.g\. .*\bgcd\b"),
    (
        "an unknown parameter",
        settings("task.parameters.max_valu=9"),
        r"task\.parameters: max_valu",
        r"e\.g\. max_value",
    ),
    (
        "a parameter the task cannot use",
        settings("task.parameters.min_value=-1"),
        r"task\.parameters: gcd cannot use",
        r"its defaults work",
    ),
    (
        "sizes of a task that has none",
        settings("task.name=basic_arithmetic", "task.sizes.median=2"),
        r"task\.sizes: basic_arithmetic has no size",
        r"leave it out",
    ),
    (
        "sizes out of order",
        settings("task.sizes.median=50"),
        r"task\.sizes: .*median <= p95",
        r"e\.g\. 60, 500, 1500",
    ),
    ("no data", data(None), r"task\.path: .*data\.jsonl does not exist", r"give a \.jsonl"),
    (
        "empty data",
        data(b"\n"),
        r"task\.path: .*data\.jsonl has no problems",
        r"one problem per row",
    ),
    (
        "data in Latin-1",
        data(TWENTY + b"\xe4\n"),
        r"data\.jsonl, line 21 is not UTF-8",
        r"as UTF-8",
    ),
    ("a broken line", data(TWENTY + b"{\n"), r"data\.jsonl, line 21 is not JSON", r'"question": '),
    (
        "a missing column",
        data(lines({"problem": "?", "answer": "4"})),
        r"data\.jsonl, line 1: no column 'question'",
        r"set task\.question_key to one of: problem, answer",
    ),
    (
        "an id twice",
        data(lines(ROW | {"id": 1}, ROW | {"id": 1}), "task.id_key=id"),
        r"data\.jsonl, line 2: id '1' is also that of line 1",
        r"leave out task\.id_key",
    ),
    (
        "data in another format",
        data(b"question,answer\n", name="data.csv"),
        r"task\.path: .*data\.csv ends in '\.csv'",
        r"give a \.jsonl or \.parquet",
    ),
    (
        "sizes of a file",
        data(TWENTY, "task.sizes.median=2"),
        r"task\.sizes is for tasks",
        r"leave it out",
    ),
    (
        "more prompts than problems",
        data(TWENTY, "sampling.prompts_per_step=21"),
        r"sampling\.prompts_per_step: 21 is more than the 20 problems of .*data\.jsonl",
        r"at most 20",
    ),
    (
        "nothing left to train on",
        data(TWENTY, "eval.every_steps=1", "eval.num_problems=20"),
        r"eval\.num_problems: .*data\.jsonl has 20 problems",
        r"e\.g\. 2",
    ),
    (
        "a number that no text can hold",
        data(b'{"question": "?", "answer": 1' + b"0" * 500 + b"}\n"),
        r"data\.jsonl, line 1: answer is 1000",
        r"not a text with content; e\.g\.",
    ),
    (
        "parquet that is none",
        data(b"PAR1" + bytes(100) + b"PAR1", name="data.parquet"),
        r"task\.path: cannot read .*data\.parquet as parquet",
        r"write it again, or as \.jsonl",
    ),
    (
        "a name no file can have",
        data(None, name="n" * 300 + ".jsonl"),
        r"task\.path: .*/n+\.jsonl cannot be read \(File name too long\)",
        r"give a \.jsonl",
    ),
    # rewards
    (
        "no reward module",
        settings("reward.function=no_such_module:score"),
        r"reward\.function: .*cannot import no_such_module",
        r"install it, or put it into",
    ),
    (
        "a reward module that ends the process",
        reward_module("bad_run_exits", "import sys\nsys.exit(0)\n"),
        r"reward\.function: 'bad_run_exits:score': cannot import bad_run_exits: SystemExit",
        r"install it, or put it into",
    ),
    (
        "too many reward workers",
        settings("reward.num_workers=100000"),
        r"reward\.num_workers = 100000 should be less than or equal to 1024",
        r"e\.g\. 1",
    ),
    (
        "no reward function",
        settings("reward.function=json:score"),
        r"reward\.function: .*json has no function score",
        r"it has: .*loads",
    ),
    (
        "a reward that is no name",
        settings("reward.function=fancy"),
        r"reward\.function: 'fancy'",
        r"e\.g\. my_rewards:score",
    ),
    (
        "gym rewards of a file",
        data(TWENTY, "reward.function=gym"),
        r"reward\.function: gym",
        r"e\.g\. math",
    ),
    (
        "a reward of nan",
        reward("bad_run_nan", "return float('nan')"),
        r"reward\.function = 'bad_run_nan:score' .*returned nan",
        r"must return a finite number, e\.g\. 1\.0",
    ),
    (
        "a reward in words",
        reward("bad_run_text", "return 'good'"),
        r"reward\.function = 'bad_run_text:score' .*returned 'good'",
        r"must return a finite number, e\.g\. 1\.0",
    ),
    (
        "a reward that raises",
        reward("bad_run_raises", "raise KeyError('gold')"),
        r"reward\.function = 'bad_run_raises:score' .*KeyError: 'gold'",
        r"must return a finite number, e\.g\. 1\.0",
    ),
    (
        "a reward that hangs",
        reward("bad_run_hangs", "time.sleep(60)", "reward.timeout_s=0.3"),
        r"reward\.function = 'bad_run_hangs:score' .*took more than 0\.3 s",
        r"within reward\.timeout_s = 0\.3",
    ),
    # the run's folder
    (
        "a run that is there",
        begun(resume=False),
        r"run\.out = .*/out' already holds a run",
        r"add --resume .*or choose another folder",
    ),
    (
        "nothing to resume",
        no_run_to_resume,
        r"run\.out = .*/out' holds no run",
        r"start without --resume",
    ),
    (
        "resumed with another setting",
        begun("learner.lr=0.5", resume=True),
        r"learner\.lr = 0\.5, but the run in .*/out was started with",
        r"1e-06; use that value, or start a new run\.out",
    ),
    (
        "resumed with other lengths",
        begun("debug.forced_lengths={median=2, p95=4, longest=8}", resume=True),
        r"debug\.forced_lengths\.longest = 8, but the run in .*/out was started with",
        r"use that value, or start a new run\.out",
    ),
    (
        "resumed from a damaged folder",
        begun(resume=True, damage="lr ="),
        r"out/config\.toml, .* is damaged",
        r"start a new run\.out",
    ),
    (
        "resumed from a folder of other settings",
        begun(resume=True, damage="tlt = 3"),
        r"algorithm\.advantage = 'grpo', but the run in .*/out was started with None",
        r"start a new run\.out",
    ),
    (
        "a name that is too long",
        settings(f"run.out={'n' * 300}"),
        r"run\.out = 'n+': nothing can be written .*File name too long",
        r"choose another folder",
    ),
    ("run.out is a file", out_is_a_file, r"run\.out = .*/out \(Not a dir", r"e\.g\. 'runs/first'"),
    ("run.out below a file", out_below_a_file, r"run\.out = .*/run\.toml \(Not", r"e\.g\. 'runs/"),
    (
        "run.out where nothing can be written",
        settings("run.out=/proc/tlt/run"),
        r"run\.out = '/proc/tlt/run': nothing can be written to /proc ",
        r"choose another folder",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, num_layers=2)


@pytest.fixture
def attempt(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # rewards add their folder
    tree: dict[str, dict[str, Any]] = {
        "run": {"out": str(tmp_path / "out"), "num_steps": 2},
        "policy": {"model": str(model), "dtype": "float32"},
        "task": {"name": "gcd", "sizes": {"median": 2, "p95": 2, "longest": 3}},
        "reward": {"function": "exact"},
        "sampling": {"prompts_per_step": 4, "group_size": 2, "max_tokens": 16},
        "learner": {"lr": 1e-6},
    }
    made = Attempt(tmp_path, tree)
    made.path.write_text(tomli_w.dumps(tree))
    return made


def test_the_run_that_is_spoilt_below_is_good(attempt: Attempt) -> None:
    attempt.check()


def test_a_folder_that_was_moved_can_be_resumed(attempt: Attempt) -> None:
    begun(resume=True)(attempt)
    out = Path(attempt.tree["run"]["out"])
    out.rename(out.with_name("moved"))
    attempt.overrides.append(f"run.out={out.with_name('moved')}")
    attempt.check()


def test_the_room_for_states_is_that_of_the_nodes(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's does not count where the GPUs are elsewhere."""
    many = (*GPU, "learner.num_gpus=1", "tlt.enabled=true", "capture.capacity_gib=1e6")
    config = resolve_defaults(load_config(TrainConfig, attempt.path, many))
    preflight._check_capture(config, {})
    here = Machine(num_gpus=8, gpu_bytes=None, host_bytes=None)
    monkeypatch.setattr(preflight, "this_machine", lambda: here)
    with pytest.raises(ConfigError, match=r"capture\.capacity_gib = 1e\+06 is more than"):
        preflight._check_capture(config, {})


def test_other_settings_for_debugging_may_change_on_resume(attempt: Attempt) -> None:
    begun("debug.core_group=other", "debug.publish_drafters=false", "debug.gate=x", resume=True)(
        attempt
    )
    attempt.check()


def test_cases_are_many_and_have_names_of_their_own() -> None:
    assert len({name for name, *_ in WRONG}) == len(WRONG) >= 30


@pytest.mark.parametrize(
    ("spoil", "key", "way_out"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_wrong_runs_are_refused(attempt: Attempt, spoil: Spoil, key: str, way_out: str) -> None:
    spoil(attempt)
    with pytest.raises(ConfigError) as refused:
        attempt.check()
    message = str(refused.value)
    assert re.search(f"{key}(?s:.*){way_out}", message), message
    assert not (attempt.folder / "out" / "metrics.jsonl").exists()


ENDLESS: list[tuple[str, Spoil, str, str]] = [
    (
        "a reward module",
        reward_module("bad_run_endless", "while True:\n    pass\n"),
        r"reward\.function: 'bad_run_endless:score': importing bad_run_endless takes more than 1 s",
        r"inside the function",
    ),
    (
        "a reward module that waits, and catches what ends it",
        reward_module(
            "bad_run_waits",
            "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)\n",
        ),
        r"reward\.function: 'bad_run_waits:score': importing bad_run_waits takes more than 1 s",
        r"inside the function",
    ),
    (
        "a task",
        settings(
            *("task={name='chain_sum'}", "task.parameters.min_terms=1000000000"),
            "task.parameters.max_terms=1000000000",
        ),
        r"task\.parameters: chain_sum with .*'min_terms': 1000000000.* makes no problem in 1 s",
        r"smaller values work",
    ),
    (
        "a chat template",
        template(b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        r"policy\.model .*/model: its chat template takes more than 1 s",
        r"put chat_template right",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "key", "way_out"), [case[1:] for case in ENDLESS], ids=[case[0] for case in ENDLESS]
)
def test_what_never_ends_is_refused_in_time(
    attempt: Attempt, spoil: Spoil, key: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("gym.PROBLEM_S", "rewards.START_UP_S", "chat.PROMPT_S"):
        monkeypatch.setattr(f"tlt.tasks.{limit}", 1.0)
    test_wrong_runs_are_refused(attempt, spoil, key, way_out)


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"metrics\.prometheus_port: .*:{port} .*; 0 takes a free port"
        with pytest.raises(ConfigError, match=message):
            open_sinks(MetricsConfig(prometheus_port=port), tmp_path, 0)


def tlt_check(attempt: Attempt, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `tlt train --check` in a process that prints the heavy libraries it imported."""
    code = (
        "import atexit, sys\n"
        "heavy = {'vllm', 'ray'}\n"
        "atexit.register(lambda: print('HEAVY', sorted(heavy & set(sys.modules))))\n"
        "from tlt.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "train", str(attempt.path), "--check", *overrides],
        cwd=attempt.folder,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )


def test_the_command_accepts_a_good_run_and_starts_nothing(attempt: Attempt) -> None:
    done = tlt_check(attempt)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ok .*run\.toml: 2 steps$", done.stdout, re.MULTILINE)
    assert "HEAVY []" in done.stdout
    assert not (attempt.folder / "out").exists()


def test_the_command_refuses_a_bad_run_in_one_line(attempt: Attempt) -> None:
    done = tlt_check(attempt, "policy.model=nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("error: policy.model = 'nowhere'")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "HEAVY []" in done.stdout
    assert not (attempt.folder / "out").exists()
