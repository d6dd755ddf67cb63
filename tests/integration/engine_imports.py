"""What every engine imports, once for all engines of a test process. Starts no thread.

Not imported: what reads settings at import (`tlt.rollout.vllm.worker` loads numba, whose modules
must come after vLLM's start-up), and what a fork must not share (Ray).
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
import vllm
from vllm.v1.engine import llm_engine
from vllm.v1.worker import cpu_worker

__all__ = ["cpu_worker", "llm_engine", "torch", "transformers", "vllm"]
