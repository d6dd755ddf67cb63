"""`tlt eval`: pass@k of a model on problems that have a reward.

Engines in child processes generate several samples per problem, without Ray. Drafts of n-grams
make that faster and change no sample. A sample passes if its reward is 1 or more.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from tlt.config.rollout import EngineConfig
from tlt.contracts import Sample, SampleRequest, SamplingSpec, ShowProgress
from tlt.errors import ConfigError
from tlt.hardware import compute_dtype
from tlt.models.folder import read_settings
from tlt.rollout.client import Engine
from tlt.rollout.offline import ChildEngine
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import RIGHT, pass_shares
from tlt.tasks.rewards import Reward, RewardFunction, RewardPool
from tlt.vllm.args import engine_args, max_draft_tokens

Z = 1.96
"""Standard deviations of a 95% interval."""
RUNNING = 64
"""Requests that an engine runs at the same time, at most."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """One evaluation."""

    model: str
    problems: Sequence[Problem]
    reward: RewardFunction
    num_samples: int
    """Samples per problem."""
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    num_engines: int = 1
    num_gpus: int = 0
    """GPUs of each engine."""
    reward_workers: int = 1
    reward_timeout_s: float = 10.0
    seed: int = 0
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Interval:
    """A share and its 95% interval."""

    value: float
    low: float
    high: float


# --- statistics -----------------------------------------------------------------------------------


def interval(values: Sequence[float], most: int = 1) -> Interval:
    """Return the mean over problems, with Wilson's interval.

    The values lie between 0 and 1. They may vary less than single passes do, and then a problem
    counts for up to `most` of them. All values equal to 0 or 1 still leave uncertainty. For few
    problems the variance of other values is uncertain, which Student's t accounts for.
    """
    count, mean = len(values), fmean(values)
    z, size = Z, float(count)
    if count > 1 and not {*values} <= {0.0, 1.0}:
        z = _quantile(count - 1)
        size = float(count * most)
        if (spread := variance(values)) > 0:
            size = min(size, count * mean * (1 - mean) / spread)
    middle = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z * sqrt(mean * (1 - mean) / size + z * z / (4 * size * size)) / (1 + z * z / size)
    return Interval(mean, max(0.0, middle - half), min(1.0, middle + half))


def _quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t, by its expansion around the normal one."""
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


# --- generation -----------------------------------------------------------------------------------


def requests(plan: EvalPlan, chat: Chat) -> list[list[SampleRequest]]:
    """Return the requests of every problem, each with its own seed."""
    spec = SamplingSpec(plan.max_tokens, plan.temperature, plan.top_p, logprobs=False)
    found = []
    for number, problem in enumerate(plan.problems):
        prompt = chat.prompt(problem.question, problem.history)
        draw = random.Random(f"{plan.seed}/{problem.problem_id}")
        specs = [replace(spec, seed=draw.getrandbits(63)) for _ in range(plan.num_samples)]
        found.append([SampleRequest(f"{number}/{n}", prompt, s) for n, s in enumerate(specs)])
    return found


def engine_config(plan: EvalPlan, longest_prompt: int, context: int | None) -> EngineConfig:
    """Return the engine, with room for the longest sample; refuse samples that are too long."""
    args: dict[str, Any] = {"dtype": compute_dtype(on_gpu=plan.num_gpus > 0)}
    args |= {"max_num_seqs": RUNNING} | ({} if plan.num_gpus else {"enforce_eager": True})
    engine = EngineConfig(
        model=plan.model,
        strategy={"kind": "adaptive"},
        num_gpus=plan.num_gpus,
        core_group="eval",
        engine_args=args | plan.engine_args,
    )
    needed = longest_prompt + plan.max_tokens + max_draft_tokens(engine) + 1
    if context is not None and needed > context:
        room = context - (needed - plan.max_tokens)
        raise ConfigError(
            f"--max-tokens {plan.max_tokens} and the longest prompt ({longest_prompt} tokens) need "
            f"{needed} tokens, but the model takes {context}; "
            + (f"e.g. --max-tokens {room}" if room > 0 else "use a model with a longer context")
        )
    args = {**engine.engine_args, "max_model_len": needed}
    engine = engine.model_copy(update={"engine_args": args})
    engine_args(engine)  # refuses bad settings before an engine starts
    return engine


def evaluate(plan: EvalPlan, show: ShowProgress) -> dict[str, Any]:
    """Generate, score, and return the result as plain data."""
    chat = Chat(plan.model, "RUN_OR_MODEL")
    work = requests(plan, chat)
    longest = max(len(of[0].prompt_token_ids) for of in work)
    settings = read_settings(Path(plan.model), "RUN_OR_MODEL", "name a Hugging Face folder")
    engine = engine_config(plan, longest, settings.get("max_position_embeddings"))
    started_s = time.monotonic()
    samples = generate(plan, engine, work, show)
    generated_s = time.monotonic() - started_s
    show("scoring", 1, 1)
    texts = {name: chat.text(sample.token_ids) for name, sample in samples.items()}
    rewards = asyncio.run(_score(plan, texts))
    return summary(plan, samples, rewards) | {"generation_s": generated_s}


def generate(
    plan: EvalPlan,
    engine: EngineConfig,
    work: Sequence[Sequence[SampleRequest]],
    show: ShowProgress,
) -> dict[str, Sample]:
    """Return all samples by their ids. A problem's samples share an engine, and so its prompt."""
    total = sum(map(len, work))
    samples: dict[str, Sample] = {}
    show("starting engines", 0, total)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(ChildEngine(engine, f"engine-{number}"))
            for number in range(min(plan.num_engines, len(work)))
        ]
        for each in engines:
            each.report()
        for number, each in enumerate(engines):
            each.call(Engine.submit, [r for of in work[number :: len(engines)] for r in of])
        while len(samples) < total:
            for each in engines:
                finished = each.call(Engine.take_finished, 0.5)
                samples |= {sample.sample_id: sample for sample in finished}
            show("generating", len(samples), total)
    return samples


async def _score(plan: EvalPlan, texts: dict[str, str]) -> dict[str, Reward]:
    pool = RewardPool(plan.reward, plan.reward_workers, plan.reward_timeout_s)
    try:
        scores = [pool.score(plan.problems[_problem(name)], text) for name, text in texts.items()]
        return dict(zip(texts, await asyncio.gather(*scores), strict=True))
    finally:
        pool.close()


def _problem(sample_id: str) -> int:
    return int(sample_id.partition("/")[0])


def summary(
    plan: EvalPlan, samples: dict[str, Sample], rewards: dict[str, Reward]
) -> dict[str, Any]:
    """Return pass@k with intervals, and what else is worth knowing."""
    passed = [0] * len(plan.problems)
    for name, reward in rewards.items():
        passed[_problem(name)] += reward.fault is None and reward.value >= RIGHT
    found = {
        str(k): asdict(interval(shares, plan.num_samples))
        for k, shares in pass_shares(plan.num_samples, passed).items()
    }
    lengths = [len(sample.token_ids) for sample in samples.values()]
    cut = [sample.finish_reason == "length" for sample in samples.values()]
    return {
        "num_problems": len(plan.problems),
        "num_samples": plan.num_samples,
        "temperature": plan.temperature,
        "pass_at": found,
        "reward_mean": fmean(reward.value for reward in rewards.values()),
        "mean_tokens": fmean(lengths),
        "truncated_share": fmean(cut),
        "faults": sum(reward.fault is not None for reward in rewards.values()),
    }
