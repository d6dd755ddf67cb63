"""The pool with fake engines: the asyncio half, without Ray or vLLM."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tlt.config.rollout import PoolConfig
from tlt.contracts import FinishReason, Sample, SampleRequest, SamplingSpec
from tlt.errors import ConfigError, EngineError, EngineGone, WeightMismatch
from tlt.rollout.client import Engine
from tlt.rollout.pool import RolloutPool
from tlt.rollout.recheck import Rechecks, Verdict


def request(index: int, max_tokens: int = 5) -> SampleRequest:
    return SampleRequest(str(index), (1,), SamplingSpec(max_tokens=max_tokens))


class FakeEngine:
    """Generates one token per tick for each of its slots."""

    def __init__(self, name: str, slots: int = 4, tick_s: float = 0.001) -> None:
        self.name, self.slots, self.tick_s = name, slots, tick_s
        self.waiting: list[SampleRequest] = []
        self.running: dict[str, list[Any]] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.dead = False
        self.stopped = False
        self.refuse: Exception | None = None
        self.refuse_weights: Exception | None = None
        self.rounds_by_batch = False
        self.break_off: set[str] = set()
        """Samples that end once by an error."""

    async def start(self) -> dict[str, Any]:
        await asyncio.sleep(self.tick_s)
        return {"slots": self.slots, "rounds_by_batch": self.rounds_by_batch}

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        if self.refuse:
            raise self.refuse
        self.waiting.extend(requests)

    async def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        taken = [r.sample_id for r in self.waiting if r.sample_id in set(sample_ids)]
        self.waiting = [r for r in self.waiting if r.sample_id not in set(taken)]
        return taken

    async def take_finished(self, timeout_s: float) -> list[Sample]:
        await asyncio.sleep(self.tick_s)
        if self.dead:
            raise EngineError("gone")
        while self.waiting and len(self.running) < self.slots:
            r = self.waiting.pop(0)
            self.running[r.sample_id] = [*self.drawn(r)]
        ended = []
        for sample_id, state in list(self.running.items()):
            state[1] -= 1
            if state[1] <= 0:
                del self.running[sample_id]
                reason: FinishReason = "error" if sample_id in self.break_off else "stop"
                self.break_off.discard(sample_id)
                ended.append(
                    Sample(sample_id, state[0], (), reason, self.name, 0, 0.0, 0.0, time.time())
                )
        return ended

    def drawn(self, request: SampleRequest) -> tuple[tuple[int, ...], int]:
        """Return the response's tokens, and the ticks that they take."""
        return (0,), request.sampling.max_tokens

    async def held(self) -> list[str]:
        return [*self.running, *(r.sample_id for r in self.waiting)]

    async def call(self, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (own := getattr(self, command.__name__, None)) is not None:
            return await own(*args)
        return await self.other(command.__name__, args)

    async def other(self, command: str, args: tuple[Any, ...]) -> Any:
        """Answer a command that is neither about requests nor samples."""
        self.calls.append((command, args))
        if self.refuse_weights:
            raise self.refuse_weights
        return 0.0

    async def stop(self, graceful: bool) -> None:
        self.stopped = True


class KeyedEngine(FakeEngine):
    """As with keyed noise, the request alone decides its response."""

    def drawn(self, request: SampleRequest) -> tuple[tuple[int, ...], int]:
        rng = random.Random(request.sampling.seed)
        length = rng.randint(1, request.sampling.max_tokens)
        return tuple(rng.randrange(100) for _ in range(length)), length


class Factory:
    def __init__(self, kind: type[FakeEngine] = FakeEngine, **kwargs: Any) -> None:
        self.kind = kind
        self.kwargs = kwargs
        self.made: dict[str, FakeEngine] = {}

    def __call__(self, name: str) -> FakeEngine:
        self.made[name] = self.kind(name, **self.kwargs)
        return self.made[name]


async def test_every_sample_once_and_engines_stop() -> None:
    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=3), factory) as pool:
        ids = [s.sample_id async for s in pool.generate(request(i) for i in range(100))]
    assert sorted(map(int, ids)) == list(range(100))
    assert all(engine.stopped for engine in factory.made.values())


async def test_a_lost_engine_is_replaced_and_nothing_is_lost() -> None:
    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=2), factory) as pool:
        ids = []
        async for sample in pool.generate(request(i, 8) for i in range(64)):
            ids.append(sample.sample_id)
            if len(ids) == 10:
                factory.made["engine-0"].dead = True
        await pool.wait_ready(2)
        assert sorted(map(int, ids)) == list(range(64))
        assert pool.num_restarts == 1
        assert "engine-0.1" in factory.made


