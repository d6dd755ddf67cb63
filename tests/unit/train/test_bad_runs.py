"""Runs that cannot work are refused before any engine starts.

Every message names the key or file at fault and a way out. The checks are those of
`tlt train --check`.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from small_run import REQUIRED

pytest.importorskip("torch")
pytest.importorskip("reasoning_gym")

from tlt.config.load import load_config
from tlt.config.train import MetricsConfig, TrainConfig, resolve_defaults
from tlt.errors import ConfigError
from tlt.hardware import Machine
from tlt.models import tiny
from tlt.observe.sinks import open_sinks
from tlt.train import preflight
from tlt.train.folder import RunFolder
from tlt.train.preflight import prepare


@dataclass
class Attempt:
    """A run that would work, until a case spoils it."""

    folder: Path
    """Folder of the attempt, in which it is started."""
    tree: dict[str, dict[str, Any]]
    overrides: list[str] = field(default_factory=list)
    resume: bool = False

    @property
    def path(self) -> Path:
        return self.folder / "run.toml"

    @property
    def model(self) -> Path:
        return Path(self.tree["policy"]["model"])

    def check(self) -> None:
        """Check the run as `tlt train --check` does."""
        config = load_config(TrainConfig, self.path, self.overrides)
        RunFolder(Path(config.run.out)).check(config, self.resume)
        prepare(config)

    def own_model(self) -> Path:
        """Return a copy of the model, to be broken."""
        copy = self.folder / "model"
        shutil.copytree(self.model, copy)
        self.overrides.append(f"policy.model={copy}")
        return copy


Spoil = Callable[[Attempt], None]


def settings(*overrides: str) -> Spoil:
    """Override settings."""
    return lambda attempt: attempt.overrides.extend(overrides)


def run_toml(change: Callable[[str], str | bytes | None]) -> Spoil:
    """Change the TOML file, or remove it."""

    def spoil(attempt: Attempt) -> None:
        text = change(attempt.path.read_text())
        if text is None:
            attempt.path.unlink()
        else:
            attempt.path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return spoil


def model_file(name: str, change: Callable[[bytes], bytes | None]) -> Spoil:
    """Change a file of the model folder, or remove it."""

    def spoil(attempt: Attempt) -> None:
        path = attempt.own_model() / name
        content = change(path.read_bytes() if path.exists() else b"")
        path.unlink() if content is None else path.write_bytes(content)

    return spoil


def template(text: bytes) -> Spoil:
    """Give the tokenizer another chat template."""
    return model_file("chat_template.jinja", lambda b: text)


def model_config(**changes: Any) -> Spoil:
    return model_file("config.json", lambda b: json.dumps(json.loads(b) | changes).encode())


def drafter(config: bytes | None, weights: bool = True) -> Spoil:
    """Name a drafter folder with this config.json."""

    def spoil(attempt: Attempt) -> None:
        folder = attempt.folder / "drafter"
        folder.mkdir()
        if config is not None:
            (folder / "config.json").write_bytes(config)
        if weights:
            (folder / "model.safetensors").write_bytes(b"")
        attempt.overrides.append(f"engine.drafter={folder}")

    return spoil


def data(content: bytes | None, *overrides: str, name: str = "data.jsonl") -> Spoil:
    """Train on a file with this content, or on a missing one."""

    def spoil(attempt: Attempt) -> None:
        if content is not None:
            (attempt.folder / name).write_bytes(content)
        attempt.tree["task"] = {"path": str(attempt.folder / name)}
        attempt.path.write_text(tomli_w.dumps(attempt.tree))
        attempt.overrides += ["reward.function=exact", *overrides]

    return spoil


def module(name: str, code: str, key: str = "reward.function") -> Spoil:
    """Name the function `f` of a module with this code."""

    def spoil(attempt: Attempt) -> None:
        (attempt.folder / f"{name}.py").write_text(code)
        attempt.overrides.append(f"{key}={name}:f")

    return spoil


def sets(*each: str) -> Spoil:
    """Evaluate on these sets."""
    return settings("eval.every_steps=1", f"eval.sets=[{', '.join(each)}]")


def both(first: Spoil, second: Spoil) -> Spoil:
    def spoil(attempt: Attempt) -> None:
        first(attempt)
        second(attempt)

    return spoil


def begun(*overrides: str, resume: bool, damage: str | None = None) -> Spoil:
    """Start from a folder that holds a run."""

    def spoil(attempt: Attempt) -> None:
        config = load_config(TrainConfig, attempt.path)
        out = RunFolder(Path(config.run.out))
        out.open(config, {}, "tlt train")
        if damage is not None:
            (out.path / "config.toml").write_text(damage)
        attempt.resume = resume
        attempt.overrides += overrides

    return spoil


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


TWENTY = lines(*[{"question": f"{n} + 0?", "answer": n} for n in range(20)])
GPU = ("engine.num_gpus=2", "pool.num_engines=4")
NGRAM = '{kind = "fixed", drafter = "ngram", num_draft_tokens = 2}'

# how to make it wrong, the key or file that the message names, and a way out that it names
WRONG: list[tuple[Spoil, str, str]] = [
    # the file and its overrides
    (run_toml(lambda t: None), "run.toml", "tlt init"),
    (run_toml(lambda t: t + "\nlr = = 3\n"), "run.toml", "num_steps = 100"),
    (run_toml(lambda t: b"# \xe4\n"), "run.toml", "UTF-8"),
    (run_toml(lambda t: ""), "policy is missing", "[policy] with model ="),
    (settings("learner.lr"), "learner.lr", "learner.lr=1e-6"),
    (settings("leaner.lr=1e-6"), "leaner", "did you mean learner?"),
    (run_toml(lambda t: re.sub(r"num_steps = \d+\n", "", t)), "run.num_steps", "e.g. 100"),
    # values
    (settings("sampling.group_size=1"), "sampling.group_size = 1", "e.g. 8"),
    (data(TWENTY, "sampling.prompts_per_step=4", "sampling.max_extra_prompts=17"),
     "sampling.max_extra_prompts: 17", "at most 16"),
    (settings("sampling.max_extra_prompts=-1"), "sampling.max_extra_prompts = -1", "e.g. 0"),
    (settings("sampling.max_extra_prompts=4", "debug.forced_lengths={median=2, p95=4, longest=8}"),
     "sampling.max_extra_prompts = 4", "set it to 0"),
    (both(settings("learner.lora.rank=4"), model_config(
        model_type="qwen3_moe", num_experts=8, moe_intermediate_size=32, decoder_sparse_step=1)),
     "learner.lora.rank = 4: mixtures of experts", "set it to 0"),
    (settings("learner.lora={rank=4, target_modules=['q_proj', 'query']}"),
     "no linear layer 'query'; they have down_proj, gate_proj, k_proj,", "leave it out"),
    # the algorithm
    (settings("algorithm.overlong_tokens=9999"), "algorithm.overlong_tokens = 9999", "e.g. "),
    (settings("algorithm.advantage=ppo"), "algorithm.advantage", "my_algorithm:advantage"),
    (settings("algorithm.loss=ppo"), "algorithm.loss", "my_algorithm:loss"),
    (module("bad_advantage", "def f(rewards): return [1.0]", "algorithm.advantage"),
     "algorithm.advantage = 'bad_advantage:f'", "e.g. 'grpo'"),
    (settings("algorithm.advantage_over=step"), "algorithm.advantage_over = 'step'", "'group'"),
    (both(module("flat", "def f(groups): return [0.0, 1.0]", "algorithm.advantage"),
          settings("algorithm.advantage_over=step")),
     "in a list per group", "algorithm.advantage = 'flat:f'"),
    (module("bad_loss", "def f(new, old, advantage, settings): return new.sum()", "algorithm.loss"),
     "algorithm.loss = 'bad_loss:f'", "e.g. 'clipped'"),
    # the model
    (settings("policy.model=nowhere"), "policy.model = 'nowhere'", "tlt models"),
    (model_file("model.safetensors", lambda b: None), "policy.model", "save_pretrained"),
    (model_file("model.safetensors.index.json",
                lambda b: b'{"weight_map": {"x": "2.safetensors"}}'),
     "2.safetensors", "download it again"),
    (model_file("config.json", lambda b: b[:40]), "config.json", "tlt models"),
    (model_config(sliding_window=64), "policy.model", "full attention"),
    (model_config(model_type="mixtral", num_local_experts=8), "mixtral with num_local_experts = 8",
     "Qwen3-MoE"),
    (model_config(model_type="qwen3_moe", num_experts=8, mlp_only_layers=[0]), "policy.model",
     "experts in every layer"),
    (model_config(vocab_size=50), "policy.model", "the model's own tokenizer"),
    (model_config(hidden_size="64"), "hidden_size = '64'", "tlt models"),
    (model_file("tokenizer.json", lambda b: b[: len(b) // 2]), "policy.model", "save_pretrained"),
    (model_file("tokenizer_config.json",
                lambda b: json.dumps(json.loads(b) | {"model_max_length": "many"}).encode()),
     "policy.model", "tokenizer_config.json"),
    (model_file("chat_template.jinja", lambda b: None), "policy.model", "chat_template"),
    (template(b"{{ raise_exception('no system role') }}"), "no system role", "chat_template"),
    (template(b"{{ '' }}"), "policy.model", "chat_template"),
    (model_file("model.safetensors", lambda b: b[:-100]), "model.safetensors", "download it again"),
    (settings("engine.engine_args.max_model_len=80", f"engine.strategy={NGRAM}"),
     "engine.engine_args.max_model_len = 80", "lower sampling.max_tokens"),
    (settings("engine.engine_args.max_model_len=5000"),
     "engine.engine_args.max_model_len = 5000", "or less"),
    (settings('engine.engine_args.max_model_len="4k"'), "engine_args.max_model_len", "remove it"),
    (settings("sampling.max_tokens=5000"), "policy.model", "lower sampling.max_tokens to"),
    # the engine
    (settings("engine.drafter=nowhere"), "engine.drafter = 'nowhere'", "tlt drafter train"),
    (drafter(b"{"), "engine.drafter", "tlt drafter train"),
    (drafter(b"{}", weights=False), "engine.drafter", "tlt drafter train"),
    (drafter(b'{"hidden_size": 128, "vocab_size": 260}'), "engine.drafter", "for this model"),
    (settings("engine.engine_args.max_num_seq=8"), "engine_args.max_num_seq", "max_num_seqs?"),
    (settings('engine.strategy={kind="fixed", drafter="ngram", num_draft_tokens=100000}'),
     "engine: strategy", "num_draft_tokens = 4"),
    (settings('engine.strategy={kind="adaptive", margin="x"}'), "margin = 'x'", "leave it out"),
    (settings('engine.strategy={kind="fixed", drafter="eagle3", num_draft_tokens=2}'),
     "engine.drafter", "e.g. engine.drafter ="),
    (settings('engine.strategy={kind="fixed"}'), "engine: strategy", "the key 'drafter'"),
    (settings(f"engine.strategy={NGRAM}", "engine.max_draft_tokens=1"),
     "engine.max_draft_tokens = 1", "set it to 2"),
    (settings('engine.engine_args.speculative_config={posterior_threshold=0.1, method="ngram"}'),
     "speculative_config.posterior_threshold", "num_speculative_tokens"),
    (settings("engine.engine_args.scheduler_cls=my.Scheduler"), "scheduler_cls", "remove it"),
    (settings("engine.engine_args.dtype=float16"), "engine.engine_args.dtype", "remove it"),
    (settings("sampling.temperature=0.7", "engine.engine_args.logprobs_mode=raw_logprobs"),
     "engine.engine_args.logprobs_mode", "remove it"),
    # places
    (settings("pool.num_engines=1000"), "pool.num_engines", "e.g. pool.num_engines ="),
    (settings("placement.kind=separate", "learner.num_ranks=1000"),
     "learner.num_ranks", "e.g. pool.num_engines ="),
    (settings("learner.num_ranks=1000"), "learner.num_ranks", "e.g. learner.num_ranks = 1"),
    (settings("learner.updates_per_step=5"), "learner.updates_per_step", "updates_per_step = 1"),
    (settings(*GPU, "learner.num_gpus=1", "learner.num_ranks=2"),
     "learner.num_ranks = 2", "set it to 8"),
    (settings(*GPU, "learner.num_ranks=8"), "learner.num_gpus = 0", "learner.num_gpus = 1"),
    (settings(*GPU, "learner.num_gpus=1", "learner.num_ranks=8", "emulate.hardware=h100"),
     "emulate.hardware = 'h100'", "engine.num_gpus = 0"),
    (settings("emulate.hardware=h100", "placement.kind=separate"),
     "emulate.hardware = 'h100'", "placement.kind = 'colocated'"),
    (settings("emulate.hardware=b300"), "emulate.hardware", "'h100'"),
    (settings("emulate.dilation=0.5"), "emulate.dilation = 0.5", "1"),
    (settings("learner.num_gpus=1"), "learner.num_gpus = 1", "learner.num_gpus = 0"),
    (settings("capture.enabled=true", "capture.folder=nowhere"), "capture.folder", "'/dev/shm'"),
    (settings("capture.enabled=true", "capture.capacity_gib=1e6"), "capture.capacity_gib", "e.g. "),
    (settings("capture.enabled=true", "capture.by=engines"), "capture.by", "e.g. 'learner'"),
    (settings("capture.by=engines", "tlt.enabled=true", "tlt.harvest=false",
              "capture.enabled=true"), "capture.by", "e.g. 'learner'"),
    (settings("capture.enabled=true"), "capture.enabled", "set it to false"),
    # tasks, data and rewards, whose own tests have more
    (settings("task.path=x.jsonl"), "task.path", "task.name = 'chain_sum'"),
    (settings("task.sizes.median=50"), "task.sizes", "e.g. 60, 500, 1500"),
    (data(TWENTY + b"{\n"), "data.jsonl, line 21", '"question": '),
    (data(TWENTY, "sampling.prompts_per_step=21"), "sampling.prompts_per_step", "at most 20"),
    (data(TWENTY, "eval.every_steps=1", "eval.num_problems=20"), "eval.num_problems", "e.g. 2"),
    # held-out sets
    (settings("eval.every_steps=1", "eval.num_problems=0"), "eval.sets", "eval.num_problems = 64"),
    (settings("eval.every_steps=1", "eval.samples_per_problem=4"),
     "eval: temperature = 0", "temperature = 0.6"),
    (sets('{name="AIME", task={name="gcd"}}'), "eval.sets.0.name = 'AIME'", "e.g. 'aime'"),
    (sets('{name="a", tsk={name="gcd"}}'), "eval.sets.0.tsk", "did you mean task?"),
    (sets('{name="a"}'), "eval.sets.0.task is missing", "e.g. "),
    (sets('{name="a", task={name="gcd"}}', '{name="a", task={name="gcd"}}'),
     "two sets are called 'a'", "e.g. a_2"),
    (sets('{name="a", task={}}'), "eval.sets, a: task.name or task.path", "'chain_sum'"),
    (sets('{name="a", task={path="none.jsonl"}}'), "eval.sets, a: task.path", "none.jsonl"),
    (sets('{name="a", task={name="gcd"}, reward="fancy"}'),
     "eval.sets, a: reward: 'fancy'", "my_rewards:score"),
    (sets('{name="a", task={name="gcd"}, samples_per_problem=2}'),
     "eval.sets, a: temperature = 0", "samples_per_problem = 1"),
    (sets('{name="a", task={name="gcd"}, num_problems=0}'),
     "eval.sets.0.num_problems = 0", "or leave it out"),
    (both(data(TWENTY, "eval.num_problems=2"), sets('{name="a", task={path="data.jsonl"}}')),
     "eval.sets, a: task.path", "eval.num_problems"),
    (both(module("bad_raises_2", "def f(*_): raise KeyError('gold')"),
          sets('{name="a", task={name="gcd"}, reward="bad_raises_2:f"}')),
     "KeyError: 'gold'", "e.g. 1.0"),
    (module("bad_exits", "import sys\nsys.exit(0)\n"), "reward.function", "install it"),
    (settings("reward.function=fancy"), "reward.function", "my_rewards:score"),
    (module("bad_raises", "def f(*_): raise KeyError('gold')"), "KeyError: 'gold'", "e.g. 1.0"),
    (both(module("bad_hangs", "import time\ndef f(*_): time.sleep(60)"),
          settings("reward.timeout_s=0.3")), "reward.function", "reward.timeout_s = 0.3"),
    # the run's folder
    (begun(resume=False), "run.out", "--resume"),
    (lambda attempt: setattr(attempt, "resume", True), "run.out", "start without --resume"),
    (begun("learner.lr=0.5", resume=True), "learner.lr = 0.5", "1e-06"),
    (begun("debug.forced_lengths={median=2, p95=4, longest=8}", resume=True),
     "debug.forced_lengths.longest = 8", "start a new run.out"),
    (begun(resume=True, damage="lr ="), "out/config.toml", "start a new run.out"),
    (lambda attempt: (attempt.folder / "out").touch(), "run.out", "e.g. 'runs/first'"),
    (settings("run.out=/proc/tlt/run"), "run.out = '/proc/tlt/run'", "choose another folder"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny", hidden_size=64, num_layers=2)


@pytest.fixture
def attempt(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # rewards add their folder
    tree: dict[str, dict[str, Any]] = {
        **REQUIRED,
        "run": {"out": str(tmp_path / "out"), "num_steps": 2},
        "policy": {"model": str(model), "dtype": "float32"},
        "task": {"name": "gcd", "sizes": {"median": 2, "p95": 2, "longest": 3}},
        "reward": {"function": "exact"},
    }
    made = Attempt(tmp_path, tree)
    made.path.write_text(tomli_w.dumps(tree))
    return made


def test_the_run_that_is_spoilt_below_is_good(attempt: Attempt) -> None:
    attempt.check()


def test_emulated_engines_may_be_more_than_cores(attempt: Attempt) -> None:
    attempt.overrides += ["pool.num_engines=8", "emulate.hardware=h100"]
    attempt.check()


def test_a_folder_that_was_moved_can_be_resumed(attempt: Attempt) -> None:
    begun(resume=True)(attempt)
    out = Path(attempt.tree["run"]["out"])
    out.rename(out.with_name("moved"))
    attempt.overrides.append(f"run.out={out.with_name('moved')}")
    attempt.check()


def test_the_room_for_states_is_that_of_the_nodes(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's does not count where the GPUs are elsewhere."""
    many = (*GPU, "learner.num_gpus=1", "tlt.enabled=true", "capture.capacity_gib=1e6")
    config = resolve_defaults(load_config(TrainConfig, attempt.path, many))
    preflight._check_capture(config, {})
    here = Machine(num_gpus=8, gpu_bytes=None, host_bytes=None)
    monkeypatch.setattr(preflight, "this_machine", lambda: here)
    with pytest.raises(ConfigError, match=r"capture\.capacity_gib = 1e\+06 is more than"):
        preflight._check_capture(config, {})


