"""Peak memory of a learner rank, computed without a device, and checked by a run on the CPU.

    python benchmarks/learner_memory.py                      # all cases below: a few minutes
    python benchmarks/learner_memory.py --only 7b --whole    # every layer of cases with this name

`tracked` builds the learner's own sharded policy with fake tensors over a `fake` process group and
lets torch's FSDP2 memory tracker count the bytes of an update's later rows, when parameters,
gradients, moments and activations are all there. Large cases compute attention as on GPUs, with
`varlen_attn`. The tracker's own work grows with the square of the layers, so large cases are
tracked with `FEW_LAYERS`: every further layer adds the same bytes.

`measured` trains the small model for real, two ranks on the CPU, and reads the peak of the process
from the kernel: the two must agree. `tlt.train.memory` is the formula that `tlt train --check`
uses instead, because the tracker takes minutes.

Writes benchmarks/results/learner_memory.json.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tlt.train.memory import learner_memory
from tlt.train.shape import ModelShape

sys.path.insert(0, str(Path(__file__).parent))  # tests load this file by its path

from common import load, parse_options, save
from models import MODELS

PROMPT_TOKENS = 64
FEW_LAYERS = (4, 6)
"""Numbers of layers from which large cases are extrapolated."""
SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16384,
}  # fmt: skip
TINY = SMALL | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 512,
}  # fmt: skip
QWEN2_5_7B, QWEN2_5_32B = (model.hf_config() for model in MODELS[:2])


@dataclass(frozen=True, slots=True)
class Case:
    """One rank's update: model, row, ranks, and how it computes."""

    name: str
    model: dict[str, int]
    row_tokens: int
    num_ranks: int
    dtype: str = "bfloat16"
    gradient_checkpointing: bool = True
    attention_kernel: bool = True
    lora_rank: int = 0


CASES = (
    Case("7b_18k", QWEN2_5_7B, 18432, 8),
    Case("7b_33k", QWEN2_5_7B, 33792, 8),
    Case("32b_18k", QWEN2_5_32B, 18432, 16),
    Case("32b_33k", QWEN2_5_32B, 33792, 16),
)
CPU_CASES = tuple(
    Case(f"cpu_{name}", SMALL, 3072, 2, "float32", checkpointing, False, lora_rank)
    for name, checkpointing, lora_rank in (
        ("checkpointed", True, 0),
        ("plain", False, 0),
    )
)


def hf_config(case: Case) -> Any:
    from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

    kind: Any = Qwen3Config if "head_dim" in case.model else Qwen2Config
    if "num_experts" in case.model:
        kind = Qwen3MoeConfig
    return kind(**case.model, max_position_embeddings=65536, tie_word_embeddings=False)


def settings(case: Case, folder: str = "") -> Any:
    from tlt.config.train import AlgorithmConfig, LearnerConfig, LoraConfig
    from tlt.learner.batch import Weighting
    from tlt.learner.rank import RankSettings

    return RankSettings(
        model=folder,
        dtype=case.dtype,
        temperature=1.0,
        weighting=Weighting("tokens", case.row_tokens),
        algorithm=AlgorithmConfig(),
        learner=LearnerConfig(
            gradient_checkpointing=case.gradient_checkpointing,
            lora=LoraConfig(rank=case.lora_rank),
        ),
    )


def sample(tokens: int) -> Any:
    from tlt.learner.batch import TrainSample

    learned = tokens - PROMPT_TOKENS
    return TrainSample("a", 0, (5,) * PROMPT_TOKENS, (7,) * learned, (-1.0,) * learned, 0.5)


# --- without a device -----------------------------------------------------------------------------


