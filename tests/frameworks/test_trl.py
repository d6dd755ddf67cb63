"""TRL's own GRPOTrainer with TLT in it, in the environment of `make setup-trl`."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]
EXAMPLE = ROOT / "examples" / "trl_grpo.py"
NUM_STEPS = 8

steps_of = importlib.import_module("trl_pairs").steps_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.two_cores]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_drafter_trains_and_rewards_stay_the_same(tmp_path: Path) -> None:
    run(["-m", "tlt", "models", "tiny", "--out", "tiny"], tmp_path)
    command = [str(EXAMPLE), "tiny", "--steps", str(NUM_STEPS)]
    drafted = steps_of(run([*command, "--out", "drafted"], tmp_path))
    plain = steps_of(run([*command, "--out", "plain", "--without"], tmp_path))
    assert len(drafted) == len(plain) == NUM_STEPS
    assert [step["reward"] for step in drafted] == [step["reward"] for step in plain]
    assert len({step["reward"] for step in plain}) > 1
    recorded = drafted[-1]["tlt/recorded_samples"]
    assert recorded > 8 * (NUM_STEPS - 1), "threads store samples, the last ones a moment later"
    assert any("tlt/acceptance_length" in step for step in drafted)
    assert not any("tlt/acceptance_length" in step for step in plain)
    versions = [step["tlt/drafter_version"] for step in drafted]
    assert versions[0] == 0
    assert versions[-1] >= 1, "no better drafter reached the engine"
    assert {step["tlt/drafter_version"] for step in plain} == {0}

    from tlt.drafter.checkpoint import load_drafter

    trained = load_drafter(tmp_path / "drafted" / "drafter")
    first = load_drafter(tmp_path / "drafted" / "drafter-start")
    assert not trained.fc.weight.equal(first.fc.weight)


def test_a_class_is_an_environment_here_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of docs/agents.md has the same tools in TRL and in TLT."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from transformers.utils import get_json_schema
    from trl import GRPOConfig, GRPOTrainer

    from tlt.agents.environment import environment_class, tool_names, tool_schemas
    from tlt.models import tiny

    page = (ROOT / "docs/agents.md").read_text()
    code = re.search(r"```python\n(# higher_lower\.py\n.*?)```", page, re.S)
    assert code is not None
    (tmp_path / "higher_lower.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    cls = environment_class("higher_lower:HigherLower")

    trl = Path(sys.modules["trl"].__path__[0])
    folder = tiny.make(tmp_path / "tiny", hidden_size=64, num_layers=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (trl / "chat_templates" / "qwen3.jinja").read_text()
    rows = [{"prompt": [{"role": "user", "content": "Guess!"}], "answer": "42"}]
    trainer = GRPOTrainer(
        str(folder),
        reward_funcs=lambda environments, **_: [each.reward for each in environments],
        args=GRPOConfig(output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[]),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=cls,
    )
    assert [tool.__name__ for tool in trainer.tools] == tool_names(cls)
    assert [get_json_schema(tool) for tool in trainer.tools] == tool_schemas(cls)
