"""`tlt drafter bench`: one workload in several modes, interleaved and repeated.

A mode is a strategy on engines set up for it. Engines of `off` load no drafter, engines of
`ngram:K` look n-grams up, and engines of `eagle3:K` and `tail:K@B` load the drafter; so do engines
of `adaptive` and `beg_mab` if there is a drafter. All engines stay up, and only one mode works at a
time. The modes take turns within each repeat: a slow minute of the machine then hits all of them. A
first, short round warms every engine up and is not counted. Strategies that learn start from
nothing in every run.

The result includes the times of engine steps, for replays of strategies, and the decisions of each
mode's last run.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tlt.bench import workload
from tlt.bench.metrics import measure, spread
from tlt.bench.steps import step_table
from tlt.config.rollout import EngineConfig, PoolConfig
from tlt.contracts import Sample, SampleRequest, SamplingSpec, ShowProgress, StepReport
from tlt.errors import ConfigError
from tlt.rollout.client import Engine
from tlt.rollout.pool import RolloutPool
from tlt.strategy.spec import LEARNING, build_strategy
from tlt.tasks.tail import length_summary
from tlt.vllm.args import engine_args, strategy_spec
from tlt.vllm.lossless_checks import check_sampling


@dataclass(frozen=True, slots=True)
class Mode:
    """A strategy as the user names it: `off`, `ngram:4`, `eagle3:4`, `tail:4@8`, `adaptive`
    or `beg_mab`."""

    name: str
    strategy: dict[str, Any]
    setup: str
    """Engines that the mode runs on: `off`, `ngram` or `eagle3`."""

    @classmethod
    def parse(cls, text: str, has_drafter: bool) -> Mode:
        """Parse a mode's name."""
        drafter, _, rest = text.partition(":")
        try:
            if text == "off":
                return cls("off", {"kind": "off"}, setup="off")
            if text in LEARNING:
                return cls(text, {"kind": text}, setup="eagle3" if has_drafter else "ngram")
            if drafter == "tail":
                length, _, batch = rest.partition("@")
                strategy: dict[str, Any] = {
                    "kind": "by_batch_size",
                    "drafter": "eagle3",
                    "schedule": [[int(batch), int(length)]],
                }
            else:
                strategy = {"kind": "fixed", "drafter": drafter, "num_draft_tokens": int(rest)}
            build_strategy(strategy)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"mode {text!r}: expected 'off', 'ngram:K', 'eagle3:K' (K draft tokens), "
                "'tail:K@B' (EAGLE-3 at most B running), 'adaptive' or 'beg_mab'; e.g. "
                "eagle3:2"
            ) from error
        return cls(text, strategy, setup="ngram" if drafter == "ngram" else "eagle3")


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of `tlt drafter bench`."""

    engine: EngineConfig
    num_engines: int
    modes: tuple[Mode, ...]
    repeats: int
    lengths: tuple[int, ...]
    length_source: dict[str, int] | str
    """The distribution of the lengths, `file` or `natural`. Natural lengths are
    limits: responses end by themselves."""
    prompts: tuple[tuple[int, ...], ...]
    temperature: float
    top_p: float
    score: Callable[[int, Sequence[int]], float] | None = None
    """Reward of a natural response, from the number of its prompt and its tokens."""

    @property
    def is_natural(self) -> bool:
        return self.length_source == "natural"


def engine_for(plan: Plan, setup: str) -> EngineConfig:
    """Return the engine that the modes of one setup share; raise an error for bad settings."""
    modes = [mode for mode in plan.modes if mode.setup == setup]
    if setup == "eagle3" and plan.engine.drafter is None:
        raise ConfigError(
            f"mode {modes[0].name!r} needs a drafter; pass --drafter FOLDER (make one with "
            "`tlt drafter train`)"
        )
    drafter = plan.engine.drafter if setup == "eagle3" else None
    change: dict[str, Any] = {"drafter": drafter, "core_group": f"bench-{setup}"}
    config = plan.engine.model_copy(update=change | {"max_draft_tokens": None})
    check_sampling(SamplingSpec(1, plan.temperature, plan.top_p), speculating=setup != "off")
    strategies = [strategy_spec(config, mode.strategy) for mode in modes]
    arms = {arm for strategy in strategies for arm in build_strategy(strategy).arms()}
    # The engine is prepared for all arms of its modes; each mode sets its own strategy.
    all_arms = {"kind": "random", "arms": [[a.drafter, a.num_draft_tokens] for a in arms]}
    config = config.model_copy(update={"strategy": all_arms})
    engine_args(config)
    return config


def setups(plan: Plan) -> list[str]:
    """List the setups that the plan's modes need, in order of first use."""
    return list(dict.fromkeys(mode.setup for mode in plan.modes))


