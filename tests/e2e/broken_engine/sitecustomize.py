"""Breaks the verification of drafts in every process that has this folder in its PYTHONPATH."""

from broken_verification import break_verification
from tlt.integrations.verl_plugin import after_import

NUM_GOOD = 50
"""Draws with drafts before the break: more than the self-test makes."""

after_import("tlt.vllm.v1.sampler", lambda module: break_verification(module, NUM_GOOD))
