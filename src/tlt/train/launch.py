"""Composition of a training run: Ray, places, engines, learner, reward workers, and the loop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tlt.agents.host import ToolHost
from tlt.config.train import TrainConfig, resolve_defaults
from tlt.contracts import ShowProgress
from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.speculators import plain_config
from tlt.errors import Terminated
from tlt.harvest.contract import NoHarvest, RunHarvest
from tlt.harvest.coordinator import coordinator_settings
from tlt.harvest.forecast import TailForecast
from tlt.harvest.leases import stop_timeout_s
from tlt.harvest.published import start_drafter
from tlt.harvest.session import HarvestSession
from tlt.harvest.trainer import trainer_settings
from tlt.learner.actor import LearnerPlan
from tlt.learner.group import LearnerGroup
from tlt.logs import Level, LogSettings, log_to_file
from tlt.node.cluster import start_ray
from tlt.node.shared import SharedFolder, begin_run, remove_abandoned
from tlt.observe.live import Live
from tlt.observe.provenance import provenance, versions
from tlt.observe.record import read
from tlt.observe.sinks import Sinks, open_sinks
from tlt.observe.summary import summary
from tlt.observe.timekeeper import NoTimekeeper, Timekeeper
from tlt.rollout.actor import ray_spawner
from tlt.rollout.client import Engine
from tlt.rollout.pool import RolloutPool
from tlt.rollout.recheck import Rechecks
from tlt.states.buffer import BufferSettings
from tlt.strategy.spec import trained_draft_tokens
from tlt.tasks.rewards import RewardPool
from tlt.train.folder import RunFolder
from tlt.train.inputs import check_inputs, with_local_models, write_inputs
from tlt.train.loop import Components, Training
from tlt.train.placement import Reservation, reserve
from tlt.train.preflight import Prepared, prepare
from tlt.train.records import Record, RunLog
from tlt.train.signals import Termination
from tlt.train.sync import weight_sync

logger = logging.getLogger(__name__)

BFLOAT16 = 2


def launch(
    config: TrainConfig,
    resume: bool,
    command: str,
    show: ShowProgress,
    on_record: Callable[[Record], None],
    log_level: Level | None = None,
) -> list[Record]:
    """Run everything and return the records; a wrong config raises before any engine starts.

    `signals` says what SIGTERM and SIGINT do meanwhile. With `log_level`, all processes log to
    files in run.out; None leaves logging alone.
    """
    named = resolve_defaults(config)
    folder = RunFolder(Path(named.run.out))
    with Termination(named.run.term_timeout_s) as term, ExitStack() as stack:
        folder.check(named, resume)
        begin_run(named.run.out)
        show("checking config, model and data", 0, 1)
        config = with_local_models(named)
        prepared = prepare(config)
        if resume:
            check_inputs(folder.path, config)
        folder.open(_with_draft_length(named), versions(), command)
        log = None
        if log_level is not None:
            log = LogSettings(str(folder.path.absolute() / "logs"), log_level)
        stack.enter_context(_run_log(folder.path, log, command))
        write_inputs(folder.path, config)
        checkpoint, done = folder.last_checkpoint() if resume else (None, 0)
        sinks = Sinks(open_sinks(config.metrics, folder.path, done, named.model_dump()))
        stack.callback(sinks.close)
        if done < config.run.num_steps or not (folder.path / "policy").exists():
            folder.set_policy_aside()
            remove_abandoned()
            start_ray(config.pool.num_engines)
            term.install()  # Ray installs its own handler
            run = _Run(config, prepared, folder, checkpoint, sinks, show, on_record, term, log)
            asyncio.run(_unless_ended(run.train(resume), term))
        records = read(folder.metrics)
        result = summary(records) | {"provenance": provenance(command)}
        if label := config.emulate.label(config.pool.num_engines):
            result = {"emulated": label} | result
        (folder.path / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
        return records


def _with_draft_length(config: TrainConfig) -> TrainConfig:
    """Return the settings with the draft length that drafters are trained for."""
    found = trained_draft_tokens(config.engine.strategy, config.engine.num_gpus > 0)
    tlt = {"num_draft_tokens": config.tlt.num_draft_tokens or found}
    return config.model_copy(update={"tlt": config.tlt.model_copy(update=tlt)})


@contextmanager
def _run_log(folder: Path, log: LogSettings | None, command: str) -> Iterator[None]:
    """Log the run to `run.log`, from its command to how it ended."""
    end_log = None if log is None else log_to_file(folder, "run", log.level)
    libraries = ", ".join(f"{name} {version}" for name, version in versions().items())
    logger.info("started: %s; %s; settings: %s", command, libraries, folder / "config.toml")
    try:
        yield
        logger.info("finished")
    except Terminated as end:
        logger.info("%s", end)
        raise
    except Exception:
        logger.exception("the run failed")
        raise
    finally:
        if end_log is not None:
            end_log()


async def _unless_ended(work: Coroutine[Any, Any, None], term: Termination) -> None:
    """Do the work; a signal cancels it while no other code handles the signal."""
    doing = asyncio.ensure_future(work)
    with term.calling(doing.cancel):
        try:
            await doing
        except asyncio.CancelledError:
            term.raise_if_requested()
            raise


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose settings are checked and whose folder is open."""

    config: TrainConfig
    prepared: Prepared
    folder: RunFolder
    checkpoint: Path | None
    """The checkpoint that the run resumes from."""
    sinks: Sinks
    show: ShowProgress
    on_record: Callable[[Record], None]
    term: Termination
    log: LogSettings | None

    async def train(self, resume: bool) -> None:
        """Start all parts, train, and write the policy."""
        config, folder, show = self.config, self.folder, self.show
        async with AsyncExitStack() as stack:
            engine, version = self.prepared.engine, 0
            if config.capture.enabled:
                # Checkpoints hold copies of the buffer, so a run that ends frees its memory.
                buffer = BufferSettings.of_run(config.capture)
                stack.callback(SharedFolder.join(Path(buffer.folder)).remove)
                if config.capture.by == "engines":
                    engine = engine.model_copy(update={"capture": asdict(buffer)})
            show("waiting for places in the cluster", 0, 1)
            reservation = await reserve(self.prepared.placement, config.pool.start_timeout_s)
            stack.callback(reservation.release)
            scoring = config.reward
            others = [each.reward for each in self.prepared.held_out]
            rewards = RewardPool(
                self.prepared.reward, scoring.num_workers, scoring.timeout_s, others
            )
            stack.callback(rewards.close)
            tools = None
            if config.task.environment is not None:
                tools = ToolHost(
                    *(config.tools, config.policy.model, folder.path / "tools"),
                    config.task.environment,
                )
                stack.callback(tools.close)
            if config.tlt.harvests:
                drafter = folder.path / "drafter-start"
                version = start_drafter(config, drafter, self.checkpoint)
                engine = engine.model_copy(update={"drafter": str(drafter)})
            pool = RolloutPool(config.pool, ray_spawner(engine, reservation.engine, self.log))
            # GPU kernels may round by the batch in any dtype.
            dtype = "bfloat16" if config.engine.num_gpus else config.policy.dtype
            rechecks = Rechecks(config.alarm.recheck_share, config.alarm.recheck_tokens, dtype)
            pool.idle.rechecks = rechecks
            harvest: RunHarvest = NoHarvest()
            if config.tlt.harvests:
                harvest = self._harvest(pool, reservation, Path(str(engine.drafter)), version)
                pool.idle.listener = harvest
            learner = LearnerGroup(
                LearnerPlan.of_run(config, self._captured_layers(engine.drafter), self.log),
                reservation.rank,
            )
            stack.push_async_callback(learner.stop)
            stack.push_async_callback(pool.shutdown)
            stack.push_async_callback(harvest.stop)
            show("starting engines and learner", 0, 1)
            await self._start(pool, learner, reservation)
            await harvest.start()
            times: Timekeeper | NoTimekeeper = NoTimekeeper(folder.timeline)
            if config.metrics.timeline:
                own_learner = config.placement.kind == "separate"
                times = Timekeeper(folder.timeline, pool, pool.idle, harvest, own_learner)
            live = Live(
                *(folder.live, config.run.num_steps, pool, harvest, TailForecast(), show),
                at_tools=pool.idle.at_tools,
            )
            records = RunLog(config, folder, self.sinks, times, live, self.on_record)
            async with live:
                weights = weight_sync(config, pool, learner)
                stack.callback(weights.close)
                parts = Components(pool, learner, rewards, tools, harvest, rechecks, weights)
                training = Training(config, self.prepared, folder, parts, records, self.term)
                await training.run(resume)
                if tools is not None:
                    tools.forget(config.run.num_steps)
            await harvest.save(folder.path / "drafter", to_resume=False)
            show("writing the policy", 0, 1)
            await learner.save_policy(folder.path / "policy", config.policy.dtype)
            folder.forget_policy_before()

    async def _start(
        self, pool: RolloutPool, learner: LearnerGroup, reservation: Reservation
    ) -> None:
        if self.config.engine.num_gpus and self.config.placement.kind == "colocated":
            await pool.start()  # ranks and trainers use the GPUs that Ray gave the engines
            reservation.gpus_of_engines(await pool.call_all(Engine.devices))
            await pool.call_all(Engine.sleep)
            await learner.start(self.checkpoint)
            await pool.call_all(Engine.wake)
            return
        await asyncio.gather(pool.start(), learner.start(self.checkpoint))
        if self.config.engine.num_gpus:
            reservation.gpus_of_engines(await pool.call_all(Engine.devices))

    def _harvest(
        self, pool: RolloutPool, reservation: Reservation, drafter: Path, version: int
    ) -> HarvestSession:
        config, on_gpu = self.config, self.config.engine.num_gpus > 0
        shape = Eagle3Config.from_hf(json.loads((drafter / "config.json").read_text()))
        stop_s = stop_timeout_s(
            shape.num_parameters,
            embed_and_head_bytes=2 * shape.vocab_size * shape.hidden_size * BFLOAT16,
            on_gpu=on_gpu,
        )
        return HarvestSession(
            coordinator_settings(config.tlt, config.debug.publish_drafters, stop_s),
            trainer_settings(
                drafter,
                config.policy.model,
                BufferSettings.of_run(config.capture),
                config.tlt,
                num_draft_tokens=trained_draft_tokens(config.engine.strategy, on_gpu),
                new=config.engine.drafter is None,
                temperature=config.sampling.temperature,
                seed=config.run.seed,
                on_gpu=on_gpu,
                emulate=config.emulate.settings,
                log=self.log,
            ),
            pool,
            reservation.beside,
            on_gpu=on_gpu,
            colocated=config.placement.kind == "colocated",
            sleeps=on_gpu or config.emulate.hardware is not None,
            first_version=version,
        )

    def _captured_layers(self, drafter: str | None) -> tuple[int, ...]:
        """Return the layers whose states the learner captures: the ones that the drafter reads."""
        if not self.config.capture.enabled or self.config.capture.by == "engines":
            return ()
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(self.config.policy.model)
        if drafter is None:
            return Eagle3Config.for_target(model).aux_layer_ids
        said = json.loads((Path(drafter) / "config.json").read_text())
        return Eagle3Config.from_hf(plain_config(said), model.num_hidden_layers).aux_layer_ids
