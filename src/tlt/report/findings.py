"""What holds a run back, and what to change. Pure; every threshold is here.

Each finding rests on measurements of the run, never on its settings alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from tlt.observe.health import Finding, late, signs, steps_with
from tlt.observe.summary import series, stage_table
from tlt.report.view import RunView, arms, lengths, span_totals, tail_share

REWARD_SHARE = 0.10
UPDATE_SHARE = 0.50
SYNC_SHARE = 0.15
CHECKPOINT_SHARE = 0.10
EVAL_SHARE = 0.25
"""Shares of the run time above which a stage is reported."""
TAIL = 0.30
"""Smallest share of the rollout time in the tail that makes speculation worth a try."""
EVEN = 2.0
"""Ratio of the longest to the median response below which there is no tail."""
MIN_DRAFTS = 100
"""Fewest drafts that say something about a drafter."""
WEAK_LENGTH = 1.4
"""Acceptance length of a draft model below which drafting rarely pays."""
GAIN = 1.03
"""Smallest speed-up that makes speculation worth its cost."""
MIN_COMPARED_S = 0.3
"""Fewest seconds of plain decoding to compare speculation with."""
TRUNCATED_SHARE = 0.10
"""Share of truncated responses above which the length limit is reported."""
SIGNAL_SHARE = 0.10
"""Share of groups with different rewards below which the missing signal is reported."""


def findings(view: RunView) -> list[Finding]:
    """Return all findings of a run, the costliest first; at least one."""
    whole, view = view, _warmed_up(view)
    found = [
        *_trust(whole),
        *(replace(sign, weight=1.2) for sign in late(view.records)),
        *(finding for rule in RULES for finding in rule(view)),
    ]
    if not found:
        shares = _shares(view)
        found = [
            Finding(
                "nothing",
                f"Nothing stands out: the rollout takes {shares['rollout']:.0%} of the "
                f"time, the update {shares['update']:.0%}.",
                "More speed takes more devices, or a longer run that improves the drafter.",
            )
        ]
    return sorted(found, key=lambda f: -f.weight)


def _warmed_up(view: RunView) -> RunView:
    """Return the run without its first RL step, which loads and compiles, if there are others."""
    if len(view.records) < 3:
        return view
    first = view.records[0]["step"]
    later = [timeline for timeline in view.timelines if timeline.step > first]
    return replace(view, records=view.records[1:], timelines=later)


def _shares(view: RunView) -> defaultdict[str, float]:
    """Return every stage's share of the run time; 0 for a stage that took none."""
    return defaultdict(float, {stage: share for stage, _, share in stage_table(view.records)})


def _mean(view: RunView, name: str) -> float:
    values = series(view.records, name)[1]
    return sum(values) / len(values) if values else 0.0


def _trust(view: RunView) -> Iterator[Finding]:
    """Report missing learning first, then samples of a wrong policy or a wrong sampler."""
    for place, sign in enumerate(signs(view.records)):
        yield replace(sign, weight=4.0 - 0.1 * place)
    if steps := steps_with(view.records, "learner/gap_alarms"):
        then = view.setting("alarm.then", "drop")
        follows = "trained on nevertheless" if then == "warn" else "not trained on"
        yield Finding(
            "gap_alarm",
            f"In {steps} engines and learner disagreed about the samples' probabilities far more "
            f"than before: the samples may come from another policy. They were {follows}.",
            "See run.log in run.out for engines that were repaired or replaced in these RL steps. "
            "If there are none, compare engine.engine_args with stock vLLM's defaults, and file an "
            "issue.",
            2.0,
        )
    if steps := steps_with(view.records, "recheck/faults"):
        checked, faults = (
            sum(series(view.records, f"recheck/{name}")[1]) for name in ("samples", "faults")
        )
        worst = max(series(view.records, "recheck/shortfall_max")[1])
        yield Finding(
            "recheck_fault",
            f"In {steps} samples came out different when they were generated again without drafts "
            f"({faults:.0f} of {checked:.0f} rechecks of the run; the sample's token missed the "
            f"draw by up to {worst:.2g} nats): speculation or the engine changes samples.",
            "Run `tlt doctor`: all fixes must be applied (unset TLT_COMPAT_SKIP). If they are, "
            "turn speculation off (tlt.enabled = false, no engine.strategy) and file an issue with "
            "the lines of run.log on rechecks.",
            1.8,
        )
    if steps := steps_with(view.records, "rollout/policy_mismatches"):
        yield Finding(
            "policy_mismatch",
            f"In {steps} engines held another policy than the learner's after a weight sync. The "
            "engines loaded the weights again or were replaced before the next engine step; no "
            "sample was affected.",
            "Run `tlt doctor`: all fixes must be applied (unset TLT_COMPAT_SKIP). If they are, "
            "file an issue.",
            1.5,
        )


