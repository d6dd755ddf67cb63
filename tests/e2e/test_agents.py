"""Trajectories with tools are the same in every bit, whatever drafts, waits, dies and resumes.

Two runs are compared by their samples, rewards, updates and last weights, and by the calls of their
tools: a tool that is called twice for one turn shows in the file where the tools note each call.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from commands import ROOT, command, records, started, titled, tlt, wait_for, wait_for_steps
from speed import by_size, limit

EXAMPLE = ROOT / "examples" / "calculator_agent"
STEPS = 3
RUN = (
    f"train {EXAMPLE / 'run.toml'} policy.model=models/tiny-calls "
    "task.environment=slow_calculator:SlowCalculator reward.function=auto "
    "sampling.prompts_per_step=6 sampling.group_size=4 eval.every_steps=0 checkpoint.every_steps=1 "
    "pool.max_restarts=20 learner.max_restarts=20 metrics.keep_samples=1000 "
    "debug.core_group=test-agents "
)
OFF = "engine.strategy.kind=off"
NGRAM = (
    "engine.ngram={min_match=2} "
    """engine.strategy='{kind="fixed",drafter="ngram",num_draft_tokens=3}'"""
)
HARVEST = (
    "tlt.enabled=true tlt.min_lease_s=0.1 tlt.session_s=0.5 tlt.lr=3e-3 "
    """engine.strategy='{kind="fixed",drafter="eagle3",num_draft_tokens=2}'"""
)
SAME = (
    *("step", "reward/mean", "reward/std", "rollout/output_tokens", "response/mean_tokens"),
    *("tools/turns_mean", "tools/turns_max", "tools/answer_tokens", "tools/errors"),
    *("learner/loss", "learner/grad_norm", "learner/gap_mean", "learner/tokens"),
)
TOOLS = '''
"""The calculator, whose calls take a random time and note themselves."""

import os
import random
import time
from typing import Any

from calculator import Calculator


class SlowCalculator(Calculator):
    def reset(self, **problem: Any) -> None:
        super().reset()
        self.story = problem["question"]

    @property
    def reward(self) -> float:
        """Differs between trajectories of any policy: the policy learns in every step."""
        return min(self.num_calls, 4) / 4

    def calculate(self, sum: str) -> str:
        """Work out a sum.

        Args:
            sum: Such as 4 + 1 or 5 - 2.
        """
        self._note(sum)
        return super().calculate(sum)

    def _note(self, *what: Any) -> None:
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{what} {self.num_calls} {self.story}\\n")
        time.sleep(random.uniform(0, float(os.environ["TOOL_S"])))
'''

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.two_cores]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tools and a policy that has learned to call them."""
    folder = tmp_path_factory.mktemp("agents")
    shutil.copy(EXAMPLE / "calculator.py", folder)
    (folder / "slow_calculator.py").write_text(TOOLS)
    tlt("models tiny --out models/tiny", folder)
    tlt(
        "models sft --model models/tiny --out models/tiny-calls --task word_problems --sizes 2,3,4 "
        "--environment calculator:Calculator --steps 120 "
        "--row-tokens 2048 --lr 3e-3 --dtype float32",
        folder,
    )
    return folder


