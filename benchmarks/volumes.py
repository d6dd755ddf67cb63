"""What moves in an RL step of a large cluster: bytes, messages, and which limit comes first.

    python benchmarks/volumes.py                                   # Markdown tables
    python benchmarks/volumes.py samples_per_engine=16 step_s=300  # other assumptions

Arithmetic, nothing else: no cluster of this size was at hand. Sizes come from the shapes of the
models and from what the code sends; everything else is a field of `Assumed`, with its source.
Limits of the code are imported, or copied where an import would bring Ray along.
The tables are committed as benchmarks/results/volumes.md; docs/simulator.md explains.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from statistics import fmean
from typing import Any

from models import MODELS, Model
from tlt.config.train import TltConfig
from tlt.harvest.coordinator import EXPORT_S
from tlt.harvest.leases import moved_bytes, stop_timeout_s
from tlt.observe.timeline import max_engine_spans
from tlt.report.findings import SYNC_SHARE
from tlt.spans import MAX_SPANS
from tlt.tasks.tail import HeavyTail

Values = dict[str, float]
TLT = TltConfig()
"""Harvest's settings as they are by default."""

# Limits of modules that import Ray, which this script should not.
POLL_S = 2.0
"""`rollout/actor.py`: an engine answers at least so often."""
SWAP_S = 60.0
"""`harvest/session.py`: engines that take longer to load a drafter switch harvest off."""

BFLOAT16, FLOAT32 = 2, 4
STATES = 4
"""`states/captured.py`: three fused states and the final one."""
TOKEN_AND_MASK_BYTES = 5
"""`states/buffer.py`: int32 and bool, beside the states of a token."""
PICKLED_TOKEN_BYTES = 5
"""Pickle protocol 5: an int above 65,535; smaller ones take 3 or 2."""
PICKLED_LOGPROB_BYTES = 9
"""Pickle protocol 5: a float."""
OBJECT_BYTES = 28 + 24 + 2 * 8
"""CPython: an int, a float and their places in two tuples, for a token of a `Sample`."""
LEARNER_BYTES = 16
"""`learner/rank.py`: float32 weights, gradients and two moments of a parameter."""
CHECKPOINT_BYTES = 12
"""Checkpoint bytes per parameter: weights and moments, no gradients."""
SHARDING_BYTES = 8
"""FSDP2, for a parameter and row: gathered twice in bfloat16, reduced once in float32."""
ENGINE_CALLS = 10
"""Calls to an engine per RL step: stats 2, submit, spans, weights, sleep and wake 2, and for
harvest sleep, wake and drafter (`train/loop.py`, `harvest/session.py`)."""
RANK_CALLS = 3
"""Calls to a rank per RL step: accumulate, step, publish (`learner/group.py`)."""


