"""The pool with fake engines: the asyncio half, without Ray or vLLM."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_engines import Engines, generate, request, started, until

from tlt.config.rollout import PoolConfig
from tlt.contracts import Text
from tlt.errors import ConfigError, EngineError, EngineGone, WeightMismatch
from tlt.rollout import pool as pool_module
from tlt.rollout.client import Engine
from tlt.rollout.pool import RolloutPool
from tlt.rollout.recheck import Rechecks

# --- samples ------------------------------------------------------------------------------------


async def test_ten_thousand_samples_over_64_engines() -> None:
    made = Engines(slots=32, tick_s=0.005)
    async with started(made, 64) as pool:
        begun = time.process_time()
        await generate(pool, 10_000, 3)
        per_sample_ms = 1000 * (time.process_time() - begun) / 10_000
    assert per_sample_ms < 1.0, f"{per_sample_ms:.3f} ms a sample, the fake engines included"
    assert all(engine.stopped for engine in made.values())


async def test_samples_are_the_same_on_any_engine() -> None:
    """Two rollouts; an engine dies in each, and is replaced."""

    async def samples(num_engines: int) -> dict[str, tuple[int, ...]]:
        made = Engines(is_keyed=True, slots=3)
        found: dict[str, tuple[int, ...]] = {}
        async with started(made, num_engines) as pool:
            for epoch in range(2):
                requests = [request(64 * epoch + i, 40) for i in range(64)]
                async for sample in pool.generate(requests):
                    assert sample.sample_id not in found
                    found[sample.sample_id] = sample.token_ids
                    if len(found) % 64 == 20:
                        made[pool.engines[0]].dead = True
                await pool.wait_ready(num_engines)
            assert (pool.num_restarts, len(made)) == (2, num_engines + 2)
        return found

    alone = await samples(1)
    assert len(alone) == 128
    assert await samples(4) == alone


async def test_kernels_that_round_by_batch_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async with started(Engines(rounds_by_batch=True), 3):
        pass
    assert sum("VLLM_BATCH_INVARIANT=1" in record.message for record in caplog.records) == 1


async def test_samples_that_end_by_an_error_are_generated_again() -> None:
    made = Engines()
    async with started(made) as pool:
        for engine in made.values():
            engine.break_off = {"3", "7", "40"}
        assert {s.finish_reason for s in await generate(pool, 64)} == {"stop"}
        assert 3 <= pool.num_broken <= 6
        assert pool.num_restarts == 0


async def test_a_sample_that_always_ends_by_an_error_ends_the_rollout() -> None:
    async with started(Engines(break_off={"3"}, always_break=True)) as pool:
        with pytest.raises(EngineError, match="sample '3' was on 5 engines"):
            await generate(pool, 8)


async def test_a_wrong_request_fails_the_rollout_with_its_reason() -> None:
    async with started(Engines(refuse_requests=ConfigError("too long"))) as pool:
        with pytest.raises(ConfigError, match="too long"):
            await generate(pool, 1)


@pytest.mark.parametrize(
    "fault", ["killed", "failed by itself", "failed by itself, said first", "refused a drafter"]
)
async def test_the_successor_continues_what_a_killed_engine_has_drawn(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws from the start what an engine drew that may not have held the policy."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(pool_module, "POLL_S", 0.0)
    made = Engines()
    async with started(made, num_engines=2) as pool:
        rollout = asyncio.create_task(generate(pool, 1, max_tokens=300))
        await until(lambda: any(engine.submitted for engine in made.values()))
        (engine,) = (engine for engine in made.values() if engine.submitted)
        engine.texts = [("0", 0, Text((5, 6, 7), (-0.5,) * 3, policy_version=0))]
        await until(lambda: not engine.texts)
        if fault == "refused a drafter":
            engine.refuse_commands = WeightMismatch("not the learner's policy")
            await pool.update_drafter([("w", torch.ones(2))], version=1)
        elif fault == "failed by itself, said first":
            engine.refuse_commands, engine.stuck_in = EngineError("its loop ended"), "take_finished"
            await pool.stats()
        else:
            error = EngineGone if fault == "killed" else EngineError
            engine.error, engine.dead = error("gone"), True
        await until(lambda: sum(len(e.submitted) for e in made.values()) == 2)
        (again,) = (e.submitted[0] for e in made.values() if e is not engine and e.submitted)
        kept = Text((5, 6), (-0.5,) * 2, policy_version=0) if fault == "killed" else None
        assert again.begun == kept
        assert pool.num_kept_tokens == (2 if kept else 0)
        await rollout


# --- weights ------------------------------------------------------------------------------------


async def test_engines_that_end_by_themselves_say_nothing_against_the_weights() -> None:
    """The weights stay current even if all engines end; their successors load them."""
    torch = pytest.importorskip("torch")
    made = Engines()
    async with started(made) as pool:
        made.set(refuse_commands=WeightMismatch("not the learner's policy"))
        await pool.update_policy([("w", torch.ones(2))], version=1)
        made.set(dead=True)  # their loops have ended
        await generate(pool, 8)
        command, args = made["engine-0.1"].calls[0]
        assert (command, args[1]) == ("update_policy", 1)


async def test_a_drafter_that_taints_every_engine_is_taken_back() -> None:
    torch = pytest.importorskip("torch")
    made = Engines()
    async with started(made) as pool:
        await pool.update_drafter([("w", torch.ones(2))], version=1)
        made.set(refuse_commands=WeightMismatch("not the learner's policy"))
        with pytest.raises(WeightMismatch):
            await pool.update_drafter([("w", torch.zeros(2))], version=2)
        assert pool.num_tainted == 2
        made.set(dead=True)
        await generate(pool, 8)
        assert made["engine-0.1"].calls[0][1][1] == 1, "the drafter before"


async def test_no_policy_update_in_the_middle_of_a_rollout() -> None:
    async with started(Engines()) as pool:
        async for _ in pool.generate(request(i, 3) for i in range(20)):
            with pytest.raises(EngineError, match="under way"):
                await pool.update_policy([], version=1)
            break


# --- engines that fail --------------------------------------------------------------------------


async def test_when_every_engine_is_gone_for_good_the_caller_hears_of_it() -> None:
    with pytest.raises(EngineError):
        async with started(Engines(dead=True), max_restarts=1) as pool:
            await generate(pool, 1)


@pytest.mark.parametrize(
    ("apart_s", "delivers", "survives"),
    [(3601 / 2, True, True), (1700.0, True, False), (3601 / 2, False, False)],
)
async def test_only_losses_within_a_window_count(
    apart_s: float, delivers: bool, survives: bool
) -> None:
    """But engines that fail one after the other without a sample are given up at any pace."""
    now_s, made = 0.0, Engines()
    settings = PoolConfig(num_engines=1, max_restarts=2, restart_window_s=3600)
    async with asyncio.timeout(10), RolloutPool(settings, made, lambda: now_s) as pool:
        for loss in range(8):
            if delivers:
                await generate(pool, 1)
            made.set(dead=True)
            await until(lambda: len(made) > loss + 1 or pool.failure)  # noqa: B023
            if pool.failure:
                break
            await pool.wait_ready(1)
            now_s += apart_s
    assert (len(made), pool.failure is None) == ((9, True) if survives else (3, False))


async def test_an_engine_that_never_starts_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(EngineError, match="did not start within"):
        async with started(Engines(stuck_in="start"), start_timeout_s=0.05):
            pass


async def test_requests_that_an_engine_did_not_take_are_generated_elsewhere() -> None:
    made = Engines()
    async with started(made) as pool:
        made["engine-0"].fail_submission = 2
        await generate(pool, 64)
        await pool.wait_ready(2)
        assert made["engine-0"].stopped
        assert (pool.num_restarts, "engine-0.1" in made) == (1, True)


async def test_requests_on_their_way_are_not_recalled_over_and_over() -> None:
    made = Engines(slots=2)
    async with started(made) as pool:
        made["engine-0"].submit_s = 0.2
        await generate(pool, 12, 3)
    assert sum(engine.num_withdrawals for engine in made.values()) <= 12


HUNG_LIMITS: dict[str, Any] = {"health_timeout_s": 0.1, "command_timeout_s": 0.2}


@pytest.mark.parametrize("method", ["update_policy", "update_drafter", "stats"])
async def test_an_engine_that_hangs_in_a_command_is_replaced(method: str) -> None:
    torch = pytest.importorskip("torch")
    made = Engines()
    async with started(made, **HUNG_LIMITS) as pool:
        made["engine-0"].stuck_in = method
        if method == "stats":
            assert len(await pool.call_all(Engine.stats)) == 1
        else:
            assert len(await getattr(pool, method)([("w", torch.ones(2))], 1)) == 1
        await until(lambda: "engine-0.1" in pool.engines)
        assert made["engine-0"].stopped
        await generate(pool, 16)


@pytest.mark.parametrize("method", ["withdraw", "stop"])
async def test_an_engine_that_hangs_in_a_rollout_is_replaced(method: str) -> None:
    made = Engines(slots=1)
    async with started(made, **HUNG_LIMITS) as pool:
        made["engine-0"].stuck_in = method
        made["engine-0"].dead = method == "stop"
        requests = [request(i, 400 if i == 0 else 2) for i in range(12)]
        ids = [s.sample_id async for s in pool.generate(requests)]
        assert sorted(map(int, ids)) == list(range(12))
        await until(lambda: "engine-0.1" in pool.engines)


async def test_one_engine_that_fails_a_command_is_replaced_and_the_run_goes_on() -> None:
    """The others may be lost in that command; a command that all fail is wrong."""
    made = Engines()
    async with started(made, 3) as pool:
        made["engine-0"].refuse_commands = EngineError("no counters here")
        made["engine-1"].refuse_commands = EngineGone("killed")
        made["engine-2"].refuse_commands = EngineGone("killed")
        assert await pool.stats() == []
        await until(lambda: set(pool.engines) == {f"engine-{i}.1" for i in range(3)})
        assert len(await pool.stats()) == 3
        made.set(refuse_commands=EngineError("no such strategy"))
        with pytest.raises(EngineError, match="no such strategy"):  # the call is wrong
            await pool.set_strategy({})
        assert len(pool.engines) == 3


async def test_an_engine_that_is_being_stopped_does_not_outlive_the_pool() -> None:
    made = Engines(stop_s=0.05)
    async with started(made, 1) as pool:
        made.set(dead=True)
        await until(lambda: not pool.engines)
    assert all(engine.stopped for engine in made.values())


# --- rechecks -----------------------------------------------------------------------------------


class Heard(list[str]):
    """The engines that the harvest hears to be idle."""

    def ready(self, engine: str, report: Any) -> None: ...

    def idle(self, engine: str, for_s: float = math.inf) -> None:
        self.append(engine)

    async def needed(self, engine: str) -> None: ...


async def rollout_with_rechecks(
    made: Engines, on_sample: Callable[[], None] = lambda: None, harvest: bool = True
) -> tuple[dict[str, float], Heard]:
    """Generate 7 short samples and a long one on two engines; recheck all of them."""
    rechecks, heard, ids = Rechecks(1.0, 10, "float32"), Heard(), []
    async with started(made) as pool:
        pool.idle.rechecks = rechecks
        if harvest:
            pool.idle.listener = heard
        async for sample in pool.generate(request(i, 60 if i == 0 else 2) for i in range(8)):
            ids.append(sample.sample_id)
            on_sample()
        await asyncio.sleep(0.02)
    assert sorted(ids) == [str(i) for i in range(8)], "no sample twice, and no recheck"
    return rechecks.record(), heard


async def test_an_idle_engine_makes_one_recheck_and_is_then_said_to_be_idle() -> None:
    record, heard = await rollout_with_rechecks(made := Engines())
    [(name, recheck)] = made.commands("recheck")
    assert recheck.token_ids == (0,)
    assert recheck.request.prompt_token_ids == (1,)
    assert (record["recheck/samples"], record["recheck/ended_early"]) == (1, 0)
    assert heard == [name]


async def test_without_harvest_idle_engines_make_all_rechecks_that_are_due() -> None:
    record, _ = await rollout_with_rechecks(made := Engines(), harvest=False)
    assert len(made.commands("recheck")) == record["recheck/samples"] > 1
    assert record["recheck/samples"] + record["recheck/left_out"] == 8


async def test_a_rollout_ends_without_waiting_for_rechecks() -> None:
    record, heard = await rollout_with_rechecks(made := Engines(long_rechecks=True))
    [(name, recheck)] = made.commands("recheck")
    assert made.commands("end_recheck") == [(name, recheck.request.sample_id)]
    assert (record["recheck/samples"], record["recheck/ended_early"]) == (0, 1)
    assert heard == [], "the rollout was over when the recheck was"


async def test_an_engine_that_is_lost_in_a_recheck_is_replaced() -> None:
    made = Engines(long_rechecks=True)

    def lose() -> None:
        for name, _ in made.commands("recheck"):
            made[name].dead = True
            made[name].recheck_ended.set()

    record, _ = await rollout_with_rechecks(made, lose)
    [(name, _)] = made.commands("recheck")
    assert f"{name}.1" in made
    assert (record["recheck/samples"], record["recheck/ended_early"]) == (0, 1)