class Run:
    """A run and the calls of its tools, which take up to `tool_s` seconds."""

    def __init__(self, home: Path, name: str, tool_s: float, settings: str) -> None:
        self.home, self.out = home, home / "runs" / name
        self.calls = home / f"{name}-calls.txt"
        self.log = home / f"{name}.log"
        self.words = command(f"{RUN} run.num_steps={STEPS} run.out={self.out} {settings}")
        self.environment = {"CALLS": str(self.calls), "TOOL_S": str(tool_s)}

    @contextmanager
    def running(self, *flags: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = self.environment | more
        with started([*self.words, *flags], self.home, self.log, **environment) as process:
            yield process

    def finish(self, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        assert process.wait(timeout=limit(400)) == 0, self.log.read_text()[-3000:]
        found = records(self.out)
        assert [r["step"] for r in found] == list(range(1, STEPS + 1))
        return found

    def whole(self, **more: str) -> list[dict[str, Any]]:
        with self.running(**more) as process:
            return self.finish(process)

    def num_calls(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0

    def wait_for_a_call(self, process: subprocess.Popen[bytes]) -> None:
        before = self.num_calls()
        wait_for(lambda: self.num_calls() > before, process, "a tool call")

    def samples(self) -> list[str]:
        return [path.read_text() for path in sorted((self.out / "samples").iterdir())]

    def weights(self) -> dict[str, Any]:
        return load_file(self.out / "policy" / "model.safetensors")


@pytest.fixture(scope="module")
def off(home: Path) -> Run:
    """Return the run without speculation, on two engines, with tools that answer at once."""
    run = Run(home, "off", 0.0, OFF)
    found = run.whole()
    assert all(r["tools/turns_mean"] > 2 for r in found), "the policy calls no tools"
    assert all(r["learner/grad_norm"] > 0 for r in found)
    return run


def assert_same(run: Run, off: Run) -> None:
    one, other = records(run.out), records(off.out)
    for name in SAME:
        assert [r[name] for r in one] == [r[name] for r in other], name
    assert run.samples() == off.samples()
    assert sorted(run.calls.read_text().splitlines()) == sorted(off.calls.read_text().splitlines())
    expected = off.weights()
    assert all(expected[name].equal(tensor) for name, tensor in run.weights().items())


@pytest.mark.gate
def test_turns_are_drafted_learned_and_generated_again_without_drafts(home: Path) -> None:
    """One short run: every turn is also generated without drafts in idle time, or may be."""
    settings = f"{NGRAM} run.num_steps=1 alarm.recheck_share=1.0 alarm.then=stop"
    run = Run(home, "gate", 2.0, settings)
    with run.running() as process:
        assert process.wait(timeout=limit(100)) == 0, run.log.read_text()[-3000:]
    (found,) = records(run.out)
    assert found["tools/turns_mean"] > 2
    assert found["tools/wait_s_mean"] > 0.1
    assert found["rollout/acceptance_length"] > 1.2
    assert found["recheck/samples"] > 0
    assert found["recheck/faults"] == 0
    assert found["learner/gap_mean"] < 1e-5, "masks and positions are those of the engines"
    assert found["rollout/output_tokens"] < sum(len(s) for s in run.samples())
    assert run.num_calls() > 20
    assert not (run.out / "tools" / "1").exists(), "no run needs the answers again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tool_s", "settings"),
    [
        ("ngram", 0.0, NGRAM),
        ("late", by_size(gate=1, all_=2), NGRAM),
        ("one-engine", 0.0, f"{NGRAM} pool.num_engines=1"),
        ("one-engine-late", 0.5, f"{OFF} pool.num_engines=1"),
    ],
)
def test_drafts_engines_and_late_tools_change_nothing(
    home: Path, off: Run, name: str, tool_s: float, settings: str
) -> None:
    run = Run(home, name, tool_s, settings)
    found = run.whole()
    assert_same(run, off)
    if settings.startswith(NGRAM):
        assert min(r["rollout/acceptance_length"] for r in found) > 1.2


@pytest.mark.slow
def test_a_drafter_that_is_swapped_in_a_rollout_changes_nothing(home: Path, off: Run) -> None:
    run = Run(home, "harvest", 2.0, HARVEST)
    found = run.whole()
    assert_same(run, off)
    assert sum(r["harvest/published"] for r in found) >= 1
    assert max(r["drafter_version"] for r in found) >= 1
    assert sum(r["harvest/faults"] for r in found) == 0


def kill_engine(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    random.Random(0).choice(titled(children, "ray::EngineActor")).kill()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["generation", "tool call"])
def test_an_engine_that_is_killed_changes_nothing(home: Path, off: Run, when: str) -> None:
    in_call = when == "tool call"
    run = Run(home, f"engine-{when.split()[0]}", 2.0 if in_call else 0.0, NGRAM)
    with run.running() as process:
        wait_for_steps(1, run.out, process)
        run.wait_for_a_call(process)
        if not in_call:
            time.sleep(random.Random(0).uniform(0, 0.3))
        kill_engine(process)
        found = run.finish(process)
    assert sum(r["rollout/engine_restarts"] for r in found) >= 1
    assert_same(run, off)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_driver_that_ends_during_tool_calls_resumes_as_undisturbed(
    home: Path, off: Run, number: int, code: int
) -> None:
    """The calls under way outlive it, and the resumed run reads their answers."""
    run = Run(home, f"driver-{number}", 2.0, NGRAM)
    with run.running() as process:
        wait_for_steps(1, run.out, process)
        run.wait_for_a_call(process)
        os.kill(process.pid, number)
        assert process.wait(timeout=limit(60)) == code, run.log.read_text()[-3000:]
    with run.running("--resume") as process:
        run.finish(process)
    assert_same(run, off)


@pytest.mark.slow
def test_with_vllms_own_sampler_drafts_change_the_trajectories(home: Path, off: Run) -> None:
    """The control: rejection sampling follows the policy, and draws other samples."""
    tests = ROOT / "tests"
    path = [tests / "e2e" / "stock_sampler", tests, os.environ.get("PYTHONPATH", "")]
    run = Run(home, "stock", 0.0, NGRAM)
    run.whole(TLT_COMPAT_SKIP="keyed", PYTHONPATH=os.pathsep.join(str(p) for p in path if str(p)))
    assert run.samples()[0] != off.samples()[0]
    expected = off.weights()
    assert not all(expected[name].equal(tensor) for name, tensor in run.weights().items())
