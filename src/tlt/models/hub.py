"""Models and drafters by their id on the Hugging Face Hub, wherever a folder is expected.

`local_folder` turns a name into a folder: a folder stays, and an id such as `Qwen/Qwen3-8B` or
`Qwen/Qwen3-8B@REVISION` is downloaded into the Hub's cache, or found there. Everything else in TLT
sees folders only. `HF_HUB_OFFLINE=1` forbids the network, as in all libraries of Hugging Face.
"""

from __future__ import annotations

import re
from pathlib import Path

from tlt.errors import ConfigError

HUB_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w.-]{1,95}))?",
    re.ASCII,
)
FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files of a model that are downloaded: weights in other formats and code are not."""


def hub_id(name: str | Path) -> tuple[str, str | None] | None:
    """Return id and revision if a name can only be meant as an id of the Hub.

    A folder of that name goes first. A name in an existing folder, such as `models/polcy`, is a
    mistyped folder, not an id.
    """
    text = str(name)
    match = HUB_ID.fullmatch(text)
    if match is None or Path(text).exists() or Path(text).parent.exists():
        return None
    return match["id"], match["revision"]


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model or drafter that is named by its folder or its id on the Hub."""
    return local_folder(name, "model")


def local_folder(name: str | Path, key: str, files: tuple[str, ...] = FILES) -> Path:
    """Return the folder that `key` names; these files are downloaded if it is an id of the Hub."""
    if (found := hub_id(name)) is None:
        return Path(name)
    repo_id, revision = found
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{key} = {str(name)!r} is not a folder, and an id of the Hub needs huggingface_hub; "
            "run: pip install 'tlt-rl[train]', or name a folder"
        ) from error
    what = f"{key} = {str(name)!r} is not a folder here"
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(files)))
    except errors.GatedRepoError:
        why = "the Hub asks for consent to its licence; give it on the model's page, run `hf auth "
        why += "login`, and try again"
    except errors.RepositoryNotFoundError:
        why = "the Hub shows no model of this name; check the spelling of folder or id, or run "
        why += "`hf auth login` for a private one"
    except errors.RevisionNotFoundError:
        why = f"the Hub has no revision {revision!r} of it; e.g. {repo_id}@main"
    except errors.HFValidationError as error:
        why = f"it cannot be an id of the Hub ({error}); name a folder, or an id such as "
        why += "Qwen/Qwen3-8B"
    except Exception as error:  # any error of the network
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        why = f"the Hub cannot be reached ({said}); name a folder, or run `hf download {repo_id}` "
        why += "where there is a network"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set, and it is not in the Hub's cache; "
            why += f"unset HF_HUB_OFFLINE, or run `hf download {repo_id}` where there is a network"
    raise ConfigError(f"{what}, and {why}")
