"""Problems, their worked solutions, and heavy-tailed sizes."""

import pickle
import random
import subprocess
import sys

import pytest

reasoning_gym = pytest.importorskip("reasoning_gym")

from tlt.errors import ConfigError  # noqa: E402
from tlt.tasks.gym import problems  # noqa: E402
from tlt.tasks.tail import HeavyTail  # noqa: E402
from tlt.tasks.worked import WORKED, worked_solution  # noqa: E402

IN_LINES = sorted(
    WORKED.keys() - {"word_problems"}
)  # one step per line, with the result at its end


@pytest.mark.parametrize("task", IN_LINES)
def test_the_steps_lead_to_the_answer(task: str) -> None:
    """The last step of each worked solution ends in the answer reasoning-gym expects."""
    for problem in problems(task, 50):
        *steps, answer = problem.solution.splitlines()
        assert answer == f"<answer>{problem.answer}</answer>"
        assert steps[-1].split()[-1] == problem.answer


@pytest.mark.parametrize("task", IN_LINES)
def test_the_number_of_steps_has_a_heavy_tail(task: str) -> None:
    steps = sorted(problem.solution.count("\n") for problem in problems(task, 400))
    assert steps[395] >= 4 * steps[200]


def test_problems_follow_from_the_seed() -> None:
    assert problems("chain_sum", 5, seed=1) == problems("chain_sum", 9, seed=1)[:5]

    def questions(seed: int = 0, purpose: str = "") -> list[str]:
        return [problem.question for problem in problems("chain_sum", 5, seed, purpose)]

    assert questions(seed=1) != questions(seed=2)
    assert questions() != questions(purpose="bench")


def test_a_problem_of_a_seed_stays_the_same() -> None:
    """These problems must not change: policies were trained on them."""
    (problem,) = problems("gcd", 1, seed=3)
    assert problem.problem_id == "gcd/train/3/0"
    assert problem.question == (
        "Find the Greatest Common Divisor (GCD) of these numbers: 71, 26, 1, 165. "
        "Give only the GCD as your final answer."
    )


def test_worked_example() -> None:
    metadata = {"expression": "4 - 1 - 7 + 20"}
    assert worked_solution("chain_sum", metadata, "16") == (
        "4 - 1 = 3\n3 - 7 = -4\n-4 + 20 = 16\n<answer>16</answer>"
    )


def test_word_problems_are_scored_in_a_process_that_made_none() -> None:
    """The task is our own, and reasoning-gym must know it wherever a response is scored."""
    (problem,) = problems("word_problems", 1)
    code = (
        "import pickle, sys; from tlt.tasks.gym import score;"
        "problem = pickle.load(sys.stdin.buffer); text = problem.solution;"
        "print(score(problem, text), score(problem, '<answer>-1</answer>'))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pickle.dumps(problem), capture_output=True, check=True)
    assert done.stdout.split() == [b"1.0", b"0.0"]


def test_word_problems_have_a_heavy_tail_by_default() -> None:
    lengths = sorted(len(problem.solution) for problem in problems("word_problems", 1000))
    assert lengths[990] >= 6 * lengths[500]


@pytest.mark.parametrize(("median", "fewest"), [(1, 1), (2, 2)])
def test_stories_of_one_event_need_a_median_below_two(median: float, fewest: int) -> None:
    made = problems("word_problems", 200, sizes=HeavyTail(median, p95=6, longest=16))
    assert min(each.entry["metadata"]["num_events"] for each in made) == fewest


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'poetry' has no worked solutions; known: chain_sum"):
        problems("poetry", 1)


def test_sizes_have_their_median_and_their_tail() -> None:
    tail, rng = HeavyTail(median=60, p95=500, longest=1500), random.Random(0)
    sizes = sorted(tail.draw(rng) for _ in range(2000))
    assert 54 < sizes[1000] < 66
    assert 430 < sizes[1900] < 580
    assert sizes[-1] == 1500


def test_a_spread_batch_has_its_share_of_the_tail() -> None:
    tail = HeavyTail(median=60, p95=500, longest=1500)
    for seed in range(20):
        sizes = sorted(tail.spread(32, random.Random(seed)))
        assert sizes == sorted(tail.spread(32, random.Random(seed)))
        assert 50 <= sizes[16] <= 72  # the median, in every batch
        assert sizes[-1] >= 500  # and one of the largest twentieth