def tracked(case: Case) -> dict[str, int]:
    """Return the bytes of the rank's peak by kind, counted by torch's memory tracker."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM

    from tlt.learner.policy import PackedRow
    from tlt.learner.rank import sharded

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.num_ranks)
    try:
        mesh = init_device_mesh("cpu", (case.num_ranks,))
        with FakeTensorMode():
            dtype = getattr(torch, case.dtype) if case.lora_rank else torch.float32
            model = AutoModelForCausalLM.from_config(hf_config(case), dtype=dtype)
            with patch("torch.nn.Module.to", lambda of, *_, **__: of):  # fake tensors refuse it
                policy = sharded(model, settings(case), mesh, (), case.attention_kernel)
            trained = [p for p in policy.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, fused=True)
            for parameter in trained:
                # Earlier rows and updates leave these. A fake optimizer step would compute on
                # whole tensors; a real one computes on the shard.
                parameter.grad = torch.zeros_like(parameter)
                optimizer.state[parameter] = {
                    name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
                }
            row = PackedRow.pack([sample(case.row_tokens)], [1.0], torch.device("cpu"))
            with FSDPMemTracker(policy, optimizer) as tracker:
                (policy(row).logprob_P * row.advantage_P).sum().backward()
                (peak,) = tracker.get_tracker_snapshot("peak").values()
            return {getattr(kind, "value", kind): size for kind, size in peak.items()}
    finally:
        dist.destroy_process_group()


def extrapolated(case: Case) -> dict[str, int]:
    """Return what `tracked` would, from two counts with fewer layers."""
    few, more = (
        tracked(replace(case, model=case.model | {"num_hidden_layers": layers}))
        for layers in FEW_LAYERS
    )
    beyond = (case.model["num_hidden_layers"] - FEW_LAYERS[0]) // (FEW_LAYERS[1] - FEW_LAYERS[0])
    return {kind: size + beyond * (more[kind] - size) for kind, size in few.items()}


# --- for real -------------------------------------------------------------------------------------


def measured(case: Case) -> list[int]:
    """Return the bytes by which every rank's process grows at its peak, in a run on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    # Freed memory goes back to the system at once, so that the process is as large as its tensors.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
    with tempfile.TemporaryDirectory() as folder:
        for name, config in (("tiny", replace(case, model=TINY)), ("small", case)):
            policy = AutoModelForCausalLM.from_config(hf_config(config), dtype=torch.float32)
            policy.save_pretrained(f"{folder}/{name}")
        del policy
        gc.collect()
        context = multiprocessing.get_context("spawn")
        with context.Pool(case.num_ranks, maxtasksperchild=1) as pool:
            arguments = [(case, Path(folder), meeting, rank) for rank in range(case.num_ranks)]
            return pool.starmap(_rank, arguments, chunksize=1)


def _rank(case: Case, folder: Path, meeting: str, rank: int) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=case.num_ranks)
    _peak(case, folder / "tiny", 2 * PROMPT_TOKENS)  # code and libraries load at first use
    gc.collect()
    before = _status("VmRSS")
    peak = _peak(case, folder / "small", case.row_tokens) - before
    dist.destroy_process_group()
    return peak


def _peak(case: Case, policy: Path, row_tokens: int) -> int:
    """Return the size of this process at the peak of an update's second row."""
    import torch

    from tlt.learner.rank import LearnerRank

    learner = LearnerRank(settings(case, str(policy)), torch.device("cpu"))
    short = sample(2 * PROMPT_TOKENS)
    learner.accumulate([[short]])
    learner.step(1.0, 1e9)  # the optimizer makes its moments
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    learner.accumulate([[short], [sample(row_tokens)]])  # the first leaves gradients
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


# --- all cases ------------------------------------------------------------------------------------


def formula(case: Case) -> int:
    memory = learner_memory(
        ModelShape.of(hf_config(case).to_dict()),
        row_tokens=case.row_tokens,
        num_ranks=case.num_ranks,
        dtype=case.dtype,
        gradient_checkpointing=case.gradient_checkpointing,
        attention_kernel=case.attention_kernel,
        lora=settings(case).learner.lora,
    )
    return memory.peak


def main() -> None:
    options = parse_options(__doc__, only="", whole=False)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cases = load("learner_memory").get("cases", {})
    for case in (*CASES, *CPU_CASES):
        if options.only not in case.name:
            continue
        began_s = time.monotonic()
        whole = options.whole or case in CPU_CASES
        by_kind = tracked(case) if whole else extrapolated(case)
        result = {
            "settings": asdict(case),
            "tracked_bytes": by_kind["Total"],
            "tracked_by_kind": by_kind,
            "tracked_layers": case.model["num_hidden_layers"] if whole else max(FEW_LAYERS),
            "tracked_s": round(time.monotonic() - began_s, 1),
            "formula_bytes": formula(case),
        }
        if case in CPU_CASES:
            result["measured_bytes"] = max(measured(case))
        cases[case.name] = result
        print(case.name, {k: v for k, v in result.items() if k != "settings"}, flush=True)
        save("learner_memory", {"cases": cases})


if __name__ == "__main__":
    main()
