"""Every metric of a training step, declared once; `docs/metrics.md` is generated from here.

A name is `area/name_unit`; what has no unit is a count, a share of 1, or explained. A record is a
mapping from such names to numbers and always holds `step`. What a step did not do (evaluate,
capture) it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    meaning: str


_DECLARED = (
    Metric("step", "RL step, from 1; what is measured before the first step has 0"),
    Metric("policy_version", "Version of the policy that the step ended with"),
    Metric("drafter_version", "Version of the drafter that the step's samples were drafted with"),
    Metric("reward/mean", "Mean reward of the step's samples"),
    Metric("reward/std", "Standard deviation of their rewards"),
    Metric("reward/groups_with_signal_share", "Share of groups whose rewards are not all the same"),
    Metric("reward/faults", "Samples counted as 0 because the reward failed or took too long"),
    Metric("prompt/mean_tokens", "Mean length of the samples' prompts"),
    Metric("response/mean_tokens", "Mean length of the responses"),
    Metric("response/median_tokens", "Median length"),
    Metric("response/p99_tokens", "Length that one response in a hundred exceeds"),
    Metric("response/longest_tokens", "Longest response"),
    Metric("response/truncated_share", "Share of responses cut off at `sampling.max_tokens`"),
    Metric("rollout/output_tokens", "Tokens generated"),
    Metric("rollout/tokens_per_s", "Tokens generated per second of rollout, by all engines"),
    Metric("rollout/acceptance_length", "Mean tokens per pass of the policy under speculation"),
    Metric("rollout/drafter_hit_share", "Share of the drafter's drafts whose first token is taken"),
    Metric("rollout/engine_restarts", "Engines that were lost and started again"),
    Metric("rollout/broken_samples", "Samples that ended by abort or error, generated again"),
    Metric(
        "rollout/policy_mismatches",
        "Engines whose policy was wrong: mended or replaced",
    ),
    Metric("rollout/fingerprint_s", "Engine seconds spent on comparing policies, all engines"),
    Metric("rollout/idle_share", "Share of the engines' seconds without a running request"),
    Metric("learner/loss", "Policy loss, mean over the step's updates"),
    Metric("learner/grad_norm", "Norm of the gradient before it is scaled down"),
    Metric("learner/skipped_updates", "Updates left out because their gradient was not finite"),
    Metric("learner/lr", "Learning rate of the last update"),
    Metric("learner/kl", "Divergence from the first policy, per token"),
    Metric("learner/clipped_share", "Share of tokens whose probability ratio was clipped"),
    Metric("learner/gap_mean", "Mean distance between engines' and learner's log probabilities"),
    Metric("learner/gap_alarms", "Updates whose gap was far above the run's history"),
    Metric("learner/capped_share", "Share of tokens at `algorithm.max_importance`"),
    Metric("learner/tokens_per_s", "Tokens trained on per second of update"),
    Metric("learner/tokens", "Tokens trained on, each sample's prompt included"),
    Metric("learner/shared_share", "Share of them computed once for several samples of a prompt"),
    Metric("learner/rows", "Packed micro-batches"),
    Metric("learner/row_fill_share", "Share of the micro-batches' room that held tokens"),
    Metric("learner/restarts", "Times the ranks were lost and started again"),
    Metric("capture/samples", "Samples whose hidden states were kept for the drafter"),
    Metric("capture/bytes", "Size of these hidden states"),
    Metric("harvest/enabled", "1 while idle workers may train the drafter, 0 when given up"),
    Metric("harvest/idle_s", "Worker seconds with nothing to generate while others had"),
    Metric("harvest/coverable_s", "Those of them in spells long enough for a lease"),
    Metric("harvest/used_s", "Worker seconds of drafter training, judging and merging"),
    Metric(
        "harvest/trained_tokens",
        "Tokens the drafter was trained on",
    ),
    Metric("harvest/loss", "Loss of the drafter in its last piece of training"),
    Metric("harvest/held_out_length", "Tokens per draft expected of it on held-out samples"),
    Metric("harvest/published", "Drafters that were better, and so for the engines"),
    Metric("harvest/refused", "Results that were no better than the drafter in use"),
    Metric("harvest/merges", "Results of several trainers that were averaged"),
    Metric("harvest/swap_s", "How long engines stood still for new drafters"),
    Metric("harvest/release_s", "How long the run waited for its devices"),
    Metric("harvest/stop_max_s", "Longest time so far from calling a lease back to a free device"),
    Metric("harvest/faults", "Failures of trainers, which cost nothing but their work"),
    Metric("harvest/kills", "Trainers that did not stop in time and were killed"),
    Metric("harvest/trainer_restarts", "Trainers that were started again"),
    Metric("harvest/coordinator_restarts", "Times the coordinator was lost"),
    Metric("harvest/alarms", "Drafter accepted hardly ever: engines do without it"),
    Metric("eval/reward_mean", "Mean reward of the held-out problems"),
    Metric("eval/mean_tokens", "Mean length of their responses"),
    Metric("time/step_s", "The whole step; the stages below add up to it"),
    Metric("time/rollout_s", "From the first request to the last sample"),
    Metric("time/reward_wait_s", "From the last sample to the last reward"),
    Metric("time/update_s", "Policy update after the rollout"),
    Metric("time/sync_s", "New weights into the engines"),
    Metric("time/checkpoint_s", "How long the step stood still for a checkpoint"),
    Metric("time/eval_s", "Evaluation"),
    Metric("time/other_s", "What no other stage accounts for"),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}

STAGES = ("rollout", "reward_wait", "update", "sync", "checkpoint", "eval", "other")
"""Where the time of a step goes, in order; `time/<stage>_s` each."""

HEADER = """# Metrics

What every step of `tlt train` records, generated from `src/tlt/observe/metrics.py`
(`python -m tlt.observe.metrics > docs/metrics.md`; a test keeps this page in step).

They stand in `metrics.jsonl` of the run's folder, one line a step, and go to the places that
[`metrics`](configuration.md) names. TensorBoard and Weights & Biases show them under these names;
Prometheus under `tlt_` and the name with `_` for `/`: `tlt_reward_mean`. Restarts, faults and
tokens count within the step. What a step did not do, it leaves out.
"""


def check_names(record: Iterable[str]) -> None:
    """Every name of a record is declared."""
    unknown = sorted(set(record) - METRICS.keys())
    assert not unknown, f"undeclared metrics: {', '.join(unknown)}"


def reference() -> str:
    """The page as Markdown."""
    rows = [f"| `{metric.name}` | {metric.meaning} |\n" for metric in METRICS.values()]
    return f"{HEADER}\n| metric | what it says |\n|---|---|\n{''.join(rows)}"


if __name__ == "__main__":
    import sys

    sys.stdout.write(reference())
