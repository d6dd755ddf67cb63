"""Composition of a training run: Ray, places, engines, learner, reward workers, and the loop."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.config.train import TrainConfig, resolve_defaults
from tlt.contracts import ShowProgress
from tlt.drafter.eagle3.config import Eagle3Config
from tlt.drafter.speculators import plain_config
from tlt.drafter.trainer import TrainerSettings
from tlt.errors import Terminated
from tlt.hardware import compute_dtype
from tlt.harvest.contract import NoHarvest, RunHarvest
from tlt.harvest.coordinator import coordinator_settings
from tlt.harvest.forecast import TailForecast
from tlt.harvest.leases import stop_timeout_s
from tlt.harvest.published import VERSION, make_drafter, version_of
from tlt.harvest.session import HarvestSession
from tlt.harvest.trainer import (
    AVERAGED_STEPS,
    DRAFTER_LR,
    NEW_AVERAGED_STEPS,
    NEW_DRAFTER_LR,
    HarvestTrainerSettings,
)
from tlt.learner.actor import LearnerPlan
from tlt.learner.batch import Weighting
from tlt.learner.group import LearnerGroup
from tlt.learner.rank import RankSettings
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
    config = resolve_defaults(config)
    log = None
    if log_level is not None:
        log = LogSettings(str(Path(config.run.out).absolute() / "logs"), log_level)
    with Termination(config.run.term_timeout_s) as term, ExitStack() as stack:
        return _launch(config, resume, command, show, on_record, term, log, stack)


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


def _launch(
    config: TrainConfig,
    resume: bool,
    command: str,
    show: ShowProgress,
    on_record: Callable[[Record], None],
    term: Termination,
    log: LogSettings | None,
    stack: ExitStack,
) -> list[Record]:
    folder = RunFolder(Path(config.run.out))
    folder.check(config, resume)
    begin_run(config.run.out)
    show("checking config, model and data", 0, 1)
    named, config = config, with_local_models(config)
    prepared = prepare(config)
    if resume:
        check_inputs(folder.path, config)
    folder.open(named, versions(), command)
    stack.enter_context(_run_log(folder.path, log, command))
    write_inputs(folder.path, config)
    _, done = folder.last_checkpoint() if resume else (None, 0)
    sinks = Sinks(open_sinks(config.metrics, folder.path, done))
    try:
        if done < config.run.num_steps or not (folder.path / "policy").exists():
            folder.set_policy_aside()
            remove_abandoned()
            start_ray(config.pool.num_engines)
            term.install()  # Ray has a handler of its own
            work = _run(config, prepared, folder, resume, sinks, show, on_record, term, log)
            asyncio.run(_unless_ended(work, term))
        records = read(folder.metrics)
        result = summary(records) | {"provenance": provenance(command)}
        (folder.path / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
        return records
    finally:
        sinks.close()


async def _unless_ended(work: Coroutine[Any, Any, None], term: Termination) -> None:
    """Do the work; a signal cancels it while nobody else takes the signal."""
    doing = asyncio.ensure_future(work)
    with term.calling(doing.cancel):
        try:
            await doing
        except asyncio.CancelledError:
            term.raise_if_requested()
            raise


async def _run(
    config: TrainConfig,
    prepared: Prepared,
    folder: RunFolder,
    resume: bool,
    sinks: Sinks,
    show: ShowProgress,
    on_record: Callable[[Record], None],
    term: Termination,
    log: LogSettings | None,
) -> None:
    """Start all parts and train."""
    async with AsyncExitStack() as stack:
        if config.capture.enabled:
            # Checkpoints hold copies of the buffer, so a run that ends frees its memory.
            folder_of_samples = Path(BufferSettings.of(config.capture).folder)
            stack.callback(SharedFolder.join(folder_of_samples).remove)
        show("waiting for places in the cluster", 0, 1)
        reservation = await reserve(prepared.placement, config.pool.start_timeout_s)
        stack.callback(reservation.release)
        rewards = RewardPool(prepared.reward, config.reward.num_workers, config.reward.timeout_s)
        stack.callback(rewards.close)
        checkpoint, _ = folder.last_checkpoint() if resume else (None, 0)
        engine, version = _with_drafter(config, prepared.engine, folder, checkpoint)
        if config.capture.by == "engines":
            engine = engine.model_copy(
                update={"capture": asdict(BufferSettings.of(config.capture))}
            )
        pool = RolloutPool(config.pool, ray_spawner(engine, reservation.engine, log))
        # GPU kernels may round by the batch in any dtype.
        dtype = "bfloat16" if config.engine.num_gpus else config.policy.dtype
        rechecks = Rechecks(config.alarm.recheck_share, config.alarm.recheck_tokens, dtype)
        pool.recheck_with(rechecks)
        harvest: RunHarvest = NoHarvest()
        if config.tlt.harvests:
            harvest = HarvestSession(
                coordinator_settings(
                    config.tlt,
                    config.debug.publish_drafters,
                    _stop_timeout_s(config, Path(str(engine.drafter))),
                ),
                trainer_settings(
                    config, str(engine.drafter), config.engine.drafter is None and not version, log
                ),
                pool,
                reservation.beside,
                on_gpu=bool(config.engine.num_gpus),
                colocated=config.placement.kind == "colocated",
                first_version=version,
            )
            pool.listen(harvest)
        learner = LearnerGroup(
            learner_plan(config, engine.drafter, log),
            lambda rank: reservation.rank(
                rank, bool(config.learner.num_gpus), config.learner.num_cores
            ),
        )
        stack.push_async_callback(learner.stop)
        stack.push_async_callback(pool.shutdown)
        stack.push_async_callback(harvest.stop)
        show("starting engines and learner", 0, 1)
        await _start(config, pool, learner, reservation, checkpoint)
        await harvest.start()
        own_learner = config.placement.kind == "separate"
        times = (
            Timekeeper(folder.timeline, pool, harvest, own_learner)
            if config.metrics.timeline
            else NoTimekeeper(folder.timeline)
        )
        live = Live(folder.live, config.run.num_steps, pool, harvest, TailForecast(), show)
        records = RunLog(config, folder, sinks, times, live, on_record)
        async with live:
            weights = weight_sync(config, pool, learner)
            stack.callback(weights.close)
            parts = Components(pool, learner, rewards, harvest, rechecks, weights)
            await Training(config, prepared, folder, parts, records, term).run(resume)
        await harvest.save(folder.path / "drafter", to_resume=False)
        show("writing the policy", 0, 1)
        await learner.save_policy(folder.path / "policy", config.policy.dtype)
        folder.forget_policy_before()


async def _start(
    config: TrainConfig,
    pool: RolloutPool,
    learner: LearnerGroup,
    reservation: Reservation,
    checkpoint: Path | None,
) -> None:
    if config.engine.num_gpus and config.placement.kind == "colocated":
        await pool.start()  # ranks and trainers use the GPUs that Ray gave the engines
        reservation.gpus_of_engines(await pool.call_all(Engine.devices))
        await pool.call_all(Engine.sleep)
        await learner.start(checkpoint)
        await pool.call_all(Engine.wake)
        return
    await asyncio.gather(pool.start(), learner.start(checkpoint))
    if config.engine.num_gpus:
        reservation.gpus_of_engines(await pool.call_all(Engine.devices))


def learner_plan(
    config: TrainConfig, drafter: str | None = None, log: LogSettings | None = None
) -> LearnerPlan:
    """Return the learner's plan; `drafter` is the folder that says which states to capture."""
    algorithm, learner = config.algorithm, config.learner
    colocated = config.placement.kind == "colocated"
    buffer = None
    aux_layers: tuple[int, ...] = ()
    by_engines = config.capture.by == "engines"
    if config.capture.enabled:
        buffer = BufferSettings.of(config.capture)
    if config.capture.enabled and not by_engines:
        aux_layers = _captured_layers(config, drafter)
    return LearnerPlan(
        num_ranks=learner.num_ranks,
        row_tokens=learner.row_tokens,
        rank=RankSettings(
            model=config.policy.model,
            dtype=config.policy.dtype,
            temperature=config.sampling.temperature,
            weighting=Weighting(algorithm.mean_over, config.sampling.max_tokens),
            algorithm=algorithm,
            learner=learner,
            aux_layer_ids=aux_layers,
        ),
        on_gpu=bool(learner.num_gpus),
        num_cores=learner.num_cores or (None if colocated else 1),
        core_group=config.debug.core_group + ("-learner" if colocated else ""),
        timeout_s=learner.timeout_s,
        buffer=buffer,
        captures=not by_engines,
        log=log,
    )


