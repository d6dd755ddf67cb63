"""All checks: what must be true of engines on a device, shown with tiny models.

A check is a function that gets a `Place`, starts engines of its own, and returns facts for the
report. It raises if something is wrong. `isolated.run` gives it a process.

On GPUs the kernels choose the order of a sum by the size of a batch, so that two batches may round
a near-tie differently. Checks that compare all tokens therefore run with vLLM's batch-invariant
kernels (`VLLM_BATCH_INVARIANT`), which promise nothing about drafts (`docs/lossless.md`). Greedy
differences on a GPU are examined: those at near-ties pass, and the report has them. The check
`bfloat16` runs the kernels of a real run.
"""

from __future__ import annotations

from tlt.doctor.isolated import Check

INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
_SAMENESS = "tlt.doctor.sameness"
_LIFE = "tlt.doctor.lifecycle"

CHECKS = (
    Check(
        "start",
        "An engine with n-grams and EAGLE-3 starts, and its sampler passes the self-test.",
        f"{_SAMENESS}:start",
    ),
    Check(
        "greedy",
        "Greedy tokens are the same with and without drafts, with random switching.",
        f"{_SAMENESS}:greedy",
        environment=INVARIANT,
    ),
    Check(
        "sampled",
        "Sampled tokens are the same with and without drafts, with random switching.",
        f"{_SAMENESS}:sampled",
        environment=INVARIANT,
    ),
    Check(
        "graphs",
        "Sampled tokens are the same with and without drafts, in bfloat16 with CUDA graphs.",
        f"{_SAMENESS}:graphs",
        min_gpus=1,
        environment=INVARIANT,
    ),
    Check(
        "bfloat16",
        "With the kernels of a real run, greedy tokens differ at near-ties only.",
        f"{_SAMENESS}:bfloat16",
    ),
    Check(
        "drafter_swap",
        "A drafter swap in mid-sample changes no token, and the new drafter drafts.",
        f"{_LIFE}:drafter_swap",
        environment=INVARIANT,
    ),
    Check(
        "policy_update",
        "After a policy update, an engine generates what the new policy generates.",
        f"{_LIFE}:policy_update",
        environment=INVARIANT,
    ),
    Check(
        "sleep",
        "An engine sleeps, gives its memory back, wakes, and generates the same tokens.",
        f"{_LIFE}:sleep",
        environment=INVARIANT,
    ),
    Check(
        "states",
        "The hidden states that an engine records are those of the policy.",
        f"{_LIFE}:states",
    ),
    Check(
        "tensor_parallel",
        "Sampled tokens are the same with and without drafts on two GPUs.",
        f"{_SAMENESS}:tensor_parallel",
        min_gpus=2,
        environment=INVARIANT,
    ),
    Check(
        "train",
        "`tlt train` runs three RL steps with TLT on, engines and learner on the same GPUs.",
        "tlt.doctor.training:colocated",
    ),
    Check(
        "train_separate",
        "`tlt train` runs three RL steps with TLT on, engine and learner on their own GPUs.",
        "tlt.doctor.training:separate",
        min_gpus=2,
    ),
)
"""All checks, in the order in which they run."""
