"""Imports that all engines of a test process share. They start no thread.

Two kinds of modules are left out. Some read settings at import: `tlt.vllm.worker` loads
numba, which must come after vLLM's start-up. Others must not be shared by a fork: Ray.
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
import vllm
from vllm.v1.engine import llm_engine
from vllm.v1.worker import cpu_worker

__all__ = ["cpu_worker", "llm_engine", "torch", "transformers", "vllm"]