def _captured_layers(config: TrainConfig, drafter: str | None) -> tuple[int, ...]:
    model = _model_config(config)
    if drafter is None:
        return Eagle3Config.for_target(model).aux_layer_ids
    said = json.loads((Path(drafter) / "config.json").read_text())
    return Eagle3Config.from_hf(plain_config(said), model.num_hidden_layers).aux_layer_ids


# --- harvest --------------------------------------------------------------------------------------


def _with_drafter(
    config: TrainConfig, engine: EngineConfig, folder: RunFolder, checkpoint: Path | None
) -> tuple[EngineConfig, int]:
    """Return the engine with the drafter that the run starts from, and that drafter's version.

    A resumed run takes its published drafter. A new run takes a copy of `engine.drafter`, or makes
    a drafter, which drafts nothing right until it is trained.
    """
    if not config.tlt.harvests:
        return engine, 0
    start, version = folder.path / "drafter-start", 0
    if checkpoint is not None and (checkpoint / "drafter" / VERSION).exists():
        shutil.rmtree(start, ignore_errors=True)
        shutil.copytree(checkpoint / "drafter", start)
        version = version_of(start)
    elif engine.drafter is not None:
        _adopt_drafter(config, Path(engine.drafter), start)
    else:
        make_drafter(
            Path(config.policy.model),
            start,
            config.tlt.draft_vocab_size,
            on_gpu=config.engine.num_gpus > 0,
            dtype=config.policy.dtype,
            seed=config.run.seed,
        )
    return engine.model_copy(update={"drafter": str(start)}), version


