"""Rewards that work, crash, hang, or return no number."""

import asyncio
import importlib.util
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

for library in ("pebble", "reasoning_gym", "math_verify"):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}", allow_module_level=True)
psutil = pytest.importorskip("psutil")

from reward_acts import act  # noqa: E402
from tlt.errors import ConfigError  # noqa: E402
from tlt.tasks import gym  # noqa: E402
from tlt.tasks.gym import Problem, answer_in, problems, score  # noqa: E402
from tlt.tasks.rewards import (  # noqa: E402
    RewardPool,
    exact_score,
    math_score,
    reward_function,
)


def problem(name: str = "p", answer: str = "1") -> Problem:
    return Problem(problem_id=name, question="?", answer=answer)


async def test_a_bad_reward_is_a_counted_fault_and_the_rest_goes_on(tmp_path: Path) -> None:
    expected = {
        "1": (1.0, None),
        "hang": (0.0, "timeout"),
        "0.5": (0.5, None),
        "crash": (0.0, "crash"),
        f"crash-once {tmp_path / 'crashed'}": (1.0, None),
        "raise": (0.0, "error"),
        "exit": (0.0, "error"),
        "string": (0.0, "not a number"),
        "lambda": (0.0, "not a number"),
        "nan": (0.0, "not a number"),
        "inf": (0.0, "not a number"),
        "1e200": (0.0, "too large"),
        "-1e16": (0.0, "too large"),
        "1e15": (1e15, None),
        "heavy": (0.0, None),
        "0.25": (0.25, None),
    }

    with closing(RewardPool(act, num_workers=2, timeout_s=1.5)) as pool:
        done = await asyncio.gather(*(pool.score(problem(), text) for text in expected))
        got = {text: (each.value, each.fault) for text, each in zip(expected, done, strict=True)}
        assert got == expected
        kinds = {"timeout": 1, "crash": 1, "error": 2, "not a number": 4, "too large": 2}
        assert pool.faults == kinds


def workers() -> list[int]:
    """Return the workers among this process's children; others are resource trackers."""
    return [child.pid for child in psutil.Process().children() if is_worker(child)]