async def test_samples_are_the_same_on_any_engine() -> None:
    """Two rollouts; an engine dies in each."""

    async def samples(num_engines: int) -> dict[str, tuple[int, ...]]:
        factory = Factory(KeyedEngine, slots=3)
        config = PoolConfig(num_engines=num_engines)
        found: dict[str, tuple[int, ...]] = {}
        async with RolloutPool(config, factory) as pool:
            for epoch in range(2):
                requests = [
                    SampleRequest(f"{epoch}/{i}", (i // 8,), SamplingSpec(max_tokens=40, seed=i))
                    for i in range(64)
                ]
                async for sample in pool.generate(requests):
                    assert sample.sample_id not in found
                    found[sample.sample_id] = sample.token_ids
                    if len(found) % 64 == 20:
                        factory.made[pool.engines[0]].dead = True
                await pool.wait_ready(num_engines)
        return found

    alone = await samples(1)
    assert len(alone) == 128
    assert await samples(4) == alone


async def test_kernels_that_round_by_batch_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def spawn(name: str) -> FakeEngine:
        engine = FakeEngine(name)
        engine.rounds_by_batch = True
        return engine

    async with RolloutPool(PoolConfig(num_engines=3), spawn):
        pass
    assert caplog.text.count("VLLM_BATCH_INVARIANT=1 in the engines' environment") == 1


async def test_samples_that_end_by_an_error_are_generated_again() -> None:
    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=2), factory) as pool:
        for engine in factory.made.values():
            engine.break_off = {"3", "7", "40"}
        samples = [s async for s in pool.generate(request(i) for i in range(64))]
        assert sorted(int(s.sample_id) for s in samples) == list(range(64))
        assert {s.finish_reason for s in samples} == {"stop"}
        assert 3 <= pool.num_broken <= 6
        assert pool.num_restarts == 0


async def test_a_sample_that_always_ends_by_an_error_ends_the_rollout() -> None:
    class Broken(set[str]):
        def discard(self, sample_id: object) -> None:
            pass

    async def main() -> None:
        factory = Factory()
        async with RolloutPool(PoolConfig(num_engines=2), factory) as pool:
            for engine in factory.made.values():
                engine.break_off = Broken({"3"})
            async for _ in pool.generate(request(i) for i in range(8)):
                pass

    with pytest.raises(EngineError, match="sample '3' was on 5 engines that were lost or broke it"):
        await main()


async def test_engines_that_end_by_themselves_say_nothing_against_the_weights() -> None:
    """The weights stay current even if all engines end; their successors load them."""
    torch = pytest.importorskip("torch")

    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=2), factory) as pool:
        for engine in list(factory.made.values()):
            engine.refuse_weights = WeightMismatch("not the learner's policy")
        await pool.update_policy([("w", torch.ones(2))], version=1)
        for engine in list(factory.made.values()):
            engine.dead = True  # its loop has ended
        ids = [s.sample_id async for s in pool.generate(request(i) for i in range(8))]
        assert len(ids) == 8
        assert factory.made["engine-0.1"].calls[0][1][1] == 1


async def test_a_drafter_that_taints_every_engine_is_taken_back() -> None:
    torch = pytest.importorskip("torch")

    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=2), factory) as pool:
        await pool.update_drafter([("w", torch.ones(2))], version=1)
        for engine in list(factory.made.values()):
            engine.refuse_weights = WeightMismatch("not the learner's policy")
        with pytest.raises(WeightMismatch):
            await pool.update_drafter([("w", torch.zeros(2))], version=2)
        assert pool.num_tainted == 2
        for engine in list(factory.made.values()):
            engine.dead = True
        ids = [s.sample_id async for s in pool.generate(request(i) for i in range(8))]
        assert len(ids) == 8
        assert factory.made["engine-0.1"].calls[0][1][1] == 1, "the drafter before"


async def test_a_successor_starts_with_the_current_weights() -> None:
    torch = pytest.importorskip("torch")

    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=1), factory) as pool:
        await pool.update_policy([("w", torch.ones(2))], version=3)
        factory.made["engine-0"].dead = True
        while "engine-0.1" not in factory.made or not factory.made["engine-0.1"].calls:
            await asyncio.sleep(0.001)
        assert factory.made["engine-0.1"].calls[0][0] == "update_policy"
        assert factory.made["engine-0.1"].calls[0][1][1] == 3


