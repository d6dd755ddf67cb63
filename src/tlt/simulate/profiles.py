"""Hardware that is not here, from published figures. Each number with its source.

H100, bfloat16, decoding with EAGLE-3. Published (the TLT paper, see docs/scaling.md): the speed-up
of speculation by batch size at 16 and at 64 verified tokens; acceptance lengths 4.59 before and
6.53 after adaptation. Calculated: the time of a plain step, which reads all weights once, from the
memory bandwidth of the GPU (3.35 TB/s, NVIDIA's data sheet) at 70% of it; a KV cache read at the
same speed.
"""

from __future__ import annotations

from tlt.simulate.model import Drafting, EngineModel, powers

BANDWIDTH = 0.7 * 3.35e12
"""Bytes per second of an H100 that decoding reaches."""
FLOPS = 0.5 * 989e12
"""Of bfloat16 products that training and prefill reach (data sheet: 989 TFLOP/s dense)."""
OVERHEAD_S = 0.002
"""Of a step, besides the weights: scheduling, sampling, launches."""


def h100(parameters: float, kv_bytes_per_token: float, tensor_parallel: int) -> EngineModel:
    """A dense model of so many parameters on so many GPUs."""
    weights_s = 2 * parameters / tensor_parallel / BANDWIDTH
    # A row is two operations per parameter; it is free while the weights are still being read.
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
    "llama-3-70b": (70.6e9, 80 * 2 * 8 * 128 * 2),
}

BEFORE = 0.782
"""The rate whose powers add up to 4.59 tokens a step over many positions: r / (1 - r) = 3.59."""


def published_drafting(rate: float = BEFORE) -> Drafting:
    return Drafting({"eagle3": powers(rate)})
