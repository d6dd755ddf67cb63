"""Models of H100 engines from published figures: bfloat16, decoding with EAGLE-3.

Published in the TLT paper (see docs/scaling.md): the speed-up of speculation by batch size at 16
and at 64 verified tokens, and acceptance lengths of 4.59 before and 6.53 after adaptation.
Calculated: the time of an engine step without drafts, which reads all weights once, at 70% of the
GPU's memory bandwidth (3.35 TB/s, NVIDIA's data sheet). The KV cache is read at the same speed.
"""

from __future__ import annotations

from tlt.simulate.model import EngineModel

BANDWIDTH = 0.7 * 3.35e12
"""Bytes per second that decoding reads on an H100."""
FLOPS = 0.5 * 989e12
"""Bfloat16 operations per second of training and prefill (data sheet: 989 TFLOP/s dense)."""
NETWORK = 25e9
"""Bytes per second between two nodes: 200 Gbit/s, assumed."""
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
"""Acceptance rate before adaptation: its powers add up to 4.59 - 1 tokens, r / (1 - r) = 3.59."""


def training_speed(model: str, num_gpus: int) -> float:
    """Return the training tokens per second: three forward passes of two operations each."""
    parameters, _ = MODELS[model]
    return num_gpus * FLOPS / (6 * parameters)
