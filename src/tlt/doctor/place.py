"""Where a check runs: the folder of its models, and the device of its engines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """The models and the device of a check."""

    folder: str
    """Folder with the policy, its drafter, and whatever a check writes."""
    num_gpus: int
    """GPUs of this machine; 0 runs all checks on CPU engines."""

    @property
    def policy(self) -> Path:
        """Folder of the policy."""
        return Path(self.folder) / "policy"

    @property
    def drafter(self) -> Path:
        """Folder of the trained drafter."""
        return Path(self.folder) / "drafter"

    @property
    def engine_gpus(self) -> int:
        """GPUs of an engine that is not tensor-parallel."""
        return min(1, self.num_gpus)

    def room(self) -> dict[str, Any]:
        """Return the arguments of vLLM that let two small engines share a GPU."""
        if not self.num_gpus:
            return {}
        return {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**28}

    def write(self, path: Path) -> None:
        """Write this place to a file, for the process of a check."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Place:
        """Read a place from a file."""
        return cls(**json.loads(path.read_text()))
