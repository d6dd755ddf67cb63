"""Watches that an engine's policy is the one that it was given, and nothing else.

A drafter swap, a failed load or a fault of vLLM could leave other weights in the policy than the
learner's. After every weight update and every drafter swap the worker compares fingerprints
(`tlt.rollout.fingerprint`) before the next engine step. It takes as long as a few engine steps.

Tensors that vLLM keeps under another name than the checkpoint are compared with what they were when
the policy was last loaded. So are all tensors of quantized policies, and under tensor parallelism,
where a rank holds a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from tlt.rollout.fingerprint import (
    added,
    columns,
    fingerprints,
    tensor_fingerprint,
    values_fingerprint,
)
from tlt.rollout.weights import read_fingerprints, read_weights

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class PolicyWatch:
    """Knows where an engine's policy was loaded from, and the fingerprint that it must have."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, whole: bool) -> None:
        self._model = model
        self._dtype = dtype
        self._whole = whole
        """Whether this worker holds all of the policy."""
        self._source = Path()
        self._seed = 0
        self._expected: dict[str, int] = {}
        self.num_compared = 0
        """Tensors that are compared with those the learner handed out."""

    def expect(self, source: Path) -> list[str]:
        """Expect the policy of a model's folder or of a file in shared memory, just loaded.

        Returns the names of tensors that are not what they must be.
        """
        self._source = source
        self._seed, given = self._given() if self._whole else (0, {})
        now = policy_fingerprint(self._model, self._dtype, self._seed)
        self._expected = dict(now)
        self.num_compared = 0
        for name in now:
            parts = _checkpoint_names(self._model, name, given)
            if parts:
                self._expected[name] = added(given[part] for part in parts)
                self.num_compared += 1
        return self._compare(now)

    def differing(self) -> list[str]:
        """Return the names of tensors that are not what they must be."""
        return self._compare(policy_fingerprint(self._model, self._dtype, self._seed))

    def _compare(self, now: Mapping[str, int]) -> list[str]:
        return sorted(n for n, number in self._expected.items() if now.get(n) != number)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the policy again from where it came."""
        if not self._source.is_dir():
            yield from read_weights(str(self._source))
            return
        for file in sorted(self._source.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)

    def _given(self) -> tuple[int, dict[str, int]]:
        """The seed, and the fingerprints of the source in the engine's dtype."""
        if self._source.is_dir():
            return 0, fingerprints(self.tensors(), self._dtype, 0)
        if not self._source.exists():  # a model by its name in a hub
            return 0, {}
        seed, found = read_fingerprints(str(self._source))
        own = str(self._dtype).removeprefix("torch.")
        if all(dtype == own for dtype, _ in found.values()):
            return seed, {name: number for name, (_, number) in found.items()}
        return seed, fingerprints(self.tensors(), self._dtype, seed)


@torch.inference_mode()
def policy_fingerprint(model: torch.nn.Module, dtype: torch.dtype, seed: int) -> dict[str, int]:
    """Return the number of every tensor of a model, as vLLM names them."""
    found = {}
    for prefix, module in model.named_modules():
        multiplies = isinstance(module, LinearBase | ParallelLMHead)
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if multiplies and name == "weight":
                columns_nR = _columns_of(module, parameter.device, dtype, seed)
                found[full] = values_fingerprint(columns_nR)
            elif parameter.numel():
                found[full] = tensor_fingerprint(parameter.data, seed)
    return found


def _columns_of(module: Any, device: torch.device, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Some columns of a matrix, computed as in every engine step."""
    if isinstance(module, ParallelLMHead):
        width = module.embedding_dim
    else:
        width = getattr(module, "input_size_per_partition", module.input_size)
    chosen = columns(seed, width)
    probe = torch.zeros(len(chosen), width, dtype=dtype, device=device)
    probe[torch.arange(len(chosen)), chosen] = 1
    return module.quant_method.apply(module, probe)


def _checkpoint_names(model: Any, name: str, given: Mapping[str, int]) -> list[str]:
    """Return the checkpoint's names for a tensor of the engine's; none where they are not known."""
    if name in given:
        return [name]
    if name == HEAD and EMBEDDING in given:
        return [EMBEDDING]  # a tied head
    *path, module, parameter = name.split(".")
    fused = getattr(model, "packed_modules_mapping", {}).get(module, [])
    parts = [".".join([*path, part, parameter]) for part in fused]
    return parts if parts and all(part in given for part in parts) else []
