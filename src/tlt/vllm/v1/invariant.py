"""Logits of float32 CPU engines that do not depend on the rest of the batch.

The same token after the same text gets bit-equal logits, whatever else is in the batch, however
many drafts are verified, and however the text was read: whole, in chunks, from the prefix cache, or
again after a preemption. Only then do equal seeds give equal samples rather than nearly always.

On a CPU, three choices of vLLM's kernels depend on the batch and change the order of a sum:

- oneDNN sums in blocks for a single row of more than 1024 inputs, but not for two rows or more;
- attention chooses the size of its KV tiles by the rows of a request that it reads at once;
- attention splits the KV cache between threads by the load of the whole batch.

So a single row gets a second one beside it, attention reads a few rows at a time, and splitting is
off. `TLT_COMPAT_SKIP=single_row,kv_tiles,kv_split` leaves these out, to show that each is needed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from tlt.vllm.compat import skips

ROWS_PER_TILE = 8
"""Rows of a request that vLLM's attention kernels read at once with tiles of the largest size.

Measured for float32 with 1 to 16 query heads per KV head and heads of 32 to 128 numbers."""


def prepare(runner: Any) -> None:
    """Make the forward pass of a model runner independent of the batch, before any metadata."""
    if not skips("single_row"):
        _pad_single_row(runner)
    if not skips("kv_tiles"):
        _fix_tiles()
    if not skips("kv_split"):
        # With one thread there is nothing to split. With several, heads are still divided.
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"


# --- a single row -------------------------------------------------------------------------------


def _pad_single_row(runner: Any) -> None:
    """Let the model see at least two rows. vLLM pads batches like this for CUDA graphs."""
    determine = runner._determine_batch_execution_and_padding

    def determine_padding(num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        mode, batch, *rest = determine(num_tokens, *args, **kwargs)
        if batch.num_tokens == 1:
            batch = replace(batch, num_tokens=2)
            runner.input_ids.cpu[1] = 0  # vLLM itself clears the position and the slot
        return mode, batch, *rest

    runner._determine_batch_execution_and_padding = determine_padding


def pad_head(model: Any) -> None:
    """Let the head of a loaded model see at least two rows."""
    if skips("single_row"):
        return
    compute = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(hidden_states) != 1:
            return compute(hidden_states, *args, **kwargs)
        return compute(hidden_states.repeat(2, 1), *args, **kwargs)[:1]

    model.compute_logits = compute_logits


# --- attention ----------------------------------------------------------------------------------


def _fix_tiles() -> None:
    """Present a request with many rows to the kernel as several requests with few rows each.

    The kernel fits its KV tiles to the processor's cache: the more rows of a request it reads at
    once, the smaller the tiles. Up to `ROWS_PER_TILE` rows, the tiles have one size (16,000 tokens
    with heads of 64 numbers and a cache of 1 MiB).
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    if getattr(Builder, "tlt_fixed_tiles", False):
        return
    original = Builder.build

    def build(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        common = common_attn_metadata
        wide = common.max_query_len > ROWS_PER_TILE
        if wide and self.dtype == torch.float32 and common.causal is True:
            common = split_rows(common, ROWS_PER_TILE)
        return original(self, common_prefix_len, common, fast_build)

    Builder.build = build
    Builder.tlt_fixed_tiles = True


def split_rows(common: Any, rows: int) -> Any:
    """Return attention metadata in which no request has more than this many rows."""
    starts = common.query_start_loc.long()
    num_rows = starts.diff()
    parts = (num_rows + rows - 1).div(rows, rounding_mode="floor")
    request = torch.arange(len(parts)).repeat_interleave(parts)
    part = torch.arange(len(request)) - (parts.cumsum(0) - parts)[request]
    end = torch.minimum((part + 1) * rows, num_rows[request])  # within the request
    ends = (starts[request] + end).int()
    query_start_loc = torch.cat([starts[:1].int(), ends])
    lengths = (common.seq_lens[request] - num_rows[request] + end).int()
    return replace(
        common,
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(request),
        max_query_len=rows,
        block_table_tensor=common.block_table_tensor[request],
    )
