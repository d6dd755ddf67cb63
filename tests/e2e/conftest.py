"""A tiny policy, made once by the commands of its recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import tlt


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds `models/tiny-sft`; runs go there too."""
    folder = tmp_path_factory.mktemp("train")
    tlt("models tiny --out models/tiny", folder)
    tlt(
        "models sft --model models/tiny --out models/tiny-sft --task gcd --sizes 2,2,2 "
        "--parameter max_value=9 --steps 120 --row-tokens 2048 --lr 2e-3 --dtype float32",
        folder,
    )
    return folder
