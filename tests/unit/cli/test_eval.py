"""`tlt eval` without engines: pass@k and its intervals, the problems, and refusals."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from called import tlt

pytest.importorskip("torch")
pytest.importorskip("reasoning_gym")

from tlt.contracts import Sample, SampleRequest
from tlt.errors import ConfigError
from tlt.models import tiny
from tlt.offline import evaluate
from tlt.offline.evaluate import interval
from tlt.rollout.client import Engine
from tlt.tasks.chat import Chat
from tlt.tasks.gym import Problem
from tlt.tasks.held_out import ks, pass_at
from tlt.tasks.rewards import Reward

# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_samples", "passed"), [(1, 0), (5, 2), (6, 6)])
def test_pass_at_k_counts_all_draws_of_k_samples(num_samples: int, passed: int) -> None:
    outcomes = [True] * passed + [False] * (num_samples - passed)
    for k in range(1, num_samples + 1):
        draws = list(itertools.combinations(outcomes, k))
        expected = sum(any(draw) for draw in draws) / len(draws)
        assert pass_at(num_samples, passed, k) == pytest.approx(expected)


def test_intervals() -> None:
    """Single passes have Wilson's interval; values that vary less have a narrower one."""
    found = interval([1.0] * 8 + [0.0] * 2)
    bounds = [found.value, found.low, found.high]
    assert bounds == pytest.approx([0.8, 0.4902, 0.9433], abs=1e-3)
    assert interval([1.0] * 10).low == pytest.approx(1 / (1 + 1.96**2 / 10), abs=1e-6)
    assert interval([0.0] * 10).high == pytest.approx(1 - 1 / (1 + 1.96**2 / 10), abs=1e-6)
    assert interval([1.0]).low < 0.3
    wide, narrow = interval([0.0, 1.0] * 20), interval([0.4, 0.6] * 20, 20)
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3


@pytest.mark.parametrize("chances", [(0.1, 0.5, 0.9), (0.5,)])
@pytest.mark.parametrize("num_problems", [3, 40])
def test_the_interval_holds_the_truth_as_often_as_it_says(
    num_problems: int, chances: tuple[float, ...]
) -> None:
    """Problems of different difficulty or of the same, four samples each."""
    draw = random.Random(0)
    hits = 0
    for _ in range(400):
        values = []
        for _ in range(num_problems):
            chance = draw.choice(chances)
            values.append(sum(draw.random() < chance for _ in range(4)) / 4)
        found = interval(values, 4)
        hits += found.low <= 0.5 <= found.high
    assert 0.92 <= hits / 400 <= 1.0


