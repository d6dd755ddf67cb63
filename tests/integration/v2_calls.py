"""Functions that run beside a V2 engine, in its process: what they return can be pickled."""

from __future__ import annotations

from collections.abc import Sequence
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


class Scripted:
    """A strategy that repeats the arms of a script."""

    def __init__(self, arms: Sequence[Any]) -> None:
        from tlt.strategy.spec import parse_arm

        self._arms = [parse_arm(arm) for arm in arms]
        self._step = 0

    def arms(self) -> frozenset[Any]:
        return frozenset(self._arms)

    def decide(self, context: Any) -> Any:
        self._step += 1
        return self._arms[(self._step - 1) % len(self._arms)]

    def observe(self, report: Any) -> None:
        pass


class Spy:
    """The draft model's passes, and by text its drafts and whole blocks of its KV cache."""

    def __init__(self, engine: Any) -> None:
        from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

        from tlt.vllm.v2.speculator import SwitchingSpeculator

        runner = _runner(engine)
        self.drafts: dict[tuple[int, ...], list[int]] = {}
        self.blocks: dict[tuple[int, ...], Any] = {}
        self.num_passes = self.num_written = 0
        self.catches_up = True
        propose, write, one_pass = (
            SwitchingSpeculator.propose,
            SwitchingSpeculator._write,
            EagleSpeculator.propose,
        )

        def spied_propose(speculator: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            proposed = propose(speculator, batch, *args, **kwargs)
            num_drafts = kwargs["num_speculative_tokens"]
            if speculator.drafter == "eagle3":
                states = runner.req_states
                for row, slot in enumerate(batch.idx_mapping_np[: batch.num_reqs].tolist()):
                    num_tokens = int(states.total_len.gpu[slot])
                    text = tuple(states.all_token_ids.gpu[slot, :num_tokens].tolist())
                    if args[4][row] > 0:  # a token was sampled
                        self.drafts[text] = proposed[row, :num_drafts].tolist()
                        self.blocks[text] = last_block(speculator, row, num_tokens - 1)
            return proposed

        def last_block(speculator: Any, row: int, num_read: int) -> Any:
            (layer,) = speculator.draft_attn_layer_names
            cache = runner.compilation_config.static_forward_context[layer].kv_cache
            table = speculator.block_tables.input_block_tables[speculator._group]
            return cache[table[row, num_read // speculator._block_size - 1]].clone()

        def spied_write(speculator: Any, first: Any, missed: Any, *args: Any) -> None:
            self.num_written += len(missed)
            if self.catches_up:
                write(speculator, first, missed, *args)

        def spied_pass(speculator: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_passes += 1
            return one_pass(speculator, *args, **kwargs)

        SwitchingSpeculator.propose = spied_propose  # type: ignore[method-assign]
        SwitchingSpeculator._write = spied_write  # type: ignore[assignment, method-assign]
        EagleSpeculator.propose = spied_pass


def spy(engine: Any) -> None:
    """Begin to watch the speculator."""
    engine.spy = Spy(engine)


def begin_script(
    engine: Any, arms: Sequence[Any], budget_bytes: int, catches_up: bool = True
) -> None:
    """Decide the arms by a script, and forget the drafts seen so far and all prefixes."""
    engine.reset_prefix_cache()
    _runner(engine).speculator.missed.budget_bytes = budget_bytes
    engine.spy.drafts, engine.spy.blocks = {}, {}
    engine.spy.num_passes = engine.spy.num_written = 0
    engine.spy.catches_up = catches_up
    engine.between_steps(lambda: engine.core.controller.set_strategy(Scripted(arms)))


def seen(engine: Any) -> dict[str, Any]:
    """Return the drafts by text, the passes of the draft model, and the rows of catch-up."""
    watch = engine.spy
    return {
        "drafts": watch.drafts,
        "blocks": watch.blocks,
        "passes": watch.num_passes,
        "written": watch.num_written,
    }


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


def _runner(engine: Any) -> Any:
    return engine.core.llm.collective_rpc(lambda worker: worker.model_runner)[0]