async def run(plan: Plan, on_progress: ShowProgress) -> dict[str, Any]:
    """Measure all modes and return the result as plain data. Ray must be running."""
    from tlt.rollout.actor import ray_spawner

    runs: list[dict[str, Any]] = []
    steps: list[StepReport] = []
    decisions: dict[str, list[Any]] = {}
    async with AsyncExitStack() as stack:
        pools: dict[str, RolloutPool] = {}
        for index, setup in enumerate(setups(plan)):
            on_progress(f"starting engines: {setup}", index, len(setups(plan)))
            spawner = ray_spawner(engine_for(plan, setup))
            pool = RolloutPool(PoolConfig(num_engines=plan.num_engines), spawner)
            pools[setup] = await stack.enter_async_context(pool)
        for repeat, mode in itertools.product(range(-1, plan.repeats), plan.modes):
            label = f"{mode.name}, run {repeat + 1} of {plan.repeats}"
            lengths = plan.lengths
            if repeat < 0:
                label = f"warming up {mode.name}"
                lengths = tuple(min(length, 16) for length in lengths)
            pool = pools[mode.setup]
            await pool.set_strategy(mode.strategy)
            await pool.call_all(Engine.reset_prefix_cache)  # clears earlier n-grams, too
            await pool.call_all(Engine.take_trace)
            found = await _rollout(
                plan, pool, lengths, repeat, mode.name, partial(on_progress, label)
            )
            traces = await pool.call_all(Engine.take_trace)
            if repeat >= 0:
                runs.append({"mode": mode.name, "repeat": repeat, **found})
                steps += [step for trace in traces for step in trace]
                decisions[mode.name] = _decisions(traces)
    lengths = runs[0]["lengths"] if plan.is_natural else plan.lengths
    return {
        "workload": workload.describe(plan.length_source, lengths),
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "num_engines": plan.num_engines,
        "repeats": plan.repeats,
        "engine_args": dict(plan.engine.engine_args),
        "summary": summarize(plan.modes, runs),
        "runs": runs,
        "decisions": decisions,
        "steps": step_table(steps),
    }


def _decisions(traces: Sequence[Sequence[StepReport]]) -> list[list[tuple[float, int, str]]]:
    """Return (seconds since the first step, decodes, drafting arm) of every step, by engine."""
    started_s = min((trace[0].ended_s for trace in traces if trace), default=0.0)
    return [
        [(round(s.ended_s - started_s, 3), s.num_decodes, str(s.proposed)) for s in trace]
        for trace in traces
    ]


def requests(plan: Plan, lengths: Sequence[int], repeat: int, mode: str) -> list[SampleRequest]:
    """Return one request per length. Prompts repeat when there are fewer prompts than lengths.

    Natural responses have seeds that all modes of a repeat share.
    """
    forced = SamplingSpec(1, plan.temperature, plan.top_p, ignore_eos=True, logprobs=True)
    work = []
    for index, length in enumerate(lengths):
        sampling = replace(forced, max_tokens=length)
        if plan.is_natural:
            digest = hashlib.blake2b(f"{repeat}/{index}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
            sampling = replace(sampling, ignore_eos=False, seed=seed)
        prompt = plan.prompts[index % len(plan.prompts)]
        work.append(SampleRequest(f"{repeat}/{mode}/{index}", prompt, sampling))
    return work


async def _rollout(
    plan: Plan,
    pool: RolloutPool,
    lengths: Sequence[int],
    repeat: int,
    mode: str,
    on_done: Callable[[int, int], None],
) -> dict[str, Any]:
    """Return the metrics of a rollout, and of its responses if they are natural."""
    work = requests(plan, lengths, repeat, mode)
    before = await pool.stats()
    samples: list[Sample] = []
    started_at_s = time.time()
    async for sample in pool.generate(work):
        samples.append(sample)
        on_done(len(samples), len(work))
    after = await pool.stats()
    await asyncio.sleep(0.2)  # let the processes become idle before the next mode starts
    found = measure(samples, started_at_s, before, after)
    if not plan.is_natural:
        return found
    by_id = {sample.sample_id: tuple(sample.token_ids) for sample in samples}
    return found | _describe(plan, [by_id[request.sample_id] for request in work])


def _describe(plan: Plan, responses: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return lengths, reward and fingerprint of natural responses, as plain data."""
    lengths = [len(response) for response in responses]
    rewards = [plan.score(i, of) for i, of in enumerate(responses)] if plan.score else []
    return {
        "lengths": lengths,
        **length_summary(lengths),
        "num_cut": sum(n >= most for n, most in zip(lengths, plan.lengths, strict=True)),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "text": hashlib.sha256(repr(list(responses)).encode()).hexdigest()[:16],
    }


def summarize(modes: Sequence[Mode], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return median and range per mode, and the speed relative to the first mode.

    Speeds are compared within the same repeat.
    """
    baseline = {r["repeat"]: r["tokens_per_s"] for r in runs if r["mode"] == modes[0].name}
    rows = []
    for mode in modes:
        mine = [run for run in runs if run["mode"] == mode.name]
        names = ("tokens_per_s", "wall_s", "acceptance_length", "tail_share")
        values = {name: [run[name] for run in mine] for name in names}
        values["speed_vs_first"] = [r["tokens_per_s"] / baseline[r["repeat"]] for r in mine]
        values["idle_s_per_engine"] = [statistics.fmean(r["idle_s"].values()) for r in mine]
        rows.append({"mode": mode.name, **{name: spread(of) for name, of in values.items()}})
    return rows
