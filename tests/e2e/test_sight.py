"""What users see of a run: the timeline, the report, the live view, and what holds a run back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from commands import GCD, command, started, tlt
from trace_events import check_trace

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

SMALL = (
    "run.num_steps=3 sampling.prompts_per_step=8 eval.every_steps=0 checkpoint.every_steps=100 "
    "pool.num_engines=1 debug.core_group=test-sight"
)
LONG_TAIL = (
    "sampling.max_tokens=400 debug.forced_lengths={median=15,p95=150,longest=400} "
    "engine.engine_args={enforce_eager=true,max_model_len=640,max_num_seqs=64}"
)
SLOW_RUNS = {
    "no_speculation": LONG_TAIL,
    "reward_bound": 'reward.function="slow_reward:score" reward.num_workers=1',
    "learner_bound": "learner.row_tokens=96 algorithm.kl_weight=0.01 learner.updates_per_step=4 "
    "run.num_steps=5",
    "weak_drafter": f"{LONG_TAIL} tlt.enabled=true debug.publish_drafters=false "
    "engine.strategy.kind=fixed engine.strategy.drafter=eagle3 engine.strategy.num_draft_tokens=3",
}
"""Settings that make a run slow in one way each, by the finding that must name it. Unit tests know
the other findings."""


@pytest.mark.parametrize("kind", SLOW_RUNS)
def test_what_holds_a_run_back_is_named(
    policy: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (policy / "slow_reward.py").write_text(
        "import time\n\ndef score(problem, text):\n    time.sleep(0.2)\n"
        "    return float(len(text) % 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(policy))
    tlt(f"train {GCD} run.out=runs/{kind} {SMALL} {SLOW_RUNS[kind]}", policy)
    run = policy / "runs" / kind
    found = json.loads(tlt(f"report {run} --json", policy))["runs"][0]
    assert found["findings"][0]["kind"] == kind, found["findings"]
    assert found["findings"][0]["change"].split(".")[0] in tlt(f"doctor --run {run}", policy)
    # The timeline file and the report agree about seconds.
    seconds = check_trace(run / "timeline.json")
    for worker, of in found["workers"].items():
        for state, value in of.items():
            assert value == pytest.approx(seconds[worker].get(state, 0.0), abs=1e-3)


def test_watching_a_run(policy: Path) -> None:
    arguments = f"train {GCD} run.out=runs/watched {SMALL} {LONG_TAIL} run.num_steps=4"
    run = policy / "runs" / "watched"
    seen: set[str] = set()
    with started(command(arguments), policy, policy / "watched.log") as process:
        while process.poll() is None:
            if (run / "live.json").exists() and len(seen) < 3:
                shown = tlt(f"watch {run} --once", policy)
                seen |= {word for word in ("engine-0", "generating", "reward") if word in shown}
            time.sleep(0.3)
    assert process.returncode == 0
    assert len(seen) == 3
    assert not (run / "live.json").exists()
    assert tlt(f"watch {run} --once", policy)
