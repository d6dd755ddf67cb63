"""The check that an engine's policy is exactly the learner's.

A drafter swap, a failed load or a fault of vLLM could leave weights in the policy that are not the
learner's. After every weight sync and every drafter swap the worker compares fingerprints
(`tlt.node.fingerprint`) before the next engine step. The comparison takes as long as a few engine
steps.

A tensor that vLLM keeps under another name than the checkpoint is compared with its own state after
the last load. The same holds for all tensors of quantized policies, and under tensor parallelism,
where a rank holds only a part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from tlt.node.fingerprint import (
    Fingerprint,
    columns,
    fingerprint,
    fingerprints,
    fused,
    of_columns,
)
from tlt.node.weights import read_fingerprints, read_weights
from tlt.vllm import experts

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


class PolicyVerifier:
    """The source of an engine's policy, and the fingerprint that the policy must have."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, whole: bool) -> None:
        self._model = model
        self._dtype = dtype
        self._whole = whole
        """Whether this worker holds the whole policy in the checkpoint's form."""
        self._source = Path()
        self._seed = 0
        self._expected: dict[str, Fingerprint] = {}
        self._compared: set[str] = set()

    @property
    def num_compared(self) -> int:
        """Number of tensors that are compared with the learner's."""
        return len(self._compared)

    def expect(self, source: Path) -> list[str]:
        """Expect the policy that was just loaded from a folder or a file in shared memory.

        Return the names of tensors that differ from the source. A tensor that an earlier call
        compared with the learner's counts as differing if this call cannot.
        """
        self._source = source
        return self._expect(*self._given()) if self._whole else self._expect(0, {})

    def expect_sent(self, seed: int, given: Mapping[str, Fingerprint]) -> list[str]:
        """Expect a policy that came without a file; return the tensors that differ, as `expect`."""
        self._source = Path()
        return self._expect(seed, given) if self._whole else self._expect(0, {})

    def expect_present(self) -> None:
        """Expect the present policy, which another program may have loaded."""
        self._source = Path()
        self._compared = set()
        self._expect(0, {})

    def _expect(self, seed: int, given: Mapping[str, Fingerprint]) -> list[str]:
        self._seed = seed
        now = policy_fingerprint(self._model, self._dtype, self._seed)
        before, self._compared = self._compared, set()
        self._expected = dict(now)
        for name in now:
            parts = _checkpoint_names(self._model, name, given)
            if parts:
                self._expected[name] = fused([given[part] for part in parts])
                self._compared.add(name)
        return sorted({*self._compare(now), *(before - self._compared)})

    def differing(self) -> list[str]:
        """Return the names of tensors that differ from the expected policy."""
        return self._compare(policy_fingerprint(self._model, self._dtype, self._seed))

    def _compare(self, now: Mapping[str, Fingerprint]) -> list[str]:
        return sorted(n for n, print_ in self._expected.items() if not print_.same(now.get(n)))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the policy's source; fail if the policy came without a file."""
        if self._source == Path():
            raise FileNotFoundError("the policy came without a file; it cannot be loaded again")
        if not self._source.is_dir():
            yield from read_weights(str(self._source))
            return
        for file in _files(self._source):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)

    def _given(self) -> tuple[int, dict[str, Fingerprint]]:
        """Return the seed, and the fingerprints of the source in the engine's dtype."""
        if self._source.is_dir():
            return 0, fingerprints(self.tensors(), self._dtype, 0)
        if not self._source.exists():  # the name of a model on a hub
            return 0, {}
        seed, found = read_fingerprints(str(self._source))
        own = str(self._dtype).removeprefix("torch.")
        if all(dtype == own for dtype, _ in found.values()):
            return seed, {name: print_ for name, (_, print_) in found.items()}
        return seed, fingerprints(self.tensors(), self._dtype, seed)


@torch.inference_mode()
def policy_fingerprint(
    model: torch.nn.Module, dtype: torch.dtype, seed: int
) -> dict[str, Fingerprint]:
    """Return the fingerprint of every tensor of a model, by vLLM's names.

    CPU kernels multiply with a packed copy of a matrix, so its columns are computed. GPU kernels
    multiply with the matrix itself, but tensor cores may round float32 to TF32 on the way: such a
    matrix is read where it is stored.
    """
    found = {}
    for prefix, module in model.named_modules():
        multiplies = isinstance(module, LinearBase | ParallelLMHead)
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            is_rounded = dtype is torch.float32 and parameter.device.type != "cpu"
            if multiplies and name == "weight" and not is_rounded:
                found[full] = of_columns(_columns_of(module, parameter.device, dtype, seed))
            elif name in experts.PARTS and experts.is_readable(module):
                found[full] = of_columns(experts.columns_of(module, parameter.data, seed))
            elif parameter.numel():
                # vLLM keeps some tensors in a wider dtype than the policy's.
                found[full] = fingerprint(parameter.data, seed, dtype)
    return found


def _columns_of(module: Any, device: torch.device, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Compute the selected columns of a matrix, with the code of every engine step."""
    if isinstance(module, ParallelLMHead):
        width = module.embedding_dim
    else:
        width = getattr(module, "input_size_per_partition", module.input_size)
    chosen = columns(seed, width)
    probe = torch.zeros(len(chosen), width, dtype=dtype, device=device)
    probe[torch.arange(len(chosen)), chosen] = 1
    columns_nR: torch.Tensor = module.quant_method.apply(module, probe)
    return columns_nR.T


def _checkpoint_names(model: Any, name: str, given: Mapping[str, Fingerprint]) -> list[str]:
    """Return the checkpoint's names for an engine's tensor; an empty list if there are none."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if name == HEAD and EMBEDDING in given and (tied or HEAD not in given):
        return [EMBEDDING]
    if name in given:
        return [name]
    *path, module, parameter = name.split(".")
    if parameter in experts.PARTS:
        return _expert_names(model.get_submodule(f"{'.'.join(path)}.{module}"), name, given)
    together = getattr(model, "packed_modules_mapping", {}).get(module, [])
    parts = [".".join([*path, part, parameter]) for part in together]
    return parts if parts and all(part in given for part in parts) else []


def _expert_names(layer: Any, name: str, given: Mapping[str, Fingerprint]) -> list[str]:
    """Return the checkpoint's names of the matrices in a stack of experts, in their order."""
    if not experts.is_readable(layer):
        return []
    *path, _, stack = name.split(".")  # vLLM wraps the experts in a module
    prefix = ".".join(path)
    if f"{prefix}.{experts.TOGETHER[stack]}" in given:
        return [f"{prefix}.{experts.TOGETHER[stack]}"]
    names = [
        f"{prefix}.{expert}.{part}.weight"
        for expert in range(layer.global_num_experts)
        for part in experts.PARTS[stack]
    ]
    return names if all(each in given for each in names) else []


def _files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: the files in its index, if it has an index."""
    if (folder / INDEX).exists():
        shards = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return sorted({folder / shard for shard in shards})
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
