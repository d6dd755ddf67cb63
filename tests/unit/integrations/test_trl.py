"""TLT in TRL's trainer: samples are recorded, the drafter trains, reaches the engine, is saved.

The trainer and its engine are fakes with the names that TRL 1.16 and vLLM 0.32 have.
`tests/frameworks/test_trl.py` runs the real ones.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from drafter_fixtures import CONFIG, captured, drafter  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from tlt.config.train import CaptureConfig, TltConfig  # noqa: E402
from tlt.drafter.checkpoint import MOMENTS, load_drafter, save_drafter  # noqa: E402
from tlt.errors import ConfigError, WeightMismatch  # noqa: E402
from tlt.harvest.published import EMBEDDING, VERSION, is_new, version_of  # noqa: E402
from tlt.integrations.trl import TLTCallback, new_drafter  # noqa: E402
from tlt.node.weights import read_weights  # noqa: E402
from tlt.states.buffer import BufferSettings, SampleBuffer  # noqa: E402

SAME: dict[str, Any] = {"differed": [], "still": [], "seconds": 0.0}
REQUESTS_PER_STEP = 16


class Worker:
    """The calls of TLT's worker."""

    def __init__(self) -> None:
        self.policy: dict[str, Any] = {}
        self.drafter: dict[str, Any] = {}
        self.kept: list[tuple[str, str | None, int]] = []
        self.report = SAME

    def tlt_capture(self, settings: dict[str, Any]) -> None:
        self._buffer = SampleBuffer(BufferSettings(**settings))

    def tlt_keep_states(
        self, name: str, sample: str | None, rl_step: int, text: list[int]
    ) -> tuple[int, int]:
        self.kept.append((name, sample, rl_step))
        if sample is not None:
            self._buffer.put(sample, rl_step, captured(40, 4, seed=int(sample) % 4))
        return len(self.kept), 0

    def tlt_load_policy(self, tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        self.policy = {name: tensor.clone() for name, tensor in tensors}
        return self.report

    def tlt_check_weights(self, manifest: dict[str, Any], draft: bool) -> None:
        assert draft

    def tlt_update_weights(self, manifest: dict[str, Any], draft: bool) -> dict[str, Any]:
        self.drafter = {name: tensor.clone() for name, tensor in read_weights(manifest["path"])}
        return self.report


class Engine:
    """vLLM's `LLMEngine`: each request ends after one engine step."""

    def __init__(self, policy: Path, drafter_folder: Path) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config={"tlt": {"strategy": {"kind": "off"}}},
            speculative_config=SimpleNamespace(method="eagle3", model=str(drafter_folder)),
            model_config=SimpleNamespace(model=str(policy)),
        )
        totals = SimpleNamespace(drafts=0, accepted_tokens=0)
        self.controller = SimpleNamespace(drafter_version=0, totals=totals)
        scheduler = SimpleNamespace(controller=self.controller)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self._waiting: list[str] = []

    def add_request(self, request_id: str, prompt: list[int]) -> str:
        self._waiting.append(request_id)
        return f"{request_id}-internal"

    def step(self) -> list[Any]:
        names, self._waiting = self._waiting, []
        self.controller.totals.drafts += 2 * len(names)
        self.controller.totals.accepted_tokens += len(names)
        return [
            SimpleNamespace(
                request_id=name,
                finished=True,
                prompt_token_ids=[1, 2],
                outputs=[
                    SimpleNamespace(
                        token_ids=[3, 4], finish_reason="abort" if int(name) == 5 else "length"
                    )
                ],
            )
            for name in names
        ]


class LLM:
    def __init__(self, engine: Engine) -> None:
        self.llm_engine = engine
        self.worker = Worker()
        self.num_resets = 0

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return True


class Generation:
    """TRL's `VLLMGeneration`."""

    mode = "colocate"
    tensor_parallel_size = 1
    enable_sleep_mode = False

    def __init__(self, llm: LLM, embedding: Any) -> None:
        self.llm = llm
        self.embedding = embedding
        self._requests = iter(range(10**6))

    def generate(self) -> int:
        for _ in range(REQUESTS_PER_STEP):
            self.llm.llm_engine.add_request(str(next(self._requests)), [1, 2])
        return len(self.llm.llm_engine.step())

    def sync_weights(self) -> None:
        raise AssertionError("TRL's own weight sync goes round TLT")

    def _iter_named_params(self) -> Iterator[tuple[str, Any]]:
        yield EMBEDDING, self.embedding


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """A trainer with a tiny policy, whose engine has a drafter."""
    save_drafter(drafter(), tmp_path / "start", torch.float32)
    (tmp_path / "policy").mkdir()
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    save_file({EMBEDDING: embedding}, tmp_path / "policy" / "model.safetensors")
    llm = LLM(Engine(tmp_path / "policy", tmp_path / "start"))
    return SimpleNamespace(
        vllm_generation=Generation(llm, embedding),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        temperature=1.0,
        args=SimpleNamespace(seed=0, output_dir=str(tmp_path / "out")),
        state=SimpleNamespace(global_step=0, is_world_process_zero=True),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )


def callback(trainer: Any, tmp_path: Path, train_share: float = 1e6) -> TLTCallback:
    tlt = TltConfig(lr=3e-3, row_tokens=120, num_draft_tokens=3, session_s=0.2)
    capture = CaptureConfig(folder=str(tmp_path), capacity_gib=0.01)
    return TLTCallback(trainer, train_share, tlt, capture)