async def test_no_policy_update_in_the_middle_of_a_rollout() -> None:
    async with RolloutPool(PoolConfig(num_engines=1), Factory()) as pool:
        async for _ in pool.generate(request(i, 3) for i in range(20)):
            with pytest.raises(EngineError, match="samples are under way"):
                await pool.update_policy([], version=1)
            break


async def test_when_every_engine_is_gone_for_good_the_caller_hears_of_it() -> None:
    def spawn(name: str) -> FakeEngine:
        engine = FakeEngine(name)
        engine.dead = True
        return engine

    async def main() -> None:
        async with RolloutPool(PoolConfig(num_engines=2, max_restarts=1), spawn) as pool:
            async for _ in pool.generate([request(0)]):
                pass

    with pytest.raises(EngineError):
        await main()


@pytest.mark.parametrize(
    ("apart_s", "delivers", "survives"),
    [(3601 / 2, True, True), (1700.0, True, False), (3601 / 2, False, False)],
)
async def test_only_losses_within_a_window_count(
    apart_s: float, delivers: bool, survives: bool
) -> None:
    """But engines that fail one after the other without a sample are given up at any pace."""
    now_s, made = 0.0, dict[str, FakeEngine]()

    def spawn(name: str) -> FakeEngine:
        made[name] = FakeEngine(name)
        return made[name]

    settings = PoolConfig(num_engines=1, max_restarts=2, restart_window_s=3600)
    async with asyncio.timeout(10), RolloutPool(settings, spawn, lambda: now_s) as pool:
        for loss in range(8):
            if delivers:
                assert [s async for s in pool.generate([request(loss)])]
            list(made.values())[-1].dead = True
            while len(made) == loss + 1 and not (gave_up := pool.failure):
                await asyncio.sleep(0.001)
            if gave_up:
                break
            await pool.wait_ready(1)
            now_s += apart_s
    assert (len(made), pool.failure is None) == ((9, True) if survives else (3, False))


async def test_an_engine_that_never_starts_is_an_error_and_not_a_wait() -> None:
    class Stuck(FakeEngine):
        async def start(self) -> dict[str, Any]:
            await asyncio.sleep(60)
            raise AssertionError

    async def main() -> None:
        settings = PoolConfig(num_engines=2, start_timeout_s=0.05)
        async with RolloutPool(
            settings, lambda name: (Stuck if name == "engine-1" else FakeEngine)(name)
        ):
            pass

    with pytest.raises(EngineError, match="engine-1 did not start within"):
        await main()


async def test_a_wrong_request_fails_the_rollout_with_its_reason() -> None:
    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=1), factory) as pool:
        factory.made["engine-0"].refuse = ConfigError("sample 0: too long")
        with pytest.raises(ConfigError, match="too long"):
            async for _ in pool.generate([request(0)]):
                pass


# --- engines that fail in part ------------------------------------------------------------------


class Deaf(FakeEngine):
    """Fails its second submission, and lives on."""

    submissions = 0

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        self.submissions += 1
        if self.submissions == 2 and self.name == "engine-0":
            raise EngineError("the network was away")
        await super().submit(requests)


async def test_requests_that_an_engine_did_not_take_are_generated_elsewhere() -> None:
    made: dict[str, FakeEngine] = {}

    def spawn(name: str) -> FakeEngine:
        made[name] = Deaf(name)
        return made[name]

    async with asyncio.timeout(10), RolloutPool(PoolConfig(num_engines=2), spawn) as pool:
        ids = [s.sample_id async for s in pool.generate(request(i) for i in range(64))]
        await pool.wait_ready(2)
        assert sorted(map(int, ids)) == list(range(64))
        assert made["engine-0"].stopped
        assert (pool.num_restarts, "engine-0.1" in made) == (1, True)


class Slow(FakeEngine):
    """Takes long to receive requests; none of them can be withdrawn before."""

    num_withdrawals = 0

    async def submit(self, requests: Sequence[SampleRequest]) -> None:
        if self.name == "engine-0":
            await asyncio.sleep(0.2)
        await super().submit(requests)

    async def withdraw(self, sample_ids: Sequence[str]) -> list[str]:
        self.num_withdrawals += 1
        return await super().withdraw(sample_ids)


async def test_requests_on_their_way_are_not_recalled_over_and_over() -> None:
    made: dict[str, Slow] = {}

    def spawn(name: str) -> Slow:
        made[name] = Slow(name, slots=2)
        return made[name]

    async with asyncio.timeout(10), RolloutPool(PoolConfig(num_engines=2), spawn) as pool:
        ids = [s.sample_id async for s in pool.generate(request(i, 3) for i in range(12))]
    assert sorted(map(int, ids)) == list(range(12))
    assert sum(engine.num_withdrawals for engine in made.values()) <= 12