def assumed(value: float, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is not in the code. Any of it can be given on the command line as `name=value`."""

    gpus_per_node: int = assumed(8, "assumed")
    gpu_bytes: float = assumed(80e9, "the recipes' GPUs")
    node_bytes: float = assumed(2e12, "memory of a host: assumed")
    nic_bytes_per_s: float = assumed(25e9, "of a host, 200 Gbit/s: assumed, as by the simulator")
    host_copy_bytes_per_s: float = assumed(10e9, "GPU to pageable host memory: assumed")
    flops: float = assumed(0.5 * 989e12, "of a GPU in training: timing/profiles.py")
    samples_per_engine: int = assumed(128, "configs/qwen2_5_7b_math_8gpu.toml")
    prompt_tokens: float = assumed(300, "default of the simulator")
    median_tokens: float = assumed(2500, "of responses: default of the simulator")
    p95_tokens: float = assumed(12000, "default of the simulator")
    longest_tokens: int = assumed(32768, "default of the simulator")
    trained_share: float = assumed(0.5, "of groups with different rewards: assumed")
    row_tokens: int = assumed(33792, "the longest sample, as the recipes choose it")
    step_s: float = assumed(600, "assumed, at every size")
    rollout_s: float = assumed(480, "assumed: 80% of a step")
    update_s: float = assumed(60, "assumed")
    tail_s: float = assumed(240, "in which engines are idle: assumed, half of the rollout")
    checkpoint_steps: float = assumed(10, "between checkpoints: both recipes")
    gpu_hours_per_failure: float = assumed(50700, "Llama 3 report: 419 in 54 days on 16,384 GPUs")
    capture_gib: float = assumed(64, "of a node: configs/qwen2_5_32b_math_4nodes.toml")
    capture_tokens: int = assumed(8192, "of a sample: both recipes")
    draft_vocab: int = assumed(32768, "default for large vocabularies")
    publishes: float = assumed(1, "drafters published in a step: assumed")
    reward_s: float = assumed(0.03, "of one process: 'a few dozen ms' in the recipes")
    reward_workers: int = assumed(16, "reward.num_workers of the recipes")
    span_bytes: float = assumed(200, "begin, end and counter in timeline.json: assumed")
    metrics_bytes: float = assumed(2000, "of a line of metrics.jsonl: assumed")
    length_bytes: float = assumed(6, "of a number in lengths.jsonl: assumed")
    load_us: float = assumed(0.04, "to unpickle a token in the driver: one CPU core")
    text_us: float = assumed(0.10, "to turn it into text: one CPU core")
    dump_us: float = assumed(0.03, "to pickle it for a rank: one CPU core")
    ray_calls_per_s: float = assumed(8038, "one caller, many actors: Ray's release tests")
    ray_nodes: float = assumed(250, "nodes in Ray's release tests")
    ray_actors: float = assumed(10000, "actors in Ray's release tests")


GPUS = (8, 128, 1024, 10_000)


def volumes(model: Model, num_gpus: int, given: Assumed) -> Values:
    """Return the volumes of an RL step with colocated engines and ranks, and TLT on."""
    nodes = math.ceil(num_gpus / given.gpus_per_node)
    engines = num_gpus // model.gpus_per_engine
    found: Values = {
        "gpus": num_gpus,
        "nodes": nodes,
        "engines": engines,
        "engines_of_node": engines / nodes,
        "actors": 2 * engines + num_gpus,  # a trainer beside every engine
        "parameters": model.parameters,
    }
    for part in (of_samples, of_driver, of_records):
        found |= part(found, given)
    for of_model in (of_policy, of_capture, of_drafter):
        found |= of_model(found, model, given)
    return found


def of_samples(c: Values, given: Assumed) -> Values:
    samples = c["engines"] * given.samples_per_engine
    tokens = samples * fmean(responses(given))
    trained = given.trained_share * (tokens + samples * given.prompt_tokens)
    trained_logprobs = given.trained_share * tokens
    in_bytes = tokens * (PICKLED_TOKEN_BYTES + PICKLED_LOGPROB_BYTES)
    return {
        "samples": samples,
        "tokens": tokens,
        "trained_tokens": trained,
        "sample_bytes": in_bytes,
        "sample_bytes_per_s": in_bytes / given.rollout_s,
        "object_bytes": tokens * OBJECT_BYTES,  # held until the step is over
        "row_bytes": trained * PICKLED_TOKEN_BYTES + trained_logprobs * PICKLED_LOGPROB_BYTES,
        "reward_processes": samples * given.reward_s / given.rollout_s,
    }


def of_driver(c: Values, given: Assumed) -> Values:
    """Return the driver's calls, at most, and its seconds of Python."""
    polls_per_s = c["engines"] / POLL_S
    arriving_s = c["tokens"] * (given.load_us + given.text_us) / 1e6
    fixed = ENGINE_CALLS * c["engines"] + RANK_CALLS * c["gpus"]
    return {
        "calls": polls_per_s * given.step_s + c["samples"] + fixed,
        "calls_per_s": polls_per_s + c["samples"] / given.rollout_s,
        "driver_s": arriving_s + c["trained_tokens"] * given.dump_us / 1e6,
    }


def of_policy(c: Values, model: Model, given: Assumed) -> Values:
    parameters = model.parameters
    policy = BFLOAT16 * parameters
    row_s = 6 * parameters * given.row_tokens / given.flops
    captured = c["nodes"] * given.capture_gib * 2**30
    hops = math.ceil(math.log2(c["nodes"]))
    failure_h = given.gpu_hours_per_failure / c["gpus"]
    return {
        "policy_bytes": policy,
        "ends_bytes": 2 * model.vocab * model.hidden * BFLOAT16,
        "learner_bytes": LEARNER_BYTES * parameters,
        "starting_bytes": given.gpus_per_node * FLOAT32 * parameters,
        # On the driver's node, where there are others: a clone and one in the store.
        "shipping_bytes": 2 * policy * (c["nodes"] > 1),
        # On another node than the driver's: the object store's copy, and for every engine its own
        # tensors and its own file.
        "loading_bytes": (1 + 2 * c["engines_of_node"]) * policy * (c["nodes"] > 1),
        "sharding_bytes": SHARDING_BYTES * parameters,
        "sharding_bytes_per_s": SHARDING_BYTES * parameters / row_s,
        "policy_moved_bytes": (c["nodes"] - 1) * policy,
        "sync_star_s": (c["nodes"] - 1) * policy / given.nic_bytes_per_s,
        "sync_tree_s": hops * policy / given.nic_bytes_per_s,
        "checkpoint_bytes": CHECKPOINT_BYTES * parameters + captured,
        "failure_h": failure_h,
        # A lost rank puts the run back to the last checkpoint: by half of the time between two.
        "redone_share": given.checkpoint_steps / 2 * given.step_s / 3600 / failure_h,
    }


def of_capture(c: Values, model: Model, given: Assumed) -> Values:
    """Return the volume of capture: trained samples, of long ones a window."""
    kept = fmean(min(n + given.prompt_tokens, given.capture_tokens) for n in responses(given))
    state = STATES * model.hidden * BFLOAT16 + TOKEN_AND_MASK_BYTES
    captured = given.trained_share * c["samples"] / c["nodes"] * kept * state
    return {
        "state_bytes": state,
        "captured_bytes": captured,
        "captured_bytes_per_s": captured / given.update_s,
        "all_captured_bytes": c["nodes"] * captured,
    }


def of_drafter(c: Values, model: Model, given: Assumed) -> Values:
    drafter = FLOAT32 * model.drafter_parameters(given.draft_vocab)
    published = drafter * BFLOAT16 / FLOAT32
    leaving = moved_bytes(drafter // FLOAT32)
    trainers = max(0, min(TLT.max_trainers, c["engines"] - 1))  # somebody must still generate
    rounds = given.tail_s // TLT.session_s if trainers else 0
    leases = trainers * math.ceil(given.tail_s / TLT.lease_s)
    gathered = trainers * drafter  # the coordinator awaits the value of every export
    merged = gathered + 2 * max(0, trainers - 1) * drafter  # to the leader, and from it
    # Begin, end, release of a lease; in a round take, train and export of every trainer, merge,
    # evaluation.
    messages = 3 * leases + rounds * (3 * trainers + 2)
    return {
        "drafter_bytes": drafter,
        "whole_drafter_bytes": FLOAT32 * model.drafter_parameters(model.vocab),
        "moment_bytes": 2 * drafter,
        "published_bytes": published,
        "leaving_bytes": leaving,
        "stop_s": stop_timeout_s(
            drafter // FLOAT32,
            embed_and_head_bytes=int(c["ends_bytes"]),
            on_gpu=True,
        ),
        # Pinned memory comes in powers of two: up to twice the size.
        "waiting_bytes": c["engines_of_node"] * (2 * leaving + c["ends_bytes"]),
        "trainers": trainers,
        "gathered_bytes": gathered,
        "merge_bytes": merged,
        "all_merge_bytes": rounds * merged,
        "publish_bytes": given.publishes * (c["nodes"] - 1) * published,
        "publish_star_s": (c["nodes"] - 1) * published / given.nic_bytes_per_s,
        "messages": messages,
        "messages_per_s": messages / given.step_s,
    }


def of_records(c: Values, given: Assumed) -> Values:
    spans = c["engines"] * min(MAX_SPANS, max_engine_spans(int(c["engines"])))
    return {
        "spans": spans,
        "timeline_bytes": spans * given.span_bytes,
        "written_bytes": given.metrics_bytes + given.length_bytes * c["samples"],
    }


def shares(c: Values, given: Assumed) -> Values:
    """Return the used share of every limit."""
    leaving_s = c["leaving_bytes"] / given.host_copy_bytes_per_s if c["trainers"] else 0.0
    export_s = c["drafter_bytes"] / given.host_copy_bytes_per_s if c["trainers"] else 0.0
    if c["nodes"] > 1:
        export_s += c["gathered_bytes"] / given.nic_bytes_per_s
    sync_s = SYNC_SHARE * given.step_s
    return {
        "learner's state: a GPU": c["learner_bytes"] / c["gpus"] / given.gpu_bytes,
        "ranks load the model: host memory": c["starting_bytes"] / given.node_bytes,
        "weights for other nodes: driver's host memory": c["shipping_bytes"] / given.node_bytes,
        "engines load weights: host memory": c["loading_bytes"] / given.node_bytes,
        f"weights to nodes: {SYNC_SHARE:.0%} of a step": c["sync_star_s"] / sync_s,
        "a trainer leaves its GPU: time from its size": leaving_s / c["stop_s"],
        f"exports: {EXPORT_S:g} s": export_s / EXPORT_S,
        f"a drafter to all nodes: {SWAP_S:g} s": c["publish_star_s"] / SWAP_S,
        "the driver's Python: a step": c["driver_s"] / given.step_s,
        "the driver's calls: Ray's tests": c["calls_per_s"] / given.ray_calls_per_s,
        "samples in the driver: host memory": c["object_bytes"] / given.node_bytes,
        "rewards: processes": c["reward_processes"] / given.reward_workers,
        "work done again: all of it": c["redone_share"],
        "nodes: Ray's tests": c["nodes"] / given.ray_nodes,
        "actors: Ray's tests": c["actors"] / given.ray_actors,
    }


@cache
def responses(given: Assumed) -> tuple[int, ...]:
    """Draw response lengths as the project draws them."""
    tail = HeavyTail(given.median_tokens, given.p95_tokens, given.longest_tokens)
    return tuple(tail.spread(10_000, random.Random(0)))


def size(num_bytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{_short(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f}"


def pace(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"


def count(value: float) -> str:
    return f"{_short(value / 1e6)} M" if value >= 1e6 else f"{value:,.0f}"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def seconds(value: float) -> str:
    return f"{_short(value)} s" if value >= 0.01 or not value else "<0.01 s"


def share(value: float) -> str:
    text = "<0.01" if 0 < value < 0.005 else f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return f"**{text}**" if value > 1 else text


def plain(value: float) -> str:
    return f"{value:,g}" if value < 1e7 else f"{value / 1e9:g}e9"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


Row = tuple[str, str, Callable[[float], str]]
"""Label, key of the value, formatter."""

MODEL_ROWS: tuple[Row, ...] = (
    ("parameters", "parameters", count),
    ("policy in bfloat16, a sync", "policy_bytes", size),
    ("head and embedding for trainers, a sync", "ends_bytes", size),
    ("learner's state, all ranks", "learner_bytes", size),
    ("host memory of a node while its ranks load the model", "starting_bytes", size),
    ("gathered and reduced by a rank, a row", "sharding_bytes", size),
    ("... pace that hides it behind the products", "sharding_bytes_per_s", pace),
    ("captured state of a token", "state_bytes", size),
    ("drafter in float32", "drafter_bytes", size),
    ("... if it drafts all tokens", "whole_drafter_bytes", size),
    ("... its two moments", "moment_bytes", size),
    ("... in bfloat16, as published", "published_bytes", size),
    ("leaves a GPU when a lease ends", "leaving_bytes", size),
    ("host memory of a node for trainers that wait", "waiting_bytes", size),
)

CLUSTER_ROWS: tuple[Row, ...] = (
    ("nodes", "nodes", count),
    ("engines", "engines", count),
    ("Ray actors", "actors", count),
    ("samples", "samples", count),
    ("tokens of responses", "tokens", count),
    ("samples to the driver", "sample_bytes", size),
    ("... a second of the rollout", "sample_bytes_per_s", pace),
    ("... as Python objects", "object_bytes", size),
    ("rows from the driver to ranks", "row_bytes", size),
    ("driver: Ray calls", "calls", count),
    ("... a second of the rollout", "calls_per_s", rate),
    ("driver: Python", "driver_s", seconds),
    ("policy to other nodes", "policy_moved_bytes", size),
    ("... if one node sends to all", "sync_star_s", seconds),
    ("... if whoever has it sends it on", "sync_tree_s", seconds),
    ("... copies on the driver's node", "shipping_bytes", size),
    ("captured states, a node", "captured_bytes", size),
    ("... a second of the update", "captured_bytes_per_s", pace),
    ("... all nodes", "all_captured_bytes", size),
    ("trainers at once", "trainers", count),
    ("drafters between processes, a round", "merge_bytes", size),
    ("... a step", "all_merge_bytes", size),
    ("published drafter to other nodes", "publish_bytes", size),
    ("coordinator: calls to trainers", "messages", count),
    ("... a second of the step", "messages_per_s", rate),
    ("timeline: spans, at most", "spans", count),
    ("... bytes", "timeline_bytes", size),
    ("metrics and lengths", "written_bytes", size),
    ("a checkpoint, with full buffers", "checkpoint_bytes", size),
    ("hours between failures", "failure_h", rate),
    ("... work done again", "redone_share", "{:.1%}".format),
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(head: Sequence[str], rows: Sequence[Row], columns: Sequence[Values]) -> str:
    return table(head, [(name, *(show(c[key]) for c in columns)) for name, key, show in rows])


def markdown(given: Assumed, gpus: Sequence[int]) -> str:
    assumptions = [
        (f"`{f.name}`", plain(getattr(given, f.name)), f.metadata["source"]) for f in fields(given)
    ]
    names = [model.name for model in MODELS]
    by_model = [volumes(model, given.gpus_per_node, given) for model in MODELS]
    sizes = [f"{number:,} GPUs" for number in gpus]
    parts = ["### Assumptions", table(("name", "value", "source"), assumptions)]
    parts.append(f"Mean response: {fmean(responses(given)):,.0f} tokens.")
    parts += ["### By model", filled(["", *names], MODEL_ROWS, by_model)]
    for model in MODELS:
        columns = [volumes(model, number, given) for number in gpus]
        parts += [f"### {model.name}", filled(["a step", *sizes], CLUSTER_ROWS, columns)]
    found = [[shares(volumes(m, number, given), given) for m in MODELS] for number in gpus]
    rows = [
        (name, *(" / ".join(share(each[name]) for each in of_size) for of_size in found))
        for name in found[0][0]
    ]
    parts += ["### Shares of limits", table(["7B / 32B / 70B", *sizes], rows)]
    return "\n\n".join(parts)


def with_changes(given: Assumed, changes: Sequence[str]) -> Assumed:
    kinds = {f.name: type(f.default) for f in fields(given)}
    found: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in kinds or not value:
            raise SystemExit(f"{change}: expected name=value with one of {', '.join(kinds)}")
        found[name] = int(float(value)) if kinds[name] is int else float(value)
    return replace(given, **found)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("assumptions", nargs="*", metavar="name=value")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    options = parser.parse_args()
    given = with_changes(Assumed(), options.assumptions)
    print(markdown(given, options.gpus))


if __name__ == "__main__":
    main()