def rl_step(trainer: Any) -> None:
    """Sync and generate, as TRL does in every RL step."""
    trainer.vllm_generation.sync_weights()
    assert trainer.vllm_generation.generate() == REQUESTS_PER_STEP
    trainer.state.global_step += 1


def limited(tlt: TLTCallback, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every session of the drafter's trainer take 0.2 s, however long generation took."""
    train = tlt.drafter_trainer.train
    monkeypatch.setattr(tlt.drafter_trainer, "train", lambda lease, seconds: train(lease, 0.2))


def test_a_drafter_learns_from_recorded_samples_reaches_the_engine_and_is_saved(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tlt = callback(trainer, tmp_path)
    limited(tlt, monkeypatch)
    worker, controller = trainer.vllm_generation.llm.worker, trainer.vllm_generation.llm.llm_engine
    for _ in range(100):
        rl_step(trainer)
        if worker.drafter:
            break
    assert worker.drafter, "no drafter was published"
    assert controller.controller.drafter_version == 1
    assert worker.kept[0] == ("0-internal", "0", 0)
    assert worker.kept[5] == ("5-internal", None, 0), "the states of an aborted sample are dropped"
    assert worker.kept[-1][2] == trainer.state.global_step - 1
    assert torch.equal(worker.policy[EMBEDDING], trainer.vllm_generation.embedding)
    assert trainer.vllm_generation.llm.num_resets == trainer.state.global_step

    tlt.on_save(trainer.args, trainer.state, None)
    tlt.on_train_end(trainer.args, trainer.state, None)
    for folder in (f"checkpoint-{trainer.state.global_step}", "."):
        saved = tmp_path / "out" / folder / "drafter"
        version = json.loads((saved / VERSION).read_text())["version"]
        assert version >= 1
        assert (saved / MOMENTS).exists()
        weights = load_drafter(saved).state_dict()
        first = load_drafter(tmp_path / "start").state_dict()
        assert not torch.equal(weights["fc.weight"], first["fc.weight"])
        if version == 1:
            assert torch.equal(weights["fc.weight"], worker.drafter["fc.weight"])

    metrics = trainer._metrics["train"]
    assert metrics["tlt/recorded_samples"][0] == REQUESTS_PER_STEP
    assert metrics["tlt/acceptance_length"][0] == 1.5
    assert len(metrics["tlt/generation_s"]) == trainer.state.global_step


def test_a_new_drafter_that_never_became_better_stays_new(trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "start" / VERSION).write_text('{"version": 0, "new": true}')
    callback(trainer, tmp_path).on_train_end(trainer.args, trainer.state, None)
    assert is_new(tmp_path / "out" / "drafter")
    assert version_of(tmp_path / "out" / "drafter") == 0


def test_the_trainer_draws_the_same_random_numbers_as_without_it(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    limited(callback(trainer, tmp_path), monkeypatch)
    rl_step(trainer)
    rl_step(trainer)
    assert torch.equal(torch.rand(4), expected)


def test_training_takes_a_share_of_the_time_and_nothing_while_evaluating(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tlt = callback(trainer, tmp_path, train_share=0.5)
    given: list[float] = []
    monkeypatch.setattr(tlt.drafter_trainer, "train", lambda lease, seconds: given.append(seconds))
    trainer.model.training = False
    rl_step(trainer)
    assert not given
    trainer.model.training = True
    rl_step(trainer)
    (spent,) = trainer._metrics["train"]["tlt/generation_s"]
    assert given == [0.5 * spent]


def test_a_fault_of_the_training_ends_the_training_only(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tlt = callback(trainer, tmp_path)
    calls: list[int] = []
    faults = [FloatingPointError("its own, from which it recovers"), RuntimeError("another")]

    def fail(lease: int, seconds: float) -> None:
        calls.append(lease)
        raise faults[lease - 1]

    monkeypatch.setattr(tlt.drafter_trainer, "train", fail)
    for _ in range(4):
        rl_step(trainer)
    assert calls == [1, 2]


def test_a_policy_that_is_not_the_trainers_ends_the_run(trainer: Any, tmp_path: Path) -> None:
    callback(trainer, tmp_path)
    trainer.vllm_generation.llm.worker.report = {"differed": ["a"], "still": ["a"], "seconds": 0.0}
    with pytest.raises(WeightMismatch, match="not the trainer's in a"):
        trainer.vllm_generation.sync_weights()


def test_trainers_without_an_engine_for_it_are_refused(trainer: Any, tmp_path: Path) -> None:
    generation = trainer.vllm_generation
    config = generation.llm.llm_engine.vllm_config
    for part, name, value, says in (
        (config, "speculative_config", None, "TLT_CONFIG"),
        (config, "additional_config", {}, "TLT_CONFIG"),
        (generation, "tensor_parallel_size", 2, "vllm_tensor_parallel_size = 2"),
        (generation, "mode", "server", 'vllm_mode="colocate"'),
        (trainer, "vllm_generation", None, "use_vllm=True"),
    ):
        setattr(part, name, value)
        with pytest.raises(ConfigError, match=says):
            callback(trainer, tmp_path)


def test_a_new_drafter_for_a_policy_on_the_hub(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from transformers import LlamaConfig

    policy = tmp_path / "policy"
    sizes = {"vocab_size": CONFIG.vocab_size, "hidden_size": CONFIG.hidden_size}
    LlamaConfig(**sizes, num_attention_heads=2, intermediate_size=16).save_pretrained(policy)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: {"me/policy": str(policy)}[name]
    )
    out = new_drafter("me/policy", str(tmp_path / "new"))
    assert is_new(Path(out))
    assert load_drafter(Path(out)).config.hidden_size == CONFIG.hidden_size