class Hung(FakeEngine):
    """Answers everything but one method, which it is stuck in, and lives on."""

    stuck_in = ""

    async def call(self, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.name == "engine-0" and command.__name__ == self.stuck_in:
            await asyncio.sleep(60)
        return await super().call(command, *args)

    async def stop(self, graceful: bool) -> None:
        self.stopped = True
        if self.name == "engine-0" and self.stuck_in == "stop":
            await asyncio.sleep(60)


HUNG_LIMITS = PoolConfig(num_engines=2, health_timeout_s=0.1, command_timeout_s=0.2)


@pytest.mark.parametrize("method", ["update_policy", "update_drafter", "sleep", "wake", "stats"])
async def test_an_engine_that_hangs_in_a_command_is_replaced(method: str) -> None:
    torch = pytest.importorskip("torch")
    made: dict[str, Hung] = {}

    def spawn(name: str) -> Hung:
        made[name] = Hung(name)
        return made[name]

    async with asyncio.timeout(10), RolloutPool(HUNG_LIMITS, spawn) as pool:
        made["engine-0"].stuck_in = method
        if method == "update_policy":
            assert len(await pool.update_policy([("w", torch.ones(2))], 1)) == 1
        elif method == "update_drafter":
            assert len(await pool.update_drafter([("w", torch.ones(2))], 1)) == 1
        else:
            assert len(await pool.call_all(getattr(Engine, method))) == 1
        while "engine-0.1" not in pool.engines:
            await asyncio.sleep(0.005)
        assert made["engine-0"].stopped
        ids = [s.sample_id async for s in pool.generate(request(i) for i in range(16))]
        assert len(ids) == 16


@pytest.mark.parametrize("method", ["withdraw", "stop"])
async def test_an_engine_that_hangs_in_a_rollout_is_replaced(method: str) -> None:
    made: dict[str, Hung] = {}

    def spawn(name: str) -> Hung:
        made[name] = Hung(name, slots=1)
        return made[name]

    async with asyncio.timeout(10), RolloutPool(HUNG_LIMITS, spawn) as pool:
        made["engine-0"].stuck_in = method
        made["engine-0"].dead = method == "stop"
        requests = [request(i, 400 if i == 0 else 2) for i in range(12)]
        ids = [s.sample_id async for s in pool.generate(requests)]
        assert sorted(map(int, ids)) == list(range(12))
        while "engine-0.1" not in pool.engines:
            await asyncio.sleep(0.005)


# --- rechecks -----------------------------------------------------------------------------------


class Rechecking(FakeEngine):
    """Rechecks until it is told to end, unless `quick`."""

    quick = False

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name, **kwargs)
        self.ended = asyncio.Event()

    async def other(self, command: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((command, args))
        if command == "recheck" and not self.quick:
            await self.ended.wait()
            if self.dead:
                raise EngineError("gone")
            return None
        if command == "end_recheck":
            self.ended.set()
        return Verdict(None, 0.0) if command == "recheck" else None


class Quick(Rechecking):
    quick = True


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def ready(self, engine: str, report: Any) -> None: ...

    def idle(self, engine: str) -> None:
        self.heard.append(engine)

    async def needed(self, engine: str) -> None: ...


async def rollout_with_rechecks(
    kind: type[Rechecking],
    on_sample: Callable[[dict[str, Rechecking]], None] = lambda made: None,
    harvest: bool = True,
) -> tuple[dict[str, Rechecking], dict[str, float], list[str], Listener]:
    """Generate 7 short samples and a long one on two engines; recheck all of them."""
    made: dict[str, Rechecking] = {}

    def spawn(name: str) -> Rechecking:
        made[name] = kind(name)
        return made[name]

    rechecks, listener = Rechecks(1.0, 10, "float32"), Listener()
    pool = RolloutPool(PoolConfig(num_engines=2), spawn)
    pool.recheck_with(rechecks)
    if harvest:
        pool.listen(listener)
    ids = []
    async with pool:
        requests = [
            SampleRequest(str(i), (1,), SamplingSpec(60 if i == 0 else 2, seed=i), rl_step=1)
            for i in range(8)
        ]
        async with asyncio.timeout(10):
            async for sample in pool.generate(requests):
                ids.append(sample.sample_id)
                on_sample(made)
            await asyncio.sleep(0.02)
    return made, rechecks.record(), ids, listener


def calls(made: dict[str, Rechecking], method: str) -> list[tuple[str, Any]]:
    return [(name, args[0]) for name, e in made.items() for m, args in e.calls if m == method]


async def test_an_idle_engine_makes_one_recheck_and_is_then_said_to_be_idle() -> None:
    made, record, ids, listener = await rollout_with_rechecks(Quick)
    assert sorted(ids, key=int) == [str(i) for i in range(8)], "no sample twice, and no recheck"
    [(name, recheck)] = calls(made, "recheck")
    assert recheck.token_ids == (0,)
    assert recheck.request.prompt_token_ids == (1,)
    assert record["recheck/samples"] == 1
    assert record["recheck/ended_early"] == 0
    assert listener.heard == [name]


async def test_without_harvest_idle_engines_make_all_rechecks_that_are_due() -> None:
    made, record, ids, _ = await rollout_with_rechecks(Quick, harvest=False)
    assert len(ids) == 8
    assert len(calls(made, "recheck")) == record["recheck/samples"] > 1
    assert record["recheck/samples"] + record["recheck/left_out"] == 8


async def test_a_rollout_ends_without_waiting_for_rechecks() -> None:
    made, record, ids, listener = await rollout_with_rechecks(Rechecking)
    assert len(ids) == 8
    [(name, recheck)] = calls(made, "recheck")
    assert calls(made, "end_recheck") == [(name, recheck.request.sample_id)]
    assert (record["recheck/samples"], record["recheck/ended_early"]) == (0, 1)
    assert listener.heard == [], "the rollout was over when the recheck was"


async def test_an_engine_that_is_lost_in_a_recheck_is_replaced() -> None:
    def lose(made: dict[str, Rechecking]) -> None:
        for name, _ in calls(made, "recheck"):
            made[name].dead = True
            made[name].ended.set()

    made, record, ids, _ = await rollout_with_rechecks(Rechecking, lose)
    assert len(ids) == 8
    [(name, _)] = calls(made, "recheck")
    assert f"{name}.1" in made
    assert (record["recheck/samples"], record["recheck/ended_early"]) == (0, 1)


async def test_ten_thousand_samples_over_64_engines() -> None:
    async def main() -> float:
        factory = Factory(slots=32, tick_s=0.005)
        async with RolloutPool(PoolConfig(num_engines=64), factory) as pool:
            started = time.process_time()
            ids = [s.sample_id async for s in pool.generate(request(i, 3) for i in range(10_000))]
            spent = time.process_time() - started
            assert len(set(ids)) == len(ids) == 10_000
            return spent

    per_sample_ms = 1000 * await main() / 10_000
    assert per_sample_ms < 1.0, f"{per_sample_ms:.3f} ms a sample, the fake engines included"


async def test_one_engine_that_fails_a_command_is_replaced_and_the_run_goes_on() -> None:
    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=2), factory) as pool:
        factory.made["engine-0"].refuse_weights = EngineError("no counters here")
        assert len(await pool.stats()) == 1
        async with asyncio.timeout(5):
            while "engine-0.1" not in pool.engines:
                await asyncio.sleep(0.001)
        assert len(await pool.stats()) == 2
        for engine in factory.made.values():
            engine.refuse_weights = EngineError("no such strategy")
        with pytest.raises(EngineError, match="no such strategy"):  # the call is wrong
            await pool.set_strategy({})
        assert len(pool.engines) == 2


async def test_a_command_that_one_engine_fails_and_the_others_miss_is_not_wrong() -> None:
    factory = Factory()
    async with RolloutPool(PoolConfig(num_engines=2), factory) as pool:
        factory.made["engine-0"].refuse_weights = EngineError("the call did not arrive")
        factory.made["engine-1"].refuse_weights = EngineGone("killed")
        assert await pool.stats() == []
        async with asyncio.timeout(5):
            while set(pool.engines) != {"engine-0.1", "engine-1.1"}:
                await asyncio.sleep(0.001)
        assert len(await pool.stats()) == 2


async def test_an_engine_that_is_being_stopped_does_not_outlive_the_pool() -> None:
    class SlowStop(FakeEngine):
        async def stop(self, graceful: bool) -> None:
            await asyncio.sleep(0.05)
            self.stopped = True

    made: list[SlowStop] = []

    def spawn(name: str) -> SlowStop:
        made.append(SlowStop(name))
        return made[-1]

    async with RolloutPool(PoolConfig(num_engines=1), spawn) as pool:
        made[0].dead = True
        while pool.engines:
            await asyncio.sleep(0.001)
    assert all(engine.stopped for engine in made)
