"""The policy of a run's checkpoint as a Hugging Face folder."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from called import tlt
from small_run import REQUIRED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("ray")

import torch.distributed as dist  # noqa: E402

from tlt.config.train import AlgorithmConfig, LearnerConfig  # noqa: E402
from tlt.learner import export as weights_export  # noqa: E402
from tlt.learner.batch import Weighting  # noqa: E402
from tlt.learner.rank import LearnerRank, RankSettings  # noqa: E402
from tlt.models import tiny  # noqa: E402
from tlt.train.folder import RunFolder  # noqa: E402

STEPS = (3, 10)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a model, a run on it, and checkpoints whose norm is the RL step."""
    home = tmp_path_factory.mktemp("export")
    model = tiny.make(home / "model", hidden_size=64, num_layers=2)
    tied = transformers.AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=True)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    tied.save_pretrained(model)
    dist.init_process_group("gloo", init_method=f"file://{home}/meet", rank=0, world_size=1)
    algorithm, learner = AlgorithmConfig(), LearnerConfig()
    weighting = Weighting("tokens", 8)
    settings = RankSettings(str(model), "float32", 1.0, weighting, algorithm, learner)
    rank = LearnerRank(settings, torch.device("cpu"))
    run = RunFolder(home / "run")
    for step in STEPS:
        rank._policy.policy.model.norm.weight.data.fill_(float(step))
        hidden = run.begin_checkpoint(step)
        rank.save(hidden / "learner")
        rank.wait_saved()
        (hidden / "buffer-0").mkdir()
        (hidden / "buffer-0" / "sample").write_text("captured")
        run.publish_checkpoint(hidden, step, keep=2)
    tree: dict[str, Any] = {**REQUIRED, "policy": {"model": str(model), "dtype": "bfloat16"}}
    (home / "run" / "config.toml").write_text(tomli_w.dumps(tree))
    yield home
    dist.destroy_process_group()


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def norm(folder: str) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    return float(model.model.norm.weight[0].detach())


def files(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*")}


def test_a_checkpoint_becomes_a_folder_that_transformers_loads(
    home: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_export, "CHUNK_BYTES", 50_000)  # several reads
    before = files(home / "run")
    code, output, errors = tlt("models", "export", "run", "--out", "newest", "--json")
    assert code == 0, errors
    assert json.loads(output) == {"run": "run", "step": 10, "out": "newest"}
    assert tlt("models", "export", "run", "--step", "3", "--out", "third")[0] == 0
    assert (norm("newest"), norm("third")) == (10.0, 3.0)
    assert files(home / "run") == before
    load = transformers.AutoModelForCausalLM.from_pretrained
    start = load(made / "model", dtype=torch.bfloat16).state_dict()
    found = load("newest").state_dict()
    assert found.keys() == start.keys()
    assert [name for name in found if not torch.equal(found[name], start[name])] == [
        "model.norm.weight"
    ]
    transformers.AutoTokenizer.from_pretrained("newest")
    with safetensors.safe_open("newest/model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys(), "tied to the embeddings"  # noqa: SIM118


def spoil(checkpoint: Path) -> None:
    (file,) = (checkpoint / "learner").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_left_where_it_is(home: Path) -> None:
    """The run may be going on: only the run itself sets checkpoints aside."""
    newest = home / "run" / "checkpoints" / "step-000010"
    (newest / "buffer-0" / "sample").write_text("damaged, and not needed")
    assert "RL step 10" in tlt("models", "export", "run", "--out", "a")[1]
    spoil(newest)
    before = files(home / "run")
    assert "RL step 3" in tlt("models", "export", "run", "--out", "b")[1]
    code, _, errors = tlt("models", "export", "run", "--step", "10", "--out", "c")
    assert code == 2
    assert "its checksum differs" in errors
    assert "of RL steps 3, 10" in errors
    assert files(home / "run") == before
    assert not Path("c").exists()


def test_a_checkpoint_that_the_run_removes_meanwhile(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one is taken where there is one."""

    def read(folder: Path, dtype: str) -> dict[str, Any]:
        if (home / "run" / "checkpoints" / "step-000010").exists():
            shutil.rmtree(folder.parent)
            raise RuntimeError("No such file")
        return weights_export.checkpoint_weights(folder, dtype)

    monkeypatch.setattr("tlt.train.export.checkpoint_weights", read)
    assert "RL step 3" in tlt("models", "export", "run", "--out", "a")[1]
    monkeypatch.setattr("tlt.train.export._checkpoint", lambda *_: home / "gone")
    code, _, errors = tlt("models", "export", "run", "--out", "b")
    assert code == 2
    assert "gone was removed while it was read: the run keeps 2; try again" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--out", "a"], "nowhere is not a run"),
        (["run", "--out", "run"], "--out run exists"),
        (["run", "--out", "a", "--step", "4"], "has checkpoints of RL steps 3, 10"),
    ],
)
def test_mistakes(home: Path, arguments: list[str], words: str) -> None:
    code, _, errors = tlt("models", "export", *arguments)
    assert code == 2
    assert words in errors
