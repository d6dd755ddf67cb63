"""A drafter that knows nothing: the shapes of another one, random weights.

python benchmarks/random_drafter.py models/smollm2-eagle3 models/random-eagle3
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main(source: Path, out: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shutil.copytree(source, out, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * 0.02
            tensors[name] = (noise + (tensor.dim() == 1)).to(tensor.dtype)  # norms stay near 1
    save_file(tensors, out / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
