"""Settings for a model, data and hardware: the first that fit by the memory plan, as TOML.

`tlt init` writes them. The choice is a search: from long responses and large KV caches down to
small ones, on one GPU per engine and then on more, until `check_outline` accepts the run.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config.load import check
from tlt.config.train import TaskConfig, TrainConfig, resolve_defaults
from tlt.errors import ConfigError
from tlt.tasks.file import read_problems
from tlt.train.memory import GIB, Place
from tlt.train.preflight import PROMPT_TOKENS, check_outline

HARDWARE = re.compile(r"(?:(?P<nodes>\d{1,4})x)?(?P<gpus>\d{1,3})x(?P<gb>\d{1,4})(?:gb|gib)?")
GPU_TOKENS = (8192, 4096, 2048, 1024)
CPU_TOKENS = (1024, 512, 256)
"""Longest responses to try, in tokens."""
UTILIZATIONS = tuple(share / 100 for share in range(85, 25, -5))
"""Shares of a GPU for its engine to try."""
DRAFT_ROOM = 64
"""Tokens of an engine's context beyond prompt and response, for drafts."""
MAX_CPU_ENGINES = 8
BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
COLUMNS = {
    "question": ("question", "problem", "prompt", "input"),
    "answer": ("answer", "final_answer", "target", "output"),
}
"""Names of the columns of a file, the most usual first."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run gets: CPU cores of this machine, or nodes with GPUs."""

    cores: int = 0
    nodes: int = 1
    gpus: int = 0
    """GPUs of a node; 0 for a run on CPU cores."""
    gpu_gib: float | None = None
    host_gib: float | None = None

    def __str__(self) -> str:
        if not self.gpus:
            return f"{self.cores} CPU core{'s' if self.cores > 1 else ''}"
        nodes = f"{self.nodes} nodes with " if self.nodes > 1 else ""
        size = f" of {self.gpu_gib:g} GiB" if self.gpu_gib else ""
        return f"{nodes}{self.gpus} GPU{'s' if self.gpus > 1 else ''}{size}"


