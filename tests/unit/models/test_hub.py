"""Ids of the Hub where folders are expected: found in the cache, downloaded, or refused."""

from pathlib import Path
from typing import Any

import pytest

hub = pytest.importorskip("huggingface_hub")

from tlt.errors import ConfigError  # noqa: E402
from tlt.models.hub import hub_id, local_folder  # noqa: E402


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def download(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[dict[str, Any]]:
    """Let downloads end like this, and return the list of their arguments."""
    calls: list[dict[str, Any]] = []

    def stand_in(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(hub, "snapshot_download", stand_in)
    return calls


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", None)),
        ("RedHatAI/Qwen3-8B.eagle3@v1.0", ("RedHatAI/Qwen3-8B.eagle3", "v1.0")),
        ("smollm2", None),
        ("/models/policy", None),
        ("./Qwen/Qwen3-8B", None),
        ("../models/policy", None),
        ("a/b/c", None),
        ("models/polcy", None),  # `models` is here: a mistyped folder
        ("models/policy", None),
        ("", None),
    ],
)
def test_what_counts_as_an_id(name: str, expected: Any) -> None:
    Path("models/policy").mkdir(parents=True)
    assert hub_id(name) == expected


def test_a_folder_goes_before_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("Qwen/Qwen3-8B").mkdir(parents=True)
    calls = download(monkeypatch, "elsewhere")
    assert local_folder("Qwen/Qwen3-8B", "--model") == Path("Qwen/Qwen3-8B")
    assert local_folder(Path("anywhere"), "--model") == Path("anywhere")
    assert not calls


def test_an_id_is_downloaded_without_code_or_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = download(monkeypatch, "/cache/snapshot")
    assert local_folder("Qwen/Qwen3-8B@abc", "policy.model") == Path("/cache/snapshot")
    (call,) = calls
    assert (call["repo_id"], call["revision"]) == ("Qwen/Qwen3-8B", "abc")
    assert not {"*.py", "*.bin", "*.pt", "*.gguf"} & {*call["allow_patterns"]}


def of_hub(name: str) -> Exception:
    import httpx2 as httpx

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    error: Exception = getattr(hub.errors, name)("no", response=response)
    return error


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("RepositoryNotFoundError", "spelling"),
        ("GatedRepoError", "licence"),
        ("RevisionNotFoundError", "Qwen/Qwen9@main"),
        ("HfHubHTTPError", "reached"),
    ],
)
def test_what_the_hub_refuses_is_said_with_a_way_out(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    download(monkeypatch, of_hub(name))
    with pytest.raises(ConfigError, match=f"policy.model = 'Qwen/Qwen9@abc' .*{why}"):
        local_folder("Qwen/Qwen9@abc", "policy.model")


def test_offline_the_cache_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library itself, which reads its cache."""
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    with monkeypatch.context() as patch:
        download(patch, ConnectionError("no route"))
        with pytest.raises(ConfigError, match=r"--model .*no route.*hf download Qwen/Qwen9"):
            local_folder("Qwen/Qwen9", "--model")
    commit = "0" * 40
    stored = tmp_path / "hub" / "models--owner--policy"
    (stored / "snapshots" / commit).mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    (stored / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert local_folder("owner/policy", "--model") == stored / "snapshots" / commit
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        local_folder("owner/another", "--model")


def test_a_run_gets_folders_and_keeps_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt.config.train import TrainConfig
    from tlt.train.inputs import with_local_models

    download(monkeypatch, "/cache/snapshot")
    config = TrainConfig.model_validate(
        {
            "run": {"out": "runs/first", "num_steps": 1},
            "policy": {"model": "Qwen/Qwen3-8B"},
            "task": {"name": "gcd"},
            "sampling": {"prompts_per_step": 1, "group_size": 2, "max_tokens": 8},
            "engine": {"drafter": "RedHatAI/Qwen3-8B-speculator.eagle3"},
        }
    )
    local = with_local_models(config)
    assert (local.policy.model, local.engine.drafter) == ("/cache/snapshot", "/cache/snapshot")
    assert config.policy.model == "Qwen/Qwen3-8B"
