"""Settings for a model, data and hardware: the first that fit by the memory plan, as TOML.

`tlt init` writes them. The choice is a search: from long responses and large KV caches down to
small ones, on one GPU per engine and then on more, until `check_outline` accepts the run.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from tlt.config.load import check
from tlt.config.tasks import TaskConfig
from tlt.config.train import TrainConfig, resolve_defaults
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
    sold = int(found["gb"])  # a GPU sold as 80 GB has 79 GiB
    nodes = int(found["nodes"] or 1)
    return Hardware(nodes=nodes, gpus=int(found["gpus"]), gpu_gib=float(sold - max(1, sold // 50)))


HEAD = """
[run]
out = {out}
num_steps = {num_steps}  # RL steps

[policy]
model = {model}  # a Hugging Face folder, or an id of the Hub

{task}
[sampling]
prompts_per_step = {prompts}  # problems per RL step
group_size = {group}  # samples per problem; they are compared with each other
max_tokens = {max_tokens}  # a longer response is cut off
"""
ON_CORES = """
[engine]
kv_cache_gib = 1.0  # of each engine

[engine.engine_args]
enforce_eager = true  # starts at once; false compiles first and is faster later
max_num_seqs = 64  # requests that an engine runs at once

[pool]
num_engines = {engines}  # each on its own devices

[learner]
lr = 1e-6
row_tokens = 2048  # tokens of one micro-batch; a longer sample gets its own
"""
ON_GPUS = """
[engine]
num_gpus = {gpus}  # tensor-parallel size of one engine
stall_timeout_s = 900.0  # the first engine step may compile kernels

[engine.engine_args]
max_model_len = {context}  # prompt, response and drafts
gpu_memory_utilization = {utilization}  # the engine's share; the learner has the rest
max_num_seqs = 64  # requests that an engine runs at once

[pool]
num_engines = {engines}  # each on its own devices
start_timeout_s = 1800.0

[learner]
num_ranks = {ranks}  # one per GPU, in turn with the engines
num_gpus = 1
lr = 1e-6
row_tokens = {row_tokens}  # tokens of one micro-batch; a longer sample gets its own
gradient_checkpointing = true  # less memory for a third more work
timeout_s = 3600.0

[node]
num_gpus = {node_gpus}
{memory}"""
TAIL = """
[tlt]
enabled = true  # drafts where they pay: n-grams, until a drafter beats them
harvest = {harvest}  # idle engines train the drafter; an engine that is alone never is idle
"""


def choose(
    model: str, folder: Path, task: Mapping[str, Any], hardware: Hardware, out: str, num_steps: int
) -> tuple[str, list[Place]]:
    """Return the TOML text of settings that fit, and their memory plan; or refuse.

    `folder` holds the config.json of the model, whose name the settings keep.
    """
    path = task["task"].get("path")
    num_problems = len(read_problems(TaskConfig(**task["task"]))) if path else None
    context = json.loads((folder / "config.json").read_bytes()).get("max_position_embeddings")
    given = {"out": _toml(out), "num_steps": num_steps, "task": tomli_w.dumps(task)}
    error: ConfigError | None = None
    with tempfile.TemporaryDirectory(prefix="tlt-init-") as outline:
        shutil.copy(folder / "config.json", outline)
        for template, values in _candidates(
            hardware, context if isinstance(context, int) else None
        ):
            values |= given
            values["prompts"] = min(values["prompts"], num_problems or values["prompts"])
            tree = tomllib.loads(template.format(model=_toml(outline), **values))
            try:
                places = check_outline(resolve_defaults(check(TrainConfig, tree, "tlt init")))
            except ConfigError as refusal:
                error = error or refusal
                continue
            assert places is not None
            return template.format(model=_toml(model), **values), places
    raise ConfigError(f"--model {model} does not fit on {hardware}: {error}")


def _candidates(hardware: Hardware, context: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a template and its values, the longest responses and largest KV caches first."""
    for max_tokens in _lengths(GPU_TOKENS if hardware.gpus else CPU_TOKENS, context):
        common: dict[str, Any] = {"max_tokens": max_tokens, "prompts": 8, "group": 8}
        if not hardware.gpus:
            for engines in range(min(hardware.cores, MAX_CPU_ENGINES), 0, -1):
                own = {"engines": engines, "harvest": _toml(engines > 1)}
                yield HEAD + ON_CORES + TAIL, common | own
            continue
        total = hardware.nodes * hardware.gpus
        row_tokens = max_tokens + PROMPT_TOKENS
        if context is not None:
            row_tokens = min(row_tokens, context - DRAFT_ROOM)
        memory = {"gpu_gib": hardware.gpu_gib, "host_gib": hardware.host_gib}
        common |= {
            **({"prompts": 16, "group": 8} if total < 8 else {"prompts": 64, "group": 16}),
            "ranks": total,
            "row_tokens": row_tokens,
            "context": row_tokens + DRAFT_ROOM,
            "node_gpus": hardware.gpus,
            "memory": "".join(f"{key} = {size}\n" for key, size in memory.items() if size),
        }
        for gpus in (n for n in (1, 2, 4, 8, 16) if hardware.gpus % n == 0):
            num = total // gpus
            common |= {"gpus": gpus, "engines": num, "harvest": _toml(num > 1)}
            for utilization in UTILIZATIONS:
                yield HEAD + ON_GPUS + TAIL, common | {"utilization": utilization}


def _lengths(tokens: Sequence[int], context: int | None) -> list[int]:
    """Return the response lengths that leave room for a prompt in the model's context."""
    if context is None:
        return list(tokens)
    fitting = [n for n in tokens if n + min(PROMPT_TOKENS, context // 4) + DRAFT_ROOM <= context]
    return fitting or [max(16, context // 2)]


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # strings and truth values of JSON are TOML


def plan_lines(places: Sequence[Place]) -> list[str]:
    """Return the memory plan in words, for the head of the file."""
    if not places:
        return ["Memory was not calculated: the model is not of the Llama or Qwen type."]
    found = []
    for place in places:
        of = "?" if place.capacity is None else f"{place.capacity / GIB:.1f}"
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in place.parts)
        found.append(f"  {place.name}: {place.need / GIB:.1f} of {of} ({parts})")
    return ["Memory plan in GiB, calculated:", *found]
