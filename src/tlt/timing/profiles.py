"""Models of H100 engines from published figures: bfloat16, decoding with EAGLE-3.

Published in the TLT paper (arXiv 2511.16665): the speed-up of speculation by batch size at 16
and at 64 verified tokens, and acceptance lengths of 4.59 before and 6.53 after adaptation.
Calculated: the time of an engine step without drafts, which reads all weights once, at 70% of the
GPU's memory bandwidth (3.35 TB/s, NVIDIA's data sheet). The KV cache is read at the same speed.
Calculated too: the weight sync, and the part of an update that does not depend on its tokens, both
as a sum of transfers that do not overlap.
"""

from __future__ import annotations

import math

from tlt.config.rollout import Transfer
from tlt.timing.model import EngineModel

BANDWIDTH = 0.7 * 3.35e12
"""Bytes per second that decoding reads on an H100."""
FLOPS = 0.5 * 989e12
"""Bfloat16 operations per second of training and prefill (data sheet: 989 TFLOP/s dense)."""
NETWORK = 25e9
"""Bytes per second into or out of a node: one card of 200 Gbit/s, assumed."""
NVLINK = 0.7 * 450e9
"""Bytes per second into or out of a GPU, within its node (data sheet: 450 GB/s each way; the share
is assumed)."""
HOST_COPY = 10e9
"""Bytes per second between a GPU and pageable host memory, by one process: assumed."""
HOST_MEMORY = 0.7 * 614e9
"""Bytes per second that all processes of a node read from its memory (data sheet: two processors
with eight channels of DDR5-4800; the share is assumed)."""
HOST_LINK = 50e9
"""Bytes per second between a GPU and the host: PCIe 5.0 x16 (64e9 by the standard), 78% of it."""
MAPPING_S = 0.05
"""Seconds in which an engine gives its GPU memory away, or maps it again; assumed."""
DRAFTER_SHARE = 1 / 19
"""Parameters of a drafter of one layer with a vocabulary of 32,768, per parameter of the policy
(Qwen2.5-7B, benchmarks/models.py)."""
MOMENTS_BYTES = 12
"""Bytes per parameter of a drafter in training: weights and two moments in float32."""
GPUS_PER_NODE = 8
TRAINER_TOKENS_PER_S = 10_000.0
"""Tokens per second on which one trainer on an H100 trains a drafter: assumed."""
DRIFT = 0.0003
"""Power of acceptance rates that a policy update adds to a frozen drafter, by
benchmarks/following.py: SmolLM2 on word problems, 30 updates at a learning rate of 2e-5."""
NEW_DRAFTER = 17.0
"""Power of a new drafter's acceptance rates, by results/drafter/report.json: 0.6% of its first
draft tokens are accepted, 74% once it is trained (SmolLM2, temperature 1)."""
GPU_BYTES = 80e9
"""Memory of an H100."""
OVERHEAD_S = 0.002
"""Seconds of an engine step besides the weights: scheduling, sampling, launches."""


def h100(parameters: float, kv_bytes_per_token: float, tensor_parallel: int) -> EngineModel:
    """Return the model of an engine that serves a dense policy on H100s."""
    weights_s = 2 * parameters / tensor_parallel / BANDWIDTH
    # A row costs two operations per parameter; rows are free while the weights are being read.
    row_s = 2 * parameters / tensor_parallel / FLOPS
    layers_share = 1 / 32  # a drafter of one layer
    return EngineModel(
        step=weights_s + OVERHEAD_S,
        dense_row=row_s,
        free_rows=weights_s / row_s,
        context=kv_bytes_per_token / tensor_parallel / BANDWIDTH,
        drafting=0.0005,
        draft_pass=weights_s * layers_share + 0.0002,
        prefill_tokens_per_s=1 / row_s,
    )


MODELS = {
    # name: parameters, bytes of KV cache per token (layers x 2 x KV heads x 128 x 2 bytes)
    "qwen2.5-7b": (7.6e9, 28 * 2 * 4 * 128 * 2),
    "qwen2.5-32b": (32.8e9, 64 * 2 * 8 * 128 * 2),
    "qwen3-8b": (8.2e9, 36 * 2 * 8 * 128 * 2),
    "qwen3-32b": (32.8e9, 64 * 2 * 8 * 128 * 2),
    "llama-3-70b": (70.6e9, 80 * 2 * 8 * 128 * 2),
}

