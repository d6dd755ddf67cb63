"""Functions that run beside a V2 engine, in its process: what they return can be pickled."""

from __future__ import annotations

from typing import Any


def draft_from_own_text() -> list[list[int]]:
    """Return three drafts for a text that repeats itself, and for one that does not."""
    from types import SimpleNamespace

    import torch

    from tlt.vllm.ngram.speculator import ngram_drafts

    texts = {2: [9, 1, 2, 3, 4, 1, 2], 0: [5, 6]}
    token_ids = torch.zeros(4, 32, dtype=torch.int32)
    total_len = torch.zeros(4, dtype=torch.int32)
    last_sampled = torch.zeros(4, 1, dtype=torch.int64)
    for slot, text in texts.items():
        token_ids[slot, : len(text)] = torch.tensor(text)
        total_len[slot] = len(text)
        last_sampled[slot] = text[-1]
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=token_ids), total_len=SimpleNamespace(gpu=total_len)
    )
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        model_config=SimpleNamespace(max_model_len=32),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    ngram = {"min_match": 2, "max_match": 4, "history_tokens": 0}
    lookup = ngram_drafts(config, torch.device("cpu"), states, ngram)
    batch = SimpleNamespace(num_reqs=2, idx_mapping=torch.tensor([2, 0]))
    drafts = torch.zeros(4, 4, dtype=torch.int64)
    lookup.draft(batch, 3, torch.ones(2, dtype=torch.int32), last_sampled, drafts)
    return drafts[:2, :3].tolist()


_WATCHED = ("to", "cpu", "item", "tolist", "nonzero", "copy_", "__bool__", "__int__", "__float__")


def watch_waits(engine: Any) -> None:
    """Begin to note where our modules read a tensor on the host, or copy one between devices.

    On a GPU such a call makes the host wait for the device, unless the memory is pinned.
    """
    import sys
    from pathlib import Path

    import torch

    import tlt.vllm

    folder = str(Path(tlt.vllm.__file__).parent)
    engine.waits = waits = set()

    def watched(name: str, original: Any) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            code = sys._getframe(1).f_code
            is_own = code.co_filename.startswith(folder)
            if is_own and (name != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None):
                waits.add((Path(code.co_filename).name, code.co_name, name))
            return original(tensor, *args, **kwargs)

        return call

    for name in _WATCHED:
        setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