def _rewards(view: RunView) -> Iterator[Finding]:
    # The stage also includes the wait for trainers to stop.
    released_s = sum(series(view.records, "harvest/release_s")[1])
    total_s = max(1e-9, sum(series(view.records, "time/step_s")[1]))
    share = _shares(view)["reward_wait"] - released_s / total_s
    if share > REWARD_SHARE:
        yield Finding(
            "reward_bound",
            f"The run waits for rewards, with all samples finished, {share:.0%} of the time.",
            f"Raise reward.num_workers (now {view.setting('reward.num_workers', 1)}), make the "
            f"reward faster, or lower reward.timeout_s "
            f"(now {view.setting('reward.timeout_s', 10.0):g}).",
            share,
        )


def _learner(view: RunView) -> Iterator[Finding]:
    shares = _shares(view)
    share, rollout = shares["update"], shares["rollout"]
    if share > UPDATE_SHARE:
        yield Finding(
            "learner_bound",
            f"The policy update takes {share:.0%} of the time. Faster rollouts, which take "
            f"{rollout:.0%}, can make the run at most {1 / max(0.01, 1 - rollout):.1f}x as fast.",
            "Give the learner more devices (learner.num_ranks), larger rows "
            "(learner.row_tokens) if memory allows, or turn learner.gradient_checkpointing off.",
            share,
        )


def _stages(view: RunView) -> Iterator[Finding]:
    shares = _shares(view)
    for kind, stage, limit, says, change in (
        ("sync_bound", "sync", SYNC_SHARE, "weight syncs",
         "Make RL steps fewer and larger: raise sampling.prompts_per_step."),
        ("checkpoint_bound", "checkpoint", CHECKPOINT_SHARE, "waiting for checkpoints",
         "Raise checkpoint.every_steps, or write to a faster disk."),
        ("eval_bound", "eval", EVAL_SHARE, "evaluation",
         "Raise eval.every_steps, or lower eval.num_problems."),
    ):  # fmt: skip
        share = shares[stage]
        if share > limit:
            yield Finding(kind, f"{share:.0%} of the time goes into {says}.", change, share)


def _tail(view: RunView) -> Iterator[Finding]:
    found, rollout = lengths(view), _shares(view)["rollout"]
    if not found or rollout < 1 - UPDATE_SHARE - 0.1:
        return
    share = tail_share(view)
    if found["longest_over_median"] < EVEN:
        yield Finding(
            "no_tail",
            f"Responses have similar lengths (median {found['median']:.0f}, longest "
            f"{found['longest']:.0f} tokens): all engines finish at about the same time, with "
            "full batches to the end. No tail is left to shorten.",
            "Speculation pays at small batches: run more engines with fewer requests each, or "
            "allow more tokens for hard problems (sampling.max_tokens).",
            0.2 * rollout,
        )
    elif share > TAIL and not view.setting("tlt.enabled") and not _speculates(view):
        yield Finding(
            "no_speculation",
            f"{share:.0%} of the rollout time is tail: at most an eighth of the requests run, and "
            "no engine speculates.",
            "Set tlt.enabled = true.",
            share * rollout,
        )


def _speculates(view: RunView) -> bool:
    return any(arm != "off" and of["drafts"] for arm, of in arms(view).items())