BEFORE = 0.782
"""Acceptance rate before adaptation: its powers add up to 4.59 - 1 tokens, r / (1 - r) = 3.59. The
paper drafts trees, TLT chains: a chain of that drafter has a lower rate, which is not published."""
MEASURED_CHAIN = 0.66
"""Acceptance rate of chains of 3 draft tokens, by results/words/rollout.json: SmolLM2, word
problems."""


def training_speed(model: str, num_gpus: int) -> float:
    """Return the training tokens per second: three forward passes of two operations each."""
    parameters, _ = MODELS[model]
    return num_gpus * FLOPS / (6 * parameters)


def update_s(model: str, num_gpus: int, tokens: int) -> float:
    """Return the seconds of an update of the policy: its tokens, and `update_fixed_s`."""
    return update_fixed_s(model, num_gpus) + tokens / training_speed(model, num_gpus)


def update_fixed_s(model: str, num_gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> float:
    """Return the seconds of an update besides its tokens, for a policy sharded over all GPUs.

    Assumed: weights are gathered twice in bfloat16 (forward and backward pass), gradients reduced
    once in float32, and no transfer overlaps with computing; further rows gather while the GPU
    computes. AdamW reads four float32 numbers per parameter and writes three; clipping reads two
    and writes one.
    """
    parameters, _ = MODELS[model]
    moved = (2 * 2 + 4) * parameters
    optimizer_s = 4 * 10 * parameters / num_gpus / BANDWIDTH
    num_nodes = math.ceil(num_gpus / gpus_per_node)
    return _collective_s(moved, num_nodes, min(num_gpus, gpus_per_node)) + optimizer_s


def sync_s(parameters: float, transport: Transfer, num_nodes: int, gpus_per_node: int) -> float:
    """Return the seconds of a weight sync in bfloat16.

    First all ranks of the learner, sharded over as many GPUs as the engines have, gather the
    policy. Then it reaches the engines:

    - `ipc`: every rank packs it for the engine on its GPU, which loads it: two copies in the memory
      of the GPU.
    - `nccl`: one rank broadcasts it to engines on other nodes. Nodes pass it on while it comes, so
      it takes as long as into one node. Every engine loads it.
    - `shared_memory`: one rank copies it to its host, whose card sends it to the other nodes, one
      after the other. The engines of a node then read it at once.
    """
    weights = 2 * parameters
    gather_s = _collective_s(weights, num_nodes, gpus_per_node)
    on_gpu_s = 2 * 2 * weights / BANDWIDTH
    if transport == "ipc":
        return gather_s + on_gpu_s
    if transport == "nccl":
        return gather_s + weights / NETWORK + on_gpu_s
    to_nodes_s = (num_nodes - 1) * weights / NETWORK
    load_s = max(weights / HOST_COPY, gpus_per_node * weights / HOST_MEMORY)
    return gather_s + weights / HOST_COPY + to_nodes_s + load_s


def _collective_s(num_bytes: float, num_nodes: int, gpus_per_node: int) -> float:
    """Return the seconds in which GPUs gather, or reduce, tensors that are sharded over all.

    Every GPU receives the other GPUs' shards over NVLink, every node the other nodes' shards over
    its card.
    """
    within_s = num_bytes * (1 - 1 / gpus_per_node) / NVLINK
    return within_s + num_bytes * (1 - 1 / num_nodes) / NETWORK


def swap_s(parameters: float) -> float:
    """Return the seconds of a drafter swap: its bfloat16 weights come from the host."""
    return 2 * parameters * DRAFTER_SHARE / HOST_LINK


def park_s(parameters: float) -> float:
    """Return the seconds in which a drafter and its optimizer reach the GPU, or leave it."""
    return MOMENTS_BYTES * parameters * DRAFTER_SHARE / HOST_LINK
