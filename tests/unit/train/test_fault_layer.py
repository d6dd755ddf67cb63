"""A whole run under seeded faults: the real loop, pool, learner group, harvest and checkpoints.

Engines, ranks and trainers are light, and every call to them goes through the layer of faults, in
simulated time. The driver may be killed, and resumes. A policy is one number, which follows from
all samples of all RL steps, and a sample's tokens follow from its seed and that number. So a run
whose last policy equals the policy of the undisturbed run has lost nothing, has done nothing twice,
and has trained on nothing bad. `TLT_FAULT_SEEDS` sets the number of seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

from fault_layer import Layer, batches, run  # noqa: E402
from light_engines import Engine, LightProcess, numbers  # noqa: E402
from light_ranks import KILL_S, Rank, RankHandle  # noqa: E402
from light_tasks import Chat, Rewards, Source, ToolChat  # noqa: E402
from light_tools import SETTINGS, Tools, Turn, draw  # noqa: E402
from light_trainers import Trainers  # noqa: E402
from small_run import small_run  # noqa: E402

from tlt.config.train import AlgorithmConfig, TrainConfig  # noqa: E402
from tlt.contracts import SampleRequest  # noqa: E402
from tlt.harvest.actor import TrainerPlace, pack  # noqa: E402
from tlt.harvest.coordinator import ANSWER_S, CoordinatorSettings  # noqa: E402
from tlt.harvest.forecast import TailForecast  # noqa: E402
from tlt.harvest.leases import LeaseSettings  # noqa: E402
from tlt.harvest.published import VERSION  # noqa: E402
from tlt.harvest.session import HarvestSession  # noqa: E402
from tlt.learner.calls import RankFailed  # noqa: E402
from tlt.learner.group import LearnerGroup  # noqa: E402
from tlt.node.weights import SharedWeights  # noqa: E402
from tlt.observe.live import Live  # noqa: E402
from tlt.observe.record import read  # noqa: E402
from tlt.observe.sinks import Sinks  # noqa: E402
from tlt.observe.timekeeper import NoTimekeeper  # noqa: E402
from tlt.rollout.client import SWAP_S, place_of  # noqa: E402
from tlt.rollout.pool import RolloutPool  # noqa: E402
from tlt.rollout.recheck import Rechecks  # noqa: E402
from tlt.train.folder import RunFolder  # noqa: E402
from tlt.train.loop import Components, Training  # noqa: E402
from tlt.train.records import RunLog  # noqa: E402
from tlt.train.signals import Termination  # noqa: E402
from tlt.train.sync import HostSync  # noqa: E402

NUM_STEPS = 5
KNOWN = (108, 463, 765)
"""Later seeds that have found something: an engine that outlived the pool, because its end was
broken off, and a command that failed in one engine while the others died."""
MAX_ENGINE_FAULTS = 4
"""Faults of engines in an RL step: five losses of one sample would rightly end the run."""
LEASES = LeaseSettings(min_s=0.1, lease_s=12.0, stop_timeout_s=2.0, max_leases=3)
HARVEST = CoordinatorSettings(LEASES, session_s=1.0, publish=True)
RELEASE_S = LEASES.stop_timeout_s + 2 * ANSWER_S + SWAP_S + ANSWER_S
"""Most seconds that harvest may keep a run waiting at the end of a rollout."""
LIMIT_S = 6000.0  # simulated seconds that a run may take, its restarts included


def config(out: Path, extra_prompts: int, with_tools: bool) -> TrainConfig:
    environment = {"environment": "light_tools:Notebook"} if with_tools else {}
    sampling = {"group_size": 3, "max_tokens": 400 if with_tools else 32}
    return small_run(
        run={"out": str(out), "num_steps": NUM_STEPS},
        task={"name": "gcd", **environment},
        tools=SETTINGS,
        sampling={**sampling, "max_extra_prompts": extra_prompts},
        pool={
            **{"num_engines": 3, "prefetch": 1, "max_restarts": 1000},
            **{"health_timeout_s": 6.0, "command_timeout_s": 8.0, "start_timeout_s": 30.0},
        },
        learner={"num_ranks": 2, "timeout_s": 15.0, "max_restarts": 1000},
        checkpoint={"every_steps": 2, "keep": 2},
    )


class World:
    """Everything outside the driver, and what must hold of it."""

    def __init__(
        self,
        seed: int | None,
        drafter: Path,
        extra_prompts: int = 0,
        with_tools: bool = False,
        lost: dict[Turn, str] | None = None,
    ) -> None:
        """`lost` are the answers of tools that are lost, and what the policy reads instead."""
        self.quiet, self.extra_prompts, self.with_tools = seed is None, extra_prompts, with_tools
        parts = ("engine", "rank", "trainer", "tool")
        self.layers = [Layer(f"{seed}/{part}", 0.0, 3.0) for part in parts]
        self.tools = Tools(self.layers[3], lost)
        self.draw: Callable[[random.Random, SampleRequest], tuple[int, ...]]
        self.draw = draw if with_tools else numbers
        rng = random.Random(f"{seed}/driver")
        self.dies_after_s = None if self.quiet or rng.random() < 0.6 else rng.uniform(5, 60)
        """When the driver is killed, if it is."""
        self.dies_after_step = 0
        """The RL step after which the driver is killed; 0 is none."""
        self.death = asyncio.Event()
        self.tools.driver_dies = self.death.set
        if with_tools and not self.quiet and rng.random() < 0.7:
            self.tools.driver_dies_at = rng.randrange(1, 250)
        self.drafter = drafter
        self.engines: list[Engine] = []
        self.trainers = Trainers(self.layers[2], self.is_used, KILL_S, Blob)
        self.drafters: dict[int, int] = {}
        """Weights of every drafter that an engine loaded, by the drafter's number."""
        self.shared: list[SharedWeights] = []
        """Files that ranks have written."""

    def begin_faults(self) -> None:
        if not self.quiet:
            self.layers[0].left = MAX_ENGINE_FAULTS
            for layer, rate in zip(self.layers, (0.02, 0.02, 0.05, 0.02), strict=True):
                layer.rate = rate

    def step_ended(self, record: Mapping[str, float]) -> None:
        self.layers[0].left = MAX_ENGINE_FAULTS
        assert record.get("harvest/release_s", 0.0) <= RELEASE_S, "harvest keeps the run waiting"
        if record["step"] == self.dies_after_step:
            self.dies_after_step = 0
            self.death.set()

    def is_used(self, worker: str) -> bool:
        """Return whether an engine generates at this worker."""
        return any(
            place_of(engine.name) == worker and engine.running and not engine.dead.is_set()
            for engine in self.engines
        )