def is_worker(process: Any) -> bool:
    try:
        return any("spawn_main" in part for part in process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return False


async def test_many_at_once_while_workers_are_killed(caplog: pytest.LogCaptureFixture) -> None:
    with closing(RewardPool(act, num_workers=1, timeout_s=10.0)) as pool:
        await pool.score(problem(), "1")
        for pid in workers():  # idle: this breaks a pebble pool
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        long = [f"{'x' * 5000} {n}" for n in range(400)]
        done = await asyncio.gather(*(pool.score(problem(), text) for text in long))
        assert [(each.value, each.fault) for each in done] == [(n, None) for n in range(400)]
        assert "processes of rewards are started again" in caplog.text


async def test_workers_that_do_not_start_end_no_run() -> None:
    with closing(RewardPool(act, num_workers=1, timeout_s=10.0)) as pool:
        pool.processes.stall_timeout_s = 0.0
        assert (await pool.score(problem(), "1")).fault == "crash"
        pool.processes.stall_timeout_s = 30.0
        assert (await pool.score(problem(), "1")).value == 1.0
    assert wait_for(lambda: not workers())


def test_a_function_that_workers_cannot_import_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function: other processes cannot import"):
        RewardPool(lambda problem, response: 1.0, num_workers=1, timeout_s=10.0)


async def test_a_closed_pool_says_so() -> None:
    with closing(RewardPool(act, num_workers=1, timeout_s=10.0)) as pool:
        pool.close()
        with pytest.raises(RuntimeError):
            await pool.score(problem(), "1")


PARENT = """
import asyncio
import psutil
from tlt.tasks.gym import Problem
from tlt.tasks.rewards import RewardPool, reward_function

async def main():
    pool = RewardPool(reward_function("local_reward:score", True), num_workers=2, timeout_s=60.0)
    problem = Problem("p", "?", "1")
    assert (await pool.score(problem, "0.5")).value == 0.5
    hung = asyncio.ensure_future(pool.score(problem, "hang"))
    await asyncio.sleep(0.3)
    print(*(child.pid for child in psutil.Process().children()), flush=True)
    await hung

if __name__ == "__main__":
    asyncio.run(main())
"""

LOCAL_REWARD = """
import time

def score(problem, response):
    time.sleep(60 if response == "hang" else 0)
    return float(response)
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Check idle and hung workers; their function is in a file of the current directory."""
    home = tmp_path / "elsewhere"
    home.mkdir()
    (home / "parent.py").write_text(PARENT)
    (tmp_path / "local_reward.py").write_text(textwrap.dedent(LOCAL_REWARD))
    parent = subprocess.Popen(
        [sys.executable, str(home / "parent.py")], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) >= 2
        parent.kill()
        parent.wait()
        assert wait_for(lambda: not any(map(alive, pids)))


def wait_for(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_entry_point_that_workers_import_again_is_light() -> None:
    code = "import tlt.cli.main, sys; print(*({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_gym_scores_its_own_answers() -> None:
    for task in ("chain_sum", "gcd", "letter_counting"):
        for made in problems(task, 5):
            assert score(made, made.solution) == 1.0
            assert score(made, "no idea") == 0.0
            assert score(made, made.answer) == 0.0
            assert score(made, f"<answer>7{made.answer}</answer>") < 1.0
            assert score(made, f"<answer>7</answer>\n{made.solution}") == 1.0


def test_an_answer_that_a_scorer_cannot_read_is_wrong() -> None:
    (made,) = gym.generate("prime_factorization", 1, 0, "", {})
    assert score(made, f"<answer>{made.answer}</answer>") == 1.0
    assert score(made, "<answer>no idea</answer>") == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("none", None),
        ("<answer>open", None),
        ("<answer> 1\n2 </answer>", "1\n2"),
        ("<answer>1</answer> no, <answer>2</answer> done", "2"),
        ("<answer>let me think <answer>2</answer>", "2"),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert answer_in(text) == answer


def test_a_long_text_of_open_tags_takes_no_time() -> None:
    started_s = time.thread_time()
    assert answer_in("<answer>" * 20_000 + "x" * 100_000) is None
    assert time.thread_time() - started_s < 1.0


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("72", "5 + 3 = 8, so <answer>72</answer>", 1.0),
        ("72", r"first 72, but \boxed{71}", 0.0),
        (r"\frac{1}{2}", "The answer is $0.5$.", 1.0),
        ("1/2", r"<answer>\frac{1}{2}</answer>", 1.0),
        ("10^{20}", r"\boxed{10}", 0.0),
        ("1,234", r"\boxed{1234}", 1.0),
        ("x^2 + 2x + 1", "$(x+1)^2$", 1.0),
    ],
)
def test_math_sees_what_is_equal(answer: str, text: str, value: float) -> None:
    assert math_score(problem(answer=answer), text) == value


async def test_math_works_in_any_thread() -> None:
    assert await asyncio.to_thread(math_score, problem(answer="2"), "$2$") == 1.0


def test_a_right_answer_that_is_not_math_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read the right answer"):
        math_score(problem(answer=""), "1")


def test_exact_wants_the_answer_to_the_letter() -> None:
    assert exact_score(problem(answer="10"), "so <answer> 10 </answer>") == 1.0
    assert exact_score(problem(answer="10"), "so <answer>710</answer>") == 0.0
    assert exact_score(problem(answer="10"), "so 10") == 0.0


def test_auto_takes_what_fits_the_problems() -> None:
    assert reward_function("auto", from_file=False) is score
    assert reward_function("auto", from_file=True) is math_score
    assert reward_function("exact", from_file=True) is exact_score
    own: object = reward_function("math:sqrt", from_file=True)
    assert own is math.sqrt
    with pytest.raises(ConfigError, match=r"reward\.function: gym scores tasks"):
        reward_function("gym", from_file=True)