def _drafter(view: RunView) -> Iterator[Finding]:
    # Only the later half of the run: the drafter may have been trained since.
    found = arms(replace(view, timelines=view.timelines[len(view.timelines) // 2 :]))
    model = [of for name, of in found.items() if name.startswith("eagle3")]
    drafts, accepted = sum(of["drafts"] for of in model), sum(of["accepted"] for of in model)
    if drafts < MIN_DRAFTS:
        return
    length = 1 + accepted / drafts
    if length < WEAK_LENGTH:
        used = sum(of["seconds"] for of in model) / sum(of["seconds"] for of in found.values())
        advice = "Let the run continue: idle workers train the drafter."
        if not view.setting("tlt.enabled"):
            advice = "Set tlt.enabled = true: idle workers then train the drafter."
        elif not view.setting("tlt.harvest", True):
            advice = "Set tlt.harvest = true: idle workers then train the drafter."
        elif not view.setting("debug.publish_drafters", True):
            advice = "Set debug.publish_drafters = true: engines then get what idle workers train."
        yield Finding(
            "weak_drafter",
            f"The drafter is too weak: its acceptance length is {length:.2f} tokens per draft, and "
            "one of them is the policy's own.",
            f"{advice} Or start from a drafter trained for this policy: run `tlt drafter train` "
            "and set engine.drafter.",
            0.05 + 0.4 * _shares(view)["rollout"] * used,
        )


def _hardware(view: RunView) -> Iterator[Finding]:
    """Compare speculation with plain decoding of as many requests in the same run."""
    spans = (span for timeline in view.timelines for row in timeline.rows.values() for span in row)
    speeds = span_totals(
        (span for span in spans if span.tokens and not span.mixed),
        lambda span: (span.arm, round(span.running)),
    )
    speculating_s = compared_s = made = plainly = 0.0
    for (arm, running), of in speeds.items():
        if arm == "off":
            continue
        speculating_s += of["seconds"]
        plain = speeds.get(("off", running))
        if plain is not None and plain["seconds"] >= MIN_COMPARED_S:
            compared_s += of["seconds"]
            made += of["tokens"]
            plainly += of["seconds"] * plain["tokens"] / plain["seconds"]
    # Where speculation pays, an adaptive strategy rarely decodes plainly: no comparison.
    if compared_s < max(MIN_COMPARED_S, speculating_s / 2):
        return
    if made < GAIN * plainly:
        yield Finding(
            "speculation_does_not_pay",
            "Speculation does not pay on this hardware: with as many requests, it generated "
            f"{made / plainly:.2f}x the tokens of plain decoding in the same time.",
            "If the acceptance length is above 2, verification costs too much here: turn "
            "speculation off (tlt.enabled = false). Otherwise train the drafter further.",
            0.3 * _shares(view)["rollout"],
        )


def _samples(view: RunView) -> Iterator[Finding]:
    if view.setting("debug.forced_lengths") is not None:
        return
    share = _mean(view, "response/truncated_share")
    if share > TRUNCATED_SHARE:
        limit = view.setting("sampling.max_tokens", 0)
        yield Finding(
            "too_little_room",
            f"{share:.0%} of the responses were cut off at sampling.max_tokens = {limit}. Their "
            "rewards say little, and many long requests end together.",
            "Raise sampling.max_tokens, and engine.engine_args.max_model_len with it (prompt + "
            "max_tokens + drafts must fit).",
            0.4 * share,
        )
    share = _mean(view, "reward/groups_with_signal_share")
    if share < SIGNAL_SHARE:
        yield Finding(
            "no_signal",
            f"Only {share:.0%} of the groups have different rewards; the others give no gradient.",
            "Choose problems that the policy sometimes solves (task.parameters), start from "
            "`tlt models sft`, or replace such groups (sampling.max_extra_prompts).",
            0.1,
        )


def _losses(view: RunView) -> Iterator[Finding]:
    engines = sum(series(view.records, "rollout/engine_restarts")[1])
    learners = sum(series(view.records, "learner/restarts")[1])
    if engines or learners:
        yield Finding(
            "restarts",
            f"Engines were lost and restarted {engines:.0f} times, the learner {learners:.0f} "
            "times; their work was done twice.",
            "See run.log and logs/ in run.out for the cause. It is usually memory "
            "(engine.kv_cache_gib, learner.row_tokens).",
            0.1,
        )


RULES: tuple[Callable[[RunView], Iterator[Finding]], ...] = (
    *(_rewards, _learner, _stages, _tail, _drafter, _hardware, _samples, _losses),
)