def test_the_ks_of_the_table() -> None:
    assert [ks(n) for n in (1, 6, 8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, num_layers=3)


class FakeEngine:
    """Answers the first samples of every problem with this text, and the others with none."""

    text = "<answer>4</answer>"
    right = 1
    seen: list[SampleRequest]
    num_gpus: int

    def __init__(self, config: Any, name: str) -> None:
        type(self).num_gpus = config.num_gpus
        self._chat = Chat(config.model)
        self._waiting: list[SampleRequest] = []
        type(self).seen = []

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None: ...

    def report(self) -> None: ...

    def call(self, command: Callable[..., Any], argument: Any) -> Any:
        if command is Engine.submit:
            self._waiting += argument
            self.seen.extend(argument)
            return None
        done, self._waiting = self._waiting[:3], self._waiting[3:]
        return [self._sample(request) for request in done]

    def _sample(self, request: SampleRequest) -> Sample:
        place = int(request.sample_id.partition("/")[2])
        text = self.text if place < self.right else "none"
        tokens = self._chat._encode(text)
        return Sample(request.sample_id, tokens, (), "stop", "e", 0, 0.0, 0.0, 0.0)


class LightRewards:
    def __init__(self, function: Callable[[Problem, str], float], *limits: float) -> None:
        self._function = function

    async def score(self, problem: Problem, text: str) -> Reward:
        return Reward(float(self._function(problem, text)))

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(evaluate, "ChildEngine", FakeEngine)
    monkeypatch.setattr(evaluate, "RewardPool", LightRewards)


def problems(count: int, path: str = "sums.jsonl") -> str:
    rows = [{"question": f"{n} + {4 - n}?", "answer": "4"} for n in range(count)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_model_on_a_file(model: Path) -> None:
    arguments = ("eval", str(model), "--task", problems(10), "--reward", "exact")
    code, output, errors = tlt(*arguments, "--samples", "2", "--engines", "2", "--json")
    assert code == 0, errors
    found = json.loads(output)
    assert found["num_problems"] == 10
    assert found["pass_at"]["1"]["value"] == 0.5
    assert found["pass_at"]["2"]["value"] == 1.0
    assert 0.7 < found["pass_at"]["2"]["low"] < 1.0
    assert found["faults"] == 0
    assert len({request.sampling.seed for request in FakeEngine.seen}) == 20
    output = tlt(*arguments, "--samples", "2")[1]
    assert "pass@k" in output
    assert "50.0%" in output


def run_folder(model: Path, name: str = "run", **changes: Any) -> None:
    """Write a run that has ended."""
    folder = Path(name)
    folder.mkdir()
    tree = {
        "run": {"out": name, "num_steps": 1},
        "policy": {"model": str(model)},
        "task": {"name": "gcd", "parameters": {"max_value": 9}},
        "reward": {"function": "exact"},
        "sampling": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 20, "temperature": 0.7},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(tree | changes))
    (folder / "policy").symlink_to(model)


@pytest.mark.parametrize(("options", "num_gpus"), [((), 2), (("--gpus", "0"), 0)])
def test_a_run_is_measured_on_what_it_held_out(
    model: Path, options: tuple[str, ...], num_gpus: int
) -> None:
    held_out = {"every_steps": 5, "num_problems": 12}
    run_folder(model, eval=held_out, engine={"num_gpus": 2}, learner={"num_gpus": 1})
    code, output, errors = tlt("eval", "run", "--samples", "1", "--json", *options)
    assert code == 0, errors
    found = json.loads(output)
    assert found["problems"] == "12 held-out problems of the run"
    assert found["temperature"] == 0.7
    assert FakeEngine.seen[0].sampling.max_tokens == 20
    assert FakeEngine.num_gpus == num_gpus


def test_a_file_is_asked_and_scored_as_the_run_does(model: Path) -> None:
    """Otherwise pass@k of another file is that of another instruction and reward."""
    rows = [{"ask": f"{n} + {4 - n}?", "is": "4"} for n in range(3)]
    for name in ("train.jsonl", "test.JSONL"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"path": "train.jsonl", "question_key": "ask", "answer_key": "is"}
    told = {"instruction": "Answer in tags.", "system_prompt": "Be brief."}
    run_folder(model, task=task | told)
    code, output, errors = tlt("eval", "run", "--task", "test.JSONL", "--samples", "1", "--json")
    assert code == 0, errors
    assert json.loads(output)["pass_at"]["1"]["value"] == 1.0, "the run's reward reads <answer>"
    system = [{"role": "system", "content": "Be brief."}]
    questions = [f"{n} + {4 - n}?\nAnswer in tags." for n in range(3)]
    expected = {Chat(str(model)).prompt(question, system) for question in questions}
    assert {request.prompt_token_ids for request in FakeEngine.seen} == expected


def test_usual_columns_of_a_file_are_found(model: Path) -> None:
    Path("p.jsonl").write_text('{"problem": "2 + 2?", "target": "4"}\n')
    code, _, errors = tlt("eval", str(model), "--task", "p.jsonl", "--samples", "1", "--json")
    assert code == 0, errors


def test_the_held_out_rows_of_a_file_are_its_last(model: Path) -> None:
    task = {"path": problems(9)}
    run_folder(model, task=task, eval={"every_steps": 5, "num_problems": 3})
    code, _, errors = tlt("eval", "run", "--samples", "1", "--json")
    assert code == 0, errors
    expected = {Chat(str(model)).prompt(f"{n} + {4 - n}?") for n in (6, 7, 8)}
    assert {request.prompt_token_ids for request in FakeEngine.seen} == expected


SUMS = {"name": "sums", "task": {"path": "sums.jsonl"}, "reward": "exact", "num_problems": 5}


def test_a_set_of_the_run(model: Path) -> None:
    problems(7)
    run_folder(model, eval={"every_steps": 1, "num_problems": 0, "sets": [SUMS]})
    code, output, errors = tlt("eval", "run", "--set", "sums", "--samples", "2", "--json")
    assert code == 0, errors
    found = json.loads(output)
    assert (found["problems"], found["pass_at"]["1"]["value"]) == ("5 problems of set sums", 0.5)
    assert "step" not in found
    code, _, errors = tlt("eval", "run")
    assert code == 2
    assert "(eval.num_problems = 0)" in errors
    assert "--set sums" in errors


def test_a_run_that_goes_on_is_measured_at_its_newest_checkpoint(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def export_policy(run: Path, step: int | None, out: Path) -> int:
        asked.append(step)
        shutil.copytree(model, out)
        return step or 7

    monkeypatch.setattr("tlt.train.export.export_policy", export_policy)
    run_folder(model, eval={"every_steps": 1, "num_problems": 3})
    arguments = ("eval", "run", "--samples", "1", "--json")
    assert "step" not in json.loads(tlt(*arguments)[1]), "a run that has ended has a policy"
    assert json.loads(tlt(*arguments, "--step", "4")[1])["step"] == 4
    Path("run", "policy").unlink()
    assert json.loads(tlt(*arguments)[1])["step"] == 7
    assert asked == [4, None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "RUN_OR_MODEL = 'nowhere'"),
        (["."], "config.json"),
        (["M"], "e.g. --task gcd"),
        (["M", "--task", "gdc"], "--task: reasoning-gym has no task 'gdc'"),
        (["M", "--task", "odd.jsonl"], "--task odd.jsonl has no column of the question"),
        (["M", "--task", "none.jsonl"], "--task: none.jsonl"),
        (["M", "--task", "gcd", "--parameter", "x=1"], "--parameter: x"),
        (["M", "--task", "gcd", "--sizes", "1"], "--sizes '1'"),
        (["M", "--task", "gcd", "--reward", "mine"], "--reward: 'mine'"),
        (["M", "--task", "gcd", "--temperature", "0"], "--samples 1"),
        (["M", "--task", "gcd", "--max-tokens", "99999"], "4096; e.g. --max-tokens"),
        (["run", "--parameter", "x=1"], "--parameter and --sizes go with --task"),
        (["unfinished"], "unfinished holds no policy and no checkpoint yet; wait for RL step 10"),
        (["M", "--step", "3"], "--step 3 is for a run"),
        (["run", "--set", "aime"], "eval.sets (none)"),
        (["all"], "eval.every_steps = 0"),
        (["agent"], "need its tools (task.environment = 'calculator:Calculator')"),
    ],
)
def test_mistakes_name_the_option(model: Path, arguments: Sequence[str], words: str) -> None:
    run_folder(model)
    run_folder(model, "all", task={"path": problems(3)})
    run_folder(model, "unfinished")
    Path("unfinished", "policy").unlink()
    agent = {"name": "gcd", "environment": "calculator:Calculator"}
    run_folder(model, "agent", task=agent)
    Path("odd.jsonl").write_text('{"x": "2 + 2?", "y": "4"}\n')
    code, _, errors = tlt("eval", *(str(model) if a == "M" else a for a in arguments))
    assert code == 2, errors
    assert words in " ".join(errors.split())


def test_a_context_too_short_for_the_prompt_is_refused() -> None:
    plan = evaluate.EvalPlan("m", [], lambda *_: 1.0, 1, 10)
    with pytest.raises(ConfigError, match="longer context"):
        evaluate.engine_config(plan, 100, 64)
    assert evaluate.engine_config(plan, 100, None).engine_args["max_model_len"] > 110
