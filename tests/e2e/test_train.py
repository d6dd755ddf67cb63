"""`tlt train` as a user runs it: it learns, and nothing that dies loses or repeats a step."""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from commands import GCD, command, records, started, titled, tlt, wait_for, wait_for_steps
from listeners import beyond_loopback, listening, reached_from_outside
from speed import by_size, limit
from trace_events import check_trace

SEEDS = range(int(os.environ.get("TLT_SEEDS", "1")))
"""Seeds of the recipe that must learn; three take nine minutes."""
ROUNDS = int(os.environ.get("TLT_KILL_ROUNDS", "1"))
"""Kills of each kind of process; five take a quarter of an hour."""
STEPS = by_size(gate=4 * ROUNDS, all_=4 * (ROUNDS + 1))
SHORT = (
    f"run.num_steps={STEPS} sampling.prompts_per_step=8 sampling.group_size=4 "
    "checkpoint.every_steps=1 eval.every_steps=0 "
    "pool.max_restarts=20 learner.max_restarts=20 debug.core_group=test-train"
)
"""Settings of a small run: two such runs are equal in every bit."""
TLT = "tlt.enabled=true tlt.min_lease_s=0.1 tlt.session_s=0.5 tlt.lr=3e-3"
"""TLT with leases for rollouts of a second."""

Records = list[dict[str, float]]

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


def assert_same(found: Records, reference: Records) -> None:
    """Compare samples and updates in every bit: all that depends on neither time nor restarts."""
    skipped = (
        *("time/", "rollout/tokens_per_s", "rollout/idle", "rollout/engine_restarts"),
        *("learner/tokens_per_s", "learner/restarts", "rollout/fingerprint_s"),
        "recheck/",  # made in idle time
    )
    one, other = (
        [{k: v for k, v in record.items() if not k.startswith(skipped)} for record in of]
        for of in (found, reference)
    )
    assert one == other


# --- it learns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_rises(policy: Path, seed: int) -> None:
    tlt(f"train {GCD} run.out=runs/seed-{seed} run.seed={seed}", policy)
    run = policy / "runs" / f"seed-{seed}"
    rewards = [r["reward/mean"] for r in records(run) if "reward/mean" in r]
    fifth = len(rewards) // 5
    first, last = sum(rewards[:fifth]) / fifth, sum(rewards[-fifth:]) / fifth
    assert last - first >= 0.2, rewards
    for name in ("versions.json", "summary.json", "samples", "policy/model.safetensors"):
        assert (run / name).exists(), name
    for name in ("run.log", "logs/engine-0.log", "logs/rank-0.log"):
        assert " INFO tlt." in (run / name).read_text(), name


# --- other ways to run it -------------------------------------------------------------------------


def test_separate_devices_stream_to_the_same_update(policy: Path, undisturbed: Records) -> None:
    """Gradients of complete groups, computed during rollout, add up to the same sum."""
    tlt(
        f"train {GCD} run.out=runs/separate {SHORT} run.num_steps=3 pool.num_engines=1 "
        "placement.kind=separate learner.row_tokens=256",
        policy,
    )
    found = records(policy / "runs" / "separate")
    assert steps_of(found) == [1, 2, 3]
    assert found[0]["reward/mean"] == undisturbed[0]["reward/mean"]
    assert found[0]["learner/grad_norm"] == pytest.approx(
        undisturbed[0]["learner/grad_norm"], rel=1e-3
    )
    assert found[0]["learner/rows"] > undisturbed[0]["learner/rows"]


def test_an_emulated_run_is_the_same_run_in_other_seconds(
    policy: Path, undisturbed: Records
) -> None:
    """Four engines share two cores, sleep for trainers and the learner, and change no sample."""
    tlt(
        f"train {GCD} run.out=runs/emulated {SHORT} {TLT} run.num_steps=3 pool.num_engines=4 "
        "emulate.hardware=h100 emulate.dilation=4 emulate.tokens=8 capture.capacity_gib=0.1",
        policy,
    )
    found = records(policy / "runs" / "emulated")
    assert steps_of(found) == [1, 2, 3]
    same = ("reward/mean", "response/mean_tokens", "learner/grad_norm", "learner/loss")
    for name in same:
        assert [r[name] for r in found] == [r[name] for r in undisturbed[:3]], name
    assert all(r["harvest/enabled"] == 1 and r["harvest/faults"] == 0 for r in found)
    assert all(r["emulate/late_share"] >= 0 for r in found)
    said = json.loads((policy / "runs" / "emulated" / "summary.json").read_text())["emulated"]
    assert said == "emulated: 4 H100s, qwen2.5-7b, 1 token for 8"
    # At most 64 tokens and a weight sync: their emulated time is the least that they may take.
    assert min(r["time/rollout_s"] for r in found) > 4 * 0.0085 * 10


