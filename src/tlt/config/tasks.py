"""Settings of problems, rewards and evaluations."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tlt.config.schema import LONGEST_S, Schema


class SizesConfig(Schema):
    """Heavy-tailed problem sizes: terms of a sum, numbers of a gcd, words of a text, or events of a
    story."""

    median: float = Field(default=6, gt=0)
    """Median size."""
    p95: float = Field(default=30, gt=0)
    """95th percentile of the sizes."""
    longest: int = Field(default=60, ge=1, le=10_000_000)
    """Largest size."""


class TaskConfig(Schema):
    """The problems: a `reasoning-gym` task by name, or a file."""

    name: str | None = None
    """Name of a reasoning-gym task, such as chain_sum, or of our own: word_problems."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym task, such as its difficulty; see the task's own
    documentation."""
    sizes: SizesConfig | None = None
    """Heavy-tailed problem sizes (chain_sum, gcd, letter_counting, word_problems). Every RL step
    gets the same share of the tail."""
    path: str | None = None
    """File of problems, .jsonl or .parquet, with one problem per row."""
    question_key: str = "question"
    """Column of the file that holds the question: text, or a list of messages with `role` and
    `content`, the last one from the user. Reward functions get all columns."""
    answer_key: str = "answer"
    """Column of the file that holds the right answer."""
    id_key: str | None = None
    """Column of the file that identifies each problem; by default the row number does."""
    instruction: str = ""
    """Text appended to every question, such as how to mark the answer."""
    environment: str | None = None
    """Class whose public methods are the policy's tools, as `module:Class`; or a function that
    makes such objects, or the address of an OpenEnv server. Responses then have several turns; see
    `[tools]`."""
    system_prompt: str = ""
    """System message before every question. Messages of a file that begin with a system message
    keep their own."""


class ToolsConfig(Schema):
    """The calls of an environment's tools, which run in separate processes."""

    num_workers: int = Field(default=4, ge=1, le=4096)
    """Processes that run tools: calls at the same time."""
    timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    """Seconds that the calls of a turn may take. The policy reads an error if they take longer."""
    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Largest number of turns of a response; `sampling.max_tokens` limits all turns and tool
    answers together."""
    max_turn_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """Largest number of tokens of a turn; a longer one ends the response. By default the rest of
    `sampling.max_tokens`."""
    max_answer_tokens: int = Field(default=512, ge=1, le=1_000_000)
    """Largest number of tokens that the policy reads of a tool's answer; the rest is cut off."""
    parser: str = "hermes"
    """How the model writes tool calls. `hermes`: JSON between <tool_call> tags, as Qwen models do;
    else the name of one of vLLM's tool parsers."""


class RewardConfig(Schema):
    """The scoring of responses, which runs in its own processes as responses end."""

    function: str = "auto"
    """Reward function. `gym`: the task's own score of the text in <answer> tags. `exact`: 1 if that
    text equals the answer. `math`: math-verify against the answer. `module:function`: your own
    function, called with the problem and the response's text (its last turn, with an environment),
    or a reward function of TRL with an argument `environments`. `auto`: the environment's
    `get_reward` or `reward` if it has one, else `gym` for tasks, `math` for files."""
    num_workers: int = Field(default=1, ge=1, le=1024)
    """Processes that score responses."""
    timeout_s: float = Field(default=10.0, gt=0, le=LONGEST_S)
    """Seconds a reward may take. The run does not train on a sample whose reward takes longer."""


class EvalSetConfig(Schema):
    """A further set of problems to evaluate on; each begins with `[[eval.sets]]`."""

    name: str = Field(pattern="^[a-z][a-z0-9_]*$", max_length=40, examples=["aime"])
    """Name of the set in metrics: `eval/aime/reward_mean`."""
    task: TaskConfig = Field(examples=[{"path": "data/aime.jsonl"}])
    """The problems, with the keys of `[task]`: all rows of a file, or a task of reasoning-gym."""
    reward: str = "auto"
    """Reward function, as in `reward.function`."""
    num_problems: int | None = Field(default=None, ge=1, le=100_000)
    """Problems: the first rows of the file, by default all; of a task by default 64."""
    samples_per_problem: int | None = Field(default=None, ge=1, le=10_000)
    """Samples of every problem; by default as in `[eval]`."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; by default as in `[eval]`."""


class EvalConfig(Schema):
    """The evaluation of the policy on held-out problems."""

    every_steps: int = Field(default=0, ge=0)
    """RL steps between evaluations, the first before any training; 0 never evaluates."""
    num_problems: int = Field(default=64, ge=0, le=100_000)
    """Held-out problems, which are never trained on; the last rows of a file. 0 evaluates `sets`
    alone."""
    samples_per_problem: int = Field(default=1, ge=1, le=10_000)
    """Samples of every problem, the largest k of pass@k; several need a temperature."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the evaluation; 0 takes the most likely tokens."""
    sets: list[EvalSetConfig] = Field(default_factory=list)
    """Further sets, each with its own problems and reward."""
