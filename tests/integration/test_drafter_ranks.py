"""Several ranks train one drafter: real processes on CPU cores."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learning import TINY_SETTINGS
from workloads import random_prompts

from speed import limit
from tlt.config.rollout import EngineConfig
from tlt.errors import EngineError
from tlt.offline.training import DrafterPlan

PROGRAM = Path(__file__).with_name("rank_program.py")


def test_the_number_of_ranks_changes_no_bit(tmp_path: Path) -> None:
    """One rank learns four rows per optimizer step, or two ranks learn two each."""
    import torch

    ranks = [
        subprocess.Popen([sys.executable, PROGRAM, str(rank), str(size), str(tmp_path)])
        for size in (1, 2)
        for rank in range(size)
    ]
    assert [process.wait(limit(120)) for process in ranks] == [0, 0, 0]
    losses, alone = torch.load(tmp_path / "1-0.pt")
    assert len(losses) == 5
    for rank in (0, 1):
        theirs, tensors = torch.load(tmp_path / f"2-{rank}.pt")
        assert theirs == losses
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in alone.items())


async def trained(tiny: Path, out: Path, num_ranks: int, **changes: object) -> Any:
    """Train on made-up responses in processes of Ray; every rank has one core."""
    import time

    from tlt.node.shared import SharedFolder
    from tlt.offline.actor import train_on_ranks
    from tlt.offline.drafter import first_trainer, save_initial
    from tlt.states.buffer import BufferSettings

    prompts = tuple(map(tuple, random_prompts(24)))
    plan = DrafterPlan(
        engine=EngineConfig(model=str(tiny)),
        num_engines=1,
        num_ranks=num_ranks,
        prompts=prompts,
        held_out_prompts=prompts[:1],
        out=out,
        max_tokens=40,
        temperature=1.0,
        budget_s=600.0,
        num_steps=6,
        draft_vocab_size=None,
        trainer=replace(TINY_SETTINGS, row_tokens=128, num_rows=2),
        dtype="float32",
        init=None,
    )
    save_initial(plan, first_trainer(plan))
    texts = [(prompt, prompt[::-1] * 4) for prompt in prompts]
    shared, cores = SharedFolder.make("samples"), os.sched_getaffinity(0)
    settings = BufferSettings(str(shared.path), 2**28, 4096, held_out_share=0.2)
    os.sched_setaffinity(0, set(sorted(cores)[:num_ranks]))
    try:
        return await train_on_ranks(
            replace(plan, **changes),  # type: ignore[arg-type]
            (), texts, settings, time.monotonic() + plan.budget_s, lambda *progress: None,
        )  # fmt: skip
    finally:
        os.sched_setaffinity(0, cores)
        shared.remove()


@pytest.mark.ray
@pytest.mark.two_cores
@pytest.mark.usefixtures("local_ray")
async def test_a_command_trains_the_same_on_one_rank_and_on_two(tiny: Path, tmp_path: Path) -> None:
    """The policy's pass is shared, too; the same command a second time gives the same bits."""
    import torch
    from safetensors.torch import load_file

    runs = [("one", 1), ("two", 2), ("again", 2)]
    found = [await trained(tiny, tmp_path / name, size) for name, size in runs]
    assert found[0][-1]["step"] == 6
    timeless = [[each | {"elapsed_s": 0} for each in history] for history in found]
    assert timeless[0] == timeless[1] == timeless[2]
    versions = [sorted((tmp_path / name / "versions").glob("v*")) for name, _ in runs]
    assert len({tuple(path.name for path in paths) for paths in versions}) == 1
    one, *others = (load_file(paths[-1] / "trainer.safetensors") for paths in versions)
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    with pytest.raises(EngineError, match="of the training failed"):  # and the other one ends
        await trained(tiny, tmp_path / "lost", 2, engine=EngineConfig(model="nowhere"))