def test_everything_switched_on(policy: Path) -> None:
    tlt(
        f"train {GCD} run.out=runs/all {SHORT} run.num_steps=3 learner.num_ranks=2 "
        "learner.updates_per_step=2 algorithm.kl_weight=0.01 algorithm.advantage=rloo "
        "sampling.temperature=0.8 capture.enabled=true capture.capacity_gib=0.1 "
        "eval.every_steps=2 eval.num_problems=8 metrics.tensorboard=true "
        "metrics.prometheus_port=0 engine.strategy.kind=fixed engine.strategy.drafter=ngram "
        "engine.strategy.num_draft_tokens=2",
        policy,
    )
    run = policy / "runs" / "all"
    found = [r for r in records(run) if "reward/mean" in r]
    assert steps_of(found) == [1, 2, 3]
    assert [r["policy_version"] for r in found] == [2, 4, 6]
    assert max(r["learner/gap_mean"] for r in found) < 1e-3
    assert found[-1]["learner/kl"] > 0
    assert found[-1]["capture/bytes"] > 0
    assert found[-1]["rollout/acceptance_length"] > 1
    assert [r["step"] for r in records(run) if "eval/reward_mean" in r] == [0, 2, 3]
    assert list((run / "checkpoints" / "step-000003" / "buffer-0").iterdir())
    assert list(run.rglob("events.out.tfevents*"))


def test_idle_workers_train_the_drafter_and_a_resumed_run_goes_on_with_it(policy: Path) -> None:
    settings = (
        f"{GCD} run.out=runs/harvest sampling.prompts_per_step=8 sampling.max_tokens=900 "
        "debug.forced_lengths={median=20,p95=200,longest=900} debug.core_group=test-train "
        "engine.engine_args={enforce_eager=true,max_model_len=1024,max_num_seqs=64} "
        "eval.every_steps=0 checkpoint.every_steps=2 tlt.enabled=true tlt.min_lease_s=0.1 "
        "tlt.session_s=1 tlt.lr=3e-3 "  # and no n-grams, which would leave little idle time:
        """engine.strategy='{kind="fixed",drafter="eagle3",num_draft_tokens=2}'"""
    )
    tlt(f"train {settings} run.num_steps=8", policy)
    run = policy / "runs" / "harvest"
    found = records(run)
    assert steps_of(found) == list(range(1, 9))
    assert sum(r["harvest/published"] for r in found) >= 1
    assert sum(r["harvest/faults"] + r["harvest/kills"] for r in found) == 0
    assert max(r["harvest/stop_max_s"] for r in found) < limit(1.0)
    checkpoint = run / "checkpoints" / "step-000008"
    saved = json.loads((checkpoint / "drafter" / "version.json").read_text())
    assert saved["version"] >= found[-1]["drafter_version"] >= 1
    assert found[-1]["harvest/evaluated_share"] < 0.3
    tlt(f"train {settings} run.num_steps=10 --resume", policy)
    assert steps_of(records(run)) == list(range(1, 11))
    seconds = check_trace(run / "timeline.json", holes=1)  # between the two processes
    assert sum(of.get("training", 0.0) for of in seconds.values()) > 1
    end = json.loads((run / "drafter" / "version.json").read_text())
    assert end["version"] >= saved["version"]


# --- nothing is lost ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(policy: Path) -> Records:
    tlt(f"train {GCD} run.out=runs/undisturbed {SHORT}", policy)
    return records(policy / "runs" / "undisturbed")