class Blob:
    """A reference to a drafter's weights, as Ray has them."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return pack({"w": torch.tensor([float(self.number)])})


# --- the run --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def driver(world: World, folder: RunFolder, resume: bool) -> AsyncIterator[Training]:
    """Start all parts of a run, as `launch` does; end them all as Ray does when the driver dies."""
    settings = config(folder.path, world.extra_prompts, world.with_tools)
    for layer in world.layers:
        layer.rate = 0.0  # an engine or learner that cannot start at all rightly ends the run
    checkpoint, _ = folder.last_checkpoint() if resume else (None, 0)
    first = 0
    if checkpoint is not None:
        first = json.loads((checkpoint / "drafter" / VERSION).read_text())["version"]
    for number in [number for number in world.drafters if number > first]:
        del world.drafters[number]  # a resumed run has its drafters again
    loop = asyncio.get_running_loop()
    pool = RolloutPool(settings.pool, lambda name: LightProcess(world, name), loop.time)

    def spawn(_: object, place: TrainerPlace) -> Any:
        return world.trainers.spawn(place.options["worker"])

    harvest = HarvestSession(
        HARVEST,
        cast(Any, SimpleNamespace(drafter=str(world.drafter))),
        pool,
        lambda engine: {"worker": place_of(engine)},
        on_gpu=False,
        first_version=first,
        spawn=spawn,
        share=lambda packed: packed,
    )
    pool.idle.listener = harvest
    plan = SimpleNamespace(num_ranks=2, row_tokens=64, timeout_s=15.0, buffer=None)
    learner = LearnerGroup(
        cast(Any, plan),
        spawn=lambda plan, rank, options: cast(
            Any, RankHandle(world.layers[1], world.shared, plan, rank)
        ),
        here=lambda: "here",
    )
    try:
        await asyncio.gather(pool.start(), learner.start(checkpoint))
        await harvest.start()
        world.begin_faults()
        live = Live(folder.live, NUM_STEPS, pool, harvest, TailForecast(), lambda *_: None)
        times = NoTimekeeper(folder.timeline)
        log = RunLog(settings, folder, Sinks([]), times, live, world.step_ended)
        weights = HostSync(pool, learner, "float32", shares_gpus=False, sleeps=False)
        rechecks = Rechecks(0.0, 0, "float32")
        chat, rewards = ToolChat() if world.with_tools else Chat(), cast(Any, Rewards())
        prepared = SimpleNamespace(
            chat=chat, source=Source(), held_out=[], max_prompt_tokens=99, tool_schemas=[]
        )
        with world.tools.host(folder.path / "tools") as tools:
            host = tools if world.with_tools else None
            parts = Components(pool, learner, rewards, host, harvest, rechecks, weights)
            yield Training(settings, cast(Any, prepared), folder, parts, log, Termination(25.0))
        log.close()
    finally:
        for layer in world.layers:
            layer.rate = 0.0
        await harvest.stop()
        await pool.shutdown()
        await learner.stop()
        for shared in world.shared:
            shared.close()  # the files of ranks that were killed
        world.shared.clear()


async def whole_run(world: World, out: Path) -> int:
    """Make a whole run, and return its policy; the driver may die once, and resumes."""
    folder = RunFolder(out)
    folder.path.mkdir(parents=True)
    for attempt in itertools.count():
        async with driver(world, folder, resume=attempt > 0) as training:
            work = asyncio.ensure_future(training.run(resume=attempt > 0))
            death = asyncio.ensure_future(world.death.wait())
            await asyncio.wait(
                {work, death},
                timeout=None if attempt else world.dies_after_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            death.cancel()
            world.death.clear()
            if work.done():
                work.result()
                break
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        folder = RunFolder(out)  # of another process
    checkpoint, done = folder.last_checkpoint()
    assert checkpoint is not None
    assert done == NUM_STEPS
    states = [json.loads((checkpoint / f"learner/{rank}.json").read_text()) for rank in range(2)]
    assert states[0] == states[1]
    assert states[0]["steps"] == NUM_STEPS, "an RL step was lost, or done twice"
    return int(states[0]["policy"])


def records(out: Path) -> list[list[float | None]]:
    """Return RL steps, rewards, and shares of extra samples."""
    names = (
        *("step", "reward/mean", "rollout/replacement_share", "rollout/output_tokens"),
        *("tools/turns_mean", "tools/errors", "tools/answer_tokens"),
    )
    return [[record.get(name) for name in names] for record in read(out / "metrics.jsonl")]


def light_save(harvest: HarvestSession, folder: Path, state: object) -> None:
    folder.mkdir()
    (folder / VERSION).write_text(json.dumps({"version": harvest._published[0]}))


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from drafter_fixtures import CONFIG

    monkeypatch.setattr(HarvestSession, "_save", light_save)
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf("float32")))
    return folder


TOOL_SEEDS = batches(10) if "TLT_FAULT_SEEDS" in os.environ else [range(8)]
SEEDS = [
    *((seeds, 0, False) for seeds in (*batches(10), KNOWN)),
    *((seeds, 0, True) for seeds in TOOL_SEEDS),
    *((range(10), 5, False), (range(4), 5, True)),
]


@pytest.mark.parametrize(("seeds", "extra", "with_tools"), SEEDS, ids=str)
def test_no_step_is_lost_or_done_twice_whatever_fails(
    seeds: Sequence[int], extra: int, with_tools: bool, tmp_path: Path, drafter: Path
) -> None:
    """With tools, nor is a tool called twice for a turn; what was lost then is lost for good."""

    def undisturbed(out: Path, lost: dict[Turn, str] | None = None) -> tuple[int, Any]:
        world = World(None, drafter, extra, with_tools, lost)
        return run(whole_run(world, out), LIMIT_S), records(out)

    usual = undisturbed(tmp_path / "undisturbed")
    assert any(share for _, _, share, *_ in usual[1]) == (extra > 0)
    num_faults = 0
    for seed in seeds:
        world, out = World(seed, drafter, extra, with_tools), tmp_path / f"{seed}"
        try:
            policy, lost = run(whole_run(world, out), LIMIT_S), world.tools.lost
            expected = undisturbed(tmp_path / f"{seed}-lost", lost) if lost else usual
            assert (policy, records(out)) == expected, "another policy"
            world.tools.check()
            for layer in world.layers:
                assert not layer.wrong
                num_faults += layer.num_faults
            assert all(engine.dead.is_set() for engine in world.engines)
            assert all(trainer.dead.is_set() for trainer in world.trainers.all)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    assert num_faults


def test_a_learner_lost_in_a_resumed_runs_first_weight_sync_is_revived(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Rank.publish
    lost: list[Rank] = []

    async def fails_once(rank: Rank, dtype: str, same_node: bool) -> str | None:
        if rank.steps and rank.num_exchanges == 1 and not lost:  # it has just been restored
            lost.append(rank)
            raise RankFailed("out of memory")
        return await publish(rank, dtype, same_node)

    expected = run(whole_run(World(None, drafter), tmp_path / "undisturbed"), LIMIT_S)
    monkeypatch.setattr(Rank, "publish", fails_once)
    world = World(None, drafter)
    world.dies_after_step = 4
    assert run(whole_run(world, tmp_path / "resumed"), LIMIT_S) == expected
    assert lost
    assert records(tmp_path / "resumed") == records(tmp_path / "undisturbed")


ADVANTAGES = """
def group(rewards):
    return [7.0] * len(rewards)

def step(groups):
    return [[float(len(groups))] * len(group) for group in groups]
"""


@pytest.mark.parametrize(("over", "expected"), [("group", 7.0), ("step", 4.0)])
def test_an_advantage_of_the_users_own_reaches_the_ranks(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch, over: Any, expected: float
) -> None:
    (tmp_path / "advantages_of_users.py").write_text(ADVANTAGES)
    monkeypatch.chdir(tmp_path)
    own = AlgorithmConfig(advantage=f"advantages_of_users:{over}", advantage_over=over)
    changed = {"algorithm": own}
    usual, accumulate, seen = config, Rank.accumulate, set[float]()

    async def noting(rank: Rank, rows: Any, rl_step: int) -> None:
        seen.update(sample.advantage for row in rows for sample in row)
        await accumulate(rank, rows, rl_step)

    monkeypatch.setattr(Rank, "accumulate", noting)
    monkeypatch.setitem(globals(), "config", lambda *of: usual(*of).model_copy(update=changed))
    run(whole_run(World(None, drafter), tmp_path / "out"), LIMIT_S)
    assert seen == {expected}