def parse_hardware(text: str, here: Hardware, cores: int) -> Hardware:
    """Return the hardware that a user names: `here`, `cpu`, or GPUs as 8x80 or 4x8x80."""
    said = text.strip().lower()
    if said == "here":
        return here
    if said == "cpu":
        return Hardware(cores=cores)
    found = HARDWARE.fullmatch(said)
    if found is None or not all(int(number) for number in found.groups(default="1")):
        raise ConfigError(
            f"--hardware {text!r} is not here, cpu, or GPUs by their memory in GB; e.g. 8x80, or "
            "4x8x80 for four nodes"
        )
    sold = int(found["gb"])  # a GPU that is sold as 80 GB has 79 GiB
    nodes = int(found["nodes"] or 1)
    return Hardware(nodes=nodes, gpus=int(found["gpus"]), gpu_gib=float(sold - max(1, sold // 50)))


# --- the task -------------------------------------------------------------------------------------


def task_of(data: str, option: str = "--data") -> dict[str, Any]:
    """Return the `task` and `reward` sections for a file of problems or a task's name.

    Errors name the option that gave it.
    """
    path = Path(data)
    if path.suffix.lower() not in (".jsonl", ".parquet"):
        if path.exists() or "/" in data:
            raise ConfigError(
                f"{option} {data} is no file of problems; give a .jsonl or .parquet file, which "
                "`tlt data` writes, or the name of a reasoning-gym task such as gcd"
            )
        return {"task": {"name": data}, "reward": {"function": "exact"}}
    task: dict[str, Any] = {"path": data}
    names = columns(path)
    for key, usual in COLUMNS.items():
        name = next((each for each in usual if each in names), None)
        if name is None and names:
            raise ConfigError(
                f"{option} {data} has no column of the {key}, only {', '.join(sorted(names))}; "
                f"rename one to {key!r}, or run `tlt data jsonl {data} --{key} COLUMN`"
            )
        task[f"{key}_key"] = name or key
    return {"task": task | {"instruction": BOXED}, "reward": {"function": "math"}}


def columns(path: Path) -> list[str]:
    """Return the columns of a file's first row; empty if the check of the run must say why not."""
    if path.suffix.lower() == ".parquet":
        try:
            from pyarrow import parquet

            return [str(name) for name in parquet.ParquetFile(path).schema_arrow.names]
        except Exception:  # the file's own check says what is wrong with it
            return []
    try:
        with path.open(encoding="utf-8-sig") as file:
            found = json.loads(next((line for line in file if line.strip()), "{}"))
    except (OSError, ValueError, RecursionError):
        return []
    return list(found) if isinstance(found, dict) else []


# --- the choice -----------------------------------------------------------------------------------


def choose(
    model: str, folder: Path, task: Mapping[str, Any], hardware: Hardware, out: str, num_steps: int
) -> tuple[dict[str, Any], list[Place]]:
    """Return settings that fit and their memory plan; refuse what fits nowhere.

    `folder` holds the config.json of the model, whose name the settings keep.
    """
    path = task["task"].get("path")
    num_problems = len(read_problems(TaskConfig(**task["task"]))) if path else None
    context = json.loads((folder / "config.json").read_bytes()).get("max_position_embeddings")
    error: ConfigError | None = None
    with tempfile.TemporaryDirectory(prefix="tlt-init-") as outline:
        shutil.copy(folder / "config.json", outline)
        for tree in _candidates(hardware, context):
            if num_problems is not None:
                sampling = tree["sampling"]
                sampling["prompts_per_step"] = min(sampling["prompts_per_step"], num_problems)
            tree = {
                "run": {"out": out, "num_steps": num_steps},
                "policy": {"model": outline},
                **task,
                **tree,
            }
            try:
                places = check_outline(resolve_defaults(check(TrainConfig, tree, "tlt init")))
            except ConfigError as refusal:
                error = error or refusal
                continue
            assert places is not None
            tree["policy"] = {"model": model}
            return tree, places
    raise ConfigError(f"--model {model} does not fit on {hardware}: {error}")


def _candidates(hardware: Hardware, context: int | None) -> Iterator[dict[str, Any]]:
    if not hardware.gpus:
        yield from _on_cores(hardware, context)
        return
    for max_tokens in _lengths(GPU_TOKENS, context):
        for gpus in (n for n in (1, 2, 4, 8, 16) if hardware.gpus % n == 0):
            for utilization in UTILIZATIONS:
                yield _on_gpus(hardware, max_tokens, gpus, utilization, context)


def _lengths(tokens: Sequence[int], context: int | None) -> list[int]:
    """Return the response lengths that leave room for a prompt in the model's context."""
    if not isinstance(context, int):
        return list(tokens)
    fitting = [n for n in tokens if n + min(PROMPT_TOKENS, context // 4) + DRAFT_ROOM <= context]
    return fitting or [max(16, context // 2)]


def _on_cores(hardware: Hardware, context: int | None) -> Iterator[dict[str, Any]]:
    for max_tokens in _lengths(CPU_TOKENS, context):
        for engines in range(min(hardware.cores, MAX_CPU_ENGINES), 0, -1):
            yield {
                "sampling": {"prompts_per_step": 8, "group_size": 8, "max_tokens": max_tokens},
                "engine": {
                    "kv_cache_gib": 1.0,
                    "engine_args": {"enforce_eager": True, "max_num_seqs": 64},
                },
                "pool": {"num_engines": engines},
                "learner": {"lr": 1e-6, "row_tokens": 2048},
                "tlt": {"enabled": True, "harvest": engines > 1},
            }


def _on_gpus(
    hardware: Hardware, max_tokens: int, gpus: int, utilization: float, context: int | None
) -> dict[str, Any]:
    total = hardware.nodes * hardware.gpus
    engines = total // gpus
    room = max_tokens + PROMPT_TOKENS
    if isinstance(context, int):
        room = min(room, context - DRAFT_ROOM)
    node = {
        "num_gpus": hardware.gpus,
        "gpu_gib": hardware.gpu_gib,
        "host_gib": hardware.host_gib,
    }
    return {
        "sampling": {
            "prompts_per_step": 16 if total < 8 else 64,
            "group_size": 8 if total < 8 else 16,
            "max_tokens": max_tokens,
        },
        "engine": {
            "num_gpus": gpus,
            "stall_timeout_s": 900.0,
            "engine_args": {
                "max_model_len": room + DRAFT_ROOM,
                "gpu_memory_utilization": utilization,
                "max_num_seqs": 64,
            },
        },
        "pool": {"num_engines": engines, "start_timeout_s": 1800.0},
        "learner": {
            "num_ranks": total,
            "num_gpus": 1,
            "lr": 1e-6,
            "row_tokens": room,
            "gradient_checkpointing": True,
            "timeout_s": 3600.0,
        },
        "tlt": {"enabled": True, "harvest": engines > 1},
        "node": {name: value for name, value in node.items() if value is not None},
    }


# --- as TOML --------------------------------------------------------------------------------------

COMMENTS = {
    "run.out": "on a disk that survives the machine",
    "run.num_steps": "RL steps",
    "policy.model": "a Hugging Face folder, or an id of the Hub",
    "task.path": "one problem per row",
    "task.instruction": "appended to every question",
    "reward.function": "math: math-verify; exact: <answer> tags; or module:function of your own",
    "sampling.prompts_per_step": "problems per RL step",
    "sampling.group_size": "samples per problem; they are compared with each other",
    "sampling.max_tokens": "a longer response is cut off",
    "engine.num_gpus": "tensor-parallel size of one engine",
    "engine.kv_cache_gib": "of each engine",
    "engine.stall_timeout_s": "the first engine step may compile kernels",
    "engine.engine_args.max_model_len": "prompt, response and drafts",
    "engine.engine_args.gpu_memory_utilization": "the engine's share; the learner has the rest",
    "engine.engine_args.enforce_eager": "starts at once; false compiles first and is faster later",
    "engine.engine_args.max_num_seqs": "requests that an engine runs at once",
    "pool.num_engines": "each on devices of its own",
    "learner.num_ranks": "one per GPU, in turn with the engines",
    "learner.row_tokens": "tokens of one micro-batch; a longer sample gets its own",
    "learner.gradient_checkpointing": "less memory for a third more work",
    "tlt.enabled": "drafts where they pay, by measured speed",
    "tlt.harvest": "idle engines train the drafter; an engine that is alone never is idle",
    "eval.every_steps": "RL steps between evaluations on held-out problems",
    "checkpoint.every_steps": "a lost machine costs at most this many RL steps",
    "node.gpu_gib": "what the memory plan counts on",
}
"""What a setting is for, written behind it."""


def as_toml(tree: Mapping[str, Any], header: Sequence[str]) -> str:
    """Return settings as a commented TOML file."""
    lines = [f"# {line}".rstrip() for line in header]
    for section, values in tree.items():
        lines += ["", f"[{section}]"]
        inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
        for key, value in values.items():
            if key not in inner:
                lines.append(_line(f"{section}.{key}", key, value))
        for key, of in inner.items():
            lines += ["", f"[{section}.{key}]"]
            lines += [_line(f"{section}.{key}.{name}", name, value) for name, value in of.items()]
    return "\n".join(lines) + "\n"


def _line(full: str, key: str, value: Any) -> str:
    # A string, a number or a truth value of JSON is one of TOML.
    written = f"{key} = {json.dumps(value, ensure_ascii=False)}"
    return f"{written:<40}  # {COMMENTS[full]}" if full in COMMENTS else written


def plan_lines(places: Sequence[Place]) -> list[str]:
    """Return the memory plan in words, for the head of the file."""
    if not places:
        return ["Memory was not calculated: the model is not a dense one of a known shape."]
    found = []
    for place in places:
        of = "?" if place.capacity is None else f"{place.capacity / GIB:.1f}"
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in place.parts)
        found.append(f"  {place.name}: {place.need / GIB:.1f} of {of} ({parts})")
    return ["Memory plan in GiB, calculated:", *found]