def running(
    policy: Path, name: str, flags: str = ""
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    arguments = f"train {GCD} run.out=runs/{name} {SHORT} {flags}"
    return started(command(arguments), policy, policy / f"{name}.log")


def finished(policy: Path, name: str, process: subprocess.Popen[bytes], code: int = 0) -> Records:
    """Wait for the end of a run, and return its records: every RL step once."""
    said = policy / f"{name}.log"
    assert process.wait(timeout=limit(400)) == code, said.read_text()[-3000:]
    found = records(policy / "runs" / name)
    if code == 0:
        assert steps_of(found) == list(range(1, STEPS + 1))
    return found


def children(process: subprocess.Popen[bytes], title: str) -> list[psutil.Process]:
    """Return the actors of a kind, which Ray started, or the processes that the driver started."""
    is_actor = title.startswith("ray::")
    return titled(psutil.Process(process.pid).children(recursive=is_actor), title)


def steps_of(found: Records) -> list[int]:
    return [int(record["step"]) for record in found]


@pytest.mark.gate
def test_with_tlt_and_a_killed_driver_it_is_the_same_run(
    policy: Path, undisturbed: Records
) -> None:
    """Drafts, harvest, a kill and a resume change no bit of samples, updates and weights."""
    off, on = (policy / "runs" / name for name in ("undisturbed", "same"))
    rng = random.Random(0)
    for round_ in range(ROUNDS):
        with running(policy, "same", f"{TLT} --resume" if round_ else TLT) as process:
            wait_for_steps(1 + 4 * round_, on, process)
            time.sleep(rng.uniform(0, 1.5))  # anywhere in a step
            os.kill(process.pid, signal.SIGKILL)
    with running(policy, "same", f"{TLT} --resume") as process:
        found = finished(policy, "same", process)
    assert max(r["rollout/acceptance_length"] for r in found) > 1
    kept = [sorted((run / "samples").iterdir()) for run in (off, on)]
    assert len(kept[0]) == STEPS
    for without, with_tlt in zip(*kept, strict=True):
        assert with_tlt.read_text() == without.read_text(), without.name
    for name in ("learner/loss", "learner/grad_norm", "learner/gap_mean"):
        assert [r[name] for r in found] == [r[name] for r in undisturbed], name
    weights = [load_file(run / "policy" / "model.safetensors") for run in (off, on)]
    start = load_file(policy / "models" / "tiny-sft" / "model.safetensors")
    assert all(weights[0][name].equal(tensor) for name, tensor in weights[1].items())
    assert not any(start[name].equal(tensor) for name, tensor in weights[1].items())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_in_time_and_it_resumes_as_undisturbed(
    policy: Path, undisturbed: Records, number: int, code: int
) -> None:
    name, rng = f"signal-{number}", random.Random(number)
    run, log = policy / "runs" / name, policy / f"{name}.log"
    flags = "checkpoint.every_steps=100 run.checkpoint_on_term=true"
    with running(policy, name, flags) as process:
        wait_for_steps(1, run, process)
        time.sleep(rng.uniform(0, 1.5))  # anywhere in a step
        began_s = time.monotonic()
        process.send_signal(number)
        done = len(finished(policy, name, process, code))
        assert time.monotonic() - began_s < 27
    assert "Traceback" not in log.read_text()
    assert (run / "checkpoints" / f"step-{done:06d}" / "state.json").exists()
    with running(policy, name, f"{flags} --resume") as process:
        assert_same(finished(policy, name, process), undisturbed)


@pytest.mark.parametrize(
    ("title", "number", "num_whole"),
    [
        ("ray::EngineActor", signal.SIGKILL, 2),
        ("ray::EngineActor", signal.SIGSTOP, 1),
        ("ray::LearnerActor", signal.SIGKILL, 1),
        ("ray::LearnerActor", signal.SIGSTOP, 1),
        ("spawn_main", signal.SIGKILL, 1),  # workers that compute rewards
    ],
    ids=str,
)
def test_killed_and_stopped_processes_are_replaced_and_change_nothing(
    policy: Path, undisturbed: Records, title: str, number: int, num_whole: int
) -> None:
    """A process that gets SIGSTOP answers nothing, and cannot end by itself: the run kills it."""
    name = f"{title.removeprefix('ray::')}-{number}"
    limits = f"pool.health_timeout_s={limit(15):.0f} learner.timeout_s={limit(40):.0f}"
    rng = random.Random(name)
    hit: list[psutil.Process] = []
    with running(policy, name, limits if number == signal.SIGSTOP else "") as process:
        for round_ in range(ROUNDS):
            wait_for_steps(1 + 4 * round_, policy / "runs" / name, process)
            wait_for(lambda: len(children(process, title)) >= num_whole, process, "a victim")
            time.sleep(rng.uniform(0, 1))
            hit.append(rng.choice(children(process, title)))
            hit[-1].send_signal(number)
        found = finished(policy, name, process)
    assert not psutil.wait_procs(hit, timeout=limit(10))[1], "it outlives the run"
    if title.startswith("ray::"):
        restarts = sum(r["rollout/engine_restarts"] + r["learner/restarts"] for r in found)
        assert restarts > ROUNDS - num_whole  # the run may end before an engine is needed again
    assert_same(found, undisturbed)


def test_a_run_on_one_machine_listens_on_loopback_only(policy: Path) -> None:
    """A port scan of all its processes: Ray, engines, two ranks, trainers and reward workers."""
    run = policy / "runs" / "scanned"
    with running(policy, "scanned", f"{TLT} learner.num_ranks=2") as process:
        wait_for_steps(1, run, process)
        found = listening(process.pid)
        assert len(children(process, "ray::LearnerActor")) == 2
        assert found, "the scan sees Ray's processes"
        assert beyond_loopback(found) == set()
        assert reached_from_outside({port for _, port in found}) == set()
