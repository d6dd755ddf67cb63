"""Small models compute faster on one thread than on many, and leave the other cores alone."""

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("tlt", deadline=None)
settings.load_profile("tlt")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
