"""Settings of hypothesis, and one thread for torch: small models compute fastest on one."""

import pytest
from hypothesis import settings

# The time of an example depends on the machine more than on the code.
settings.register_profile("tlt", deadline=None)
settings.load_profile("tlt")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