def _adopt_drafter(config: TrainConfig, source: Path, folder: Path) -> None:
    import torch

    from tlt.drafter.checkpoint import adopt

    num_layers = _model_config(config).num_hidden_layers
    adopt(source, folder, getattr(torch, config.policy.dtype), num_layers)


def trainer_settings(
    config: TrainConfig, drafter: str, untrained: bool, log: LogSettings | None = None
) -> HarvestTrainerSettings:
    tlt, is_new = config.tlt, config.engine.drafter is None
    return HarvestTrainerSettings(
        drafter=drafter,
        policy=config.policy.model,
        buffer=BufferSettings.of(config.capture),
        trainer=TrainerSettings(
            num_draft_tokens=tlt.num_draft_tokens,
            row_tokens=tlt.row_tokens,
            lr=tlt.lr or (NEW_DRAFTER_LR if is_new else DRAFTER_LR),
            averaged_steps=NEW_AVERAGED_STEPS if is_new else AVERAGED_STEPS,
            temperature=config.sampling.temperature,
            bfloat16=compute_dtype(on_gpu=config.engine.num_gpus > 0) == "bfloat16",
            seed=config.run.seed,
        ),
        held_out_tokens=tlt.held_out_tokens,
        untrained=untrained,
        log=log,
    )


def _stop_timeout_s(config: TrainConfig, drafter: Path) -> float:
    """Return the seconds in which trainers of this drafter must have stopped."""
    shape = Eagle3Config.from_hf(json.loads((drafter / "config.json").read_text()))
    embed_and_head_bytes = 2 * shape.vocab_size * shape.hidden_size * BFLOAT16
    return stop_timeout_s(
        shape.num_parameters,
        averaged=True,
        embed_and_head_bytes=embed_and_head_bytes,
        on_gpu=config.engine.num_gpus > 0,
    )


def _model_config(config: TrainConfig) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(config.policy.model)
