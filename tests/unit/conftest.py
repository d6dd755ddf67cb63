"""Small models compute faster on one thread than on many, and leave the other cores alone."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
