"""Spies beside an engine, in its process: they show that skipped draft passes are caught up on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine_process import EngineProcess


class Scripted:
    """A strategy that repeats the arms of a script."""

    def __init__(self, arms: Sequence[Any]) -> None:
        from tlt.strategy.spec import parse_arm

        self._arms = [parse_arm(arm) for arm in arms]
        self._step = 0

    def arms(self, num_decodes: int | None = None) -> frozenset[Any]:
        return frozenset(self._arms)

    def decide(self, context: Any) -> Any:
        self._step += 1
        return self._arms[(self._step - 1) % len(self._arms)]

    def observe(self, report: Any) -> None:
        pass


class Spy:
    """The draft model's passes, and by text its drafts and the last whole block of its KV cache."""

    def __init__(self, missed: Any) -> None:
        self.missed = missed
        self.begin(0, catches_up=True)

    def begin(self, budget_bytes: int, catches_up: bool) -> None:
        self.missed.budget_bytes = budget_bytes
        self.catches_up = catches_up
        self.seen: dict[str, Any] = {"drafts": {}, "blocks": {}, "passes": 0, "written": 0}

    def note(
        self, text: Sequence[int], drafts: Any, cache: Any, table: Any, block_size: int
    ) -> None:
        last = (len(text) - 1) // block_size - 1  # the last token has not been read
        self.seen["drafts"][tuple(text)] = drafts.tolist()
        self.seen["blocks"][tuple(text)] = cache[table[last]].numpy().copy()

    def count(self, switching: Any, write: str, rows: int, eagle: Any) -> None:
        """Count passes, and rows that `write` catches up on: its argument number `rows`."""
        written, one_pass = getattr(switching, write), eagle.propose

        def spied_write(drafter: Any, *args: Any) -> None:
            self.seen["written"] += len(args[rows])
            if self.catches_up:
                written(drafter, *args)

        def spied_pass(drafter: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen["passes"] += 1
            return one_pass(drafter, *args, **kwargs)

        setattr(switching, write, spied_write)
        eagle.propose = spied_pass


def spy_v1(engine: Any) -> None:
    """Begin to watch the proposer of the V1 runner."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    from tlt.vllm.v1.proposer import SwitchingProposer

    spy = engine.spy = Spy(_runner(engine).drafter.missed)
    propose = SwitchingProposer.propose

    def spied_propose(proposer: Any, **inputs: Any) -> Any:
        proposed = propose(proposer, **inputs)
        batch = proposer.input_batch
        (layer,) = proposer._draft_attn_layer_names
        cache = proposer.compilation_config.static_forward_context[layer].kv_cache
        tables = inputs["common_attn_metadata"].block_table_tensor
        for row in range(len(batch.req_ids) if proposer.drafter == "eagle3" else 0):
            if proposer.discarded[row]:
                continue  # a prefill: the request drafts nothing yet
            sampled = [t for t in proposer.sampled_token_ids[row].tolist() if t >= 0]
            before = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist()
            text = [*before, *sampled]
            spy.note(text, proposed[row], cache, tables[row], proposer.block_size)
        return proposed

    SwitchingProposer.propose = spied_propose  # type: ignore[assignment, method-assign]
    spy.count(SwitchingProposer, "write_missed", 0, EagleProposer)


def spy_v2(engine: Any) -> None:
    """Begin to watch the speculator of the V2 runner."""
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

    from tlt.vllm.v2.speculator import SwitchingSpeculator

    runner = _runner(engine)
    spy = engine.spy = Spy(runner.speculator.missed)
    propose = SwitchingSpeculator.propose

    def spied_propose(speculator: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        proposed = propose(speculator, batch, *args, **kwargs)
        (layer,) = speculator.draft_attn_layer_names
        cache = runner.compilation_config.static_forward_context[layer].kv_cache
        tables = speculator.block_tables.input_block_tables[speculator._group]
        slots = batch.idx_mapping_np[: batch.num_reqs].tolist()
        for row, slot in enumerate(slots if speculator.drafter == "eagle3" else []):
            if args[4][row] > 0:  # a token was sampled
                states = runner.req_states
                num_tokens = int(states.total_len.gpu[slot])
                text = states.all_token_ids.gpu[slot, :num_tokens].tolist()
                drafts = proposed[row, : kwargs["num_speculative_tokens"]]
                spy.note(text, drafts, cache, tables[row], speculator._block_size)
        return proposed

    SwitchingSpeculator.propose = spied_propose  # type: ignore[method-assign]
    spy.count(SwitchingSpeculator, "_write", 1, EagleSpeculator)


def _runner(engine: Any) -> Any:
    return engine.core.llm.collective_rpc(lambda worker: worker.model_runner)[0]


def begin_script(engine: Any, arms: Sequence[Any], budget_bytes: int, catches_up: bool) -> None:
    """Decide the arms by a script, and forget the drafts seen so far and all prefixes."""
    engine.reset_prefix_cache()
    engine.spy.begin(budget_bytes, catches_up)
    engine.between_steps(lambda: engine.core.controller.set_strategy(Scripted(arms)))


def seen(engine: Any) -> dict[str, Any]:
    """Return drafts and blocks by text, the passes of the draft model, and the rows caught up."""
    found: dict[str, Any] = engine.spy.seen
    return found


def check_catch_up(
    engine: EngineProcess, arms: Sequence[Any], budget_bytes: int, tokens: Callable[[], Any]
) -> None:
    """Check that skipping the draft model and catching up equals running it in every step."""
    import numpy as np

    runs, drawn = [], []
    for settings in ((0, True), (budget_bytes, True), (budget_bytes, False)):
        engine.call(begin_script, arms, *settings)
        drawn.append(tokens())
        runs.append(engine.call(seen))
    assert drawn[0] == drawn[1] == drawn[2]
    always, skipping, never = runs
    assert always["written"] == 0 < skipping["written"]
    assert skipping["passes"] < 0.9 * always["passes"]
    # A draft depends only on the text. Not every run drafts for the same texts.
    common = always["drafts"].keys() & skipping["drafts"].keys()
    assert len(common) > 5
    for text in common:
        assert skipping["drafts"][text] == always["drafts"][text]
        ours, theirs = skipping["blocks"][text], always["blocks"][text]
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    common = always["blocks"].keys() & never["blocks"].keys()
    differing = [t for t in common if not np.allclose(never["blocks"][t], always["blocks"][t])]
    assert differing, "the comparison cannot fail"