def test_other_settings_for_debugging_may_change_on_resume(attempt: Attempt) -> None:
    begun("debug.core_group=other", "debug.publish_drafters=false", "debug.gate=x", resume=True)(
        attempt
    )
    attempt.check()


@pytest.mark.parametrize(("spoil", "key", "way_out"), WRONG)
def test_wrong_runs_are_refused(attempt: Attempt, spoil: Spoil, key: str, way_out: str) -> None:
    spoil(attempt)
    with pytest.raises(ConfigError) as refused:
        attempt.check()
    message = str(refused.value)
    assert key in message
    assert way_out in message
    assert not (attempt.folder / "out" / "metrics.jsonl").exists()


WAITS = "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)\n"
ENDLESS: list[tuple[Spoil, str, str]] = [
    (module("bad_endless", "while True:\n    pass\n"), "reward.function", "inside the function"),
    (module("bad_waits", WAITS), "reward.function", "inside the function"),
    (settings("task={name='chain_sum'}", "task.parameters.min_terms=1000000000",
              "task.parameters.max_terms=1000000000"), "task.parameters", "smaller values work"),
    (template(b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
     "policy.model", "chat_template"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "key", "way_out"), ENDLESS)
def test_what_never_ends_is_refused_in_time(
    attempt: Attempt, spoil: Spoil, key: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("tasks.gym.PROBLEM_S", "user_code.IMPORT_S", "tasks.chat.PROMPT_S"):
        monkeypatch.setattr(f"tlt.{limit}", 1.0)
    test_wrong_runs_are_refused(attempt, spoil, key, way_out)


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"metrics\.prometheus_port: .*:{port} .*; 0 takes a free port"
        with pytest.raises(ConfigError, match=message):
            open_sinks(MetricsConfig(prometheus_port=port), tmp_path, 0)


def test_the_command_accepts_a_good_run_and_starts_nothing(attempt: Attempt) -> None:
    code = (
        "import atexit, sys\n"
        "heavy = {'vllm', 'ray'}\n"
        "atexit.register(lambda: print('HEAVY', sorted(heavy & set(sys.modules))))\n"
        "from tlt.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(attempt.path), "--check"],
        cwd=attempt.folder,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ok .*run\.toml: 2 steps$", done.stdout, re.MULTILINE)
    assert "HEAVY []" in done.stdout
    assert not (attempt.folder / "out").exists()
