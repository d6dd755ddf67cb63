"""How long saving holds up the drafter's training: asynchronous against a plain full save.

    python benchmarks/checkpoint.py [--model models/smollm2]

A drafter of SmolLM2's size with its optimizer's moments. `full` writes weights, moments and the
policy's head and embedding, synced to disk, before training goes on; `ours` copies what is trained
and goes on. Both take turns, with a training step in between.
Writes benchmarks/results/checkpoint.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tlt.observe.provenance import provenance

RESULT = Path(__file__).parent / "results" / "checkpoint.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    from tlt.drafter.checkpoint import VersionStore
    from tlt.drafter.passes import Row
    from tlt.drafter.trainer import DrafterTrainer, TrainerSettings, fresh_drafter
    from tlt.states.captured import Captured

    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    head = policy.get_output_embeddings().weight.detach()
    embedding = policy.get_input_embeddings().weight.detach()
    hidden = policy.config.hidden_size
    drafter = fresh_drafter(policy.config, head, torch.arange(options.draft_vocab))
    settings = TrainerSettings(
        num_draft_tokens=4, row_tokens=2048, lr=1e-5, temperature=1.0, seed=0
    )
    trainer = DrafterTrainer(drafter, head, embedding, settings)
    row = Row(
        [
            Captured(
                token_ids_T=torch.randint(0, policy.config.vocab_size, (512,)),
                loss_mask_T=torch.ones(512, dtype=torch.bool),
                aux_TA=torch.randn(512, 3 * hidden, dtype=torch.bfloat16),
                final_TH=torch.randn(512, hidden, dtype=torch.bfloat16),
            )
        ]
    )
    trainer.micro_step(row)
    folder = Path(tempfile.mkdtemp(prefix="tlt-checkpoint-", dir="."))
    store = VersionStore(folder / "versions")
    times: dict[str, list[float]] = {"full": [], "ours": []}
    written: list[float] = []
    try:
        for round_ in range(options.rounds + 1):
            for way in ("full", "ours") if round_ % 2 else ("ours", "full"):
                trainer.micro_step(row)
                store.wait()
                started = time.perf_counter()
                if way == "ours":
                    store.save(trainer)
                else:
                    full = dict(trainer.tensors()) | {
                        "head": head,
                        "embedding": embedding,
                    }  # tied: once
                    with (folder / "full.pt.partial").open("wb") as file:
                        torch.save(full, file)
                        file.flush()
                        os.fsync(file.fileno())
                    (folder / "full.pt.partial").rename(folder / "full.pt")
                stall = time.perf_counter() - started
                if way == "ours":
                    store.wait()
                if round_:  # the first round warms up
                    times[way].append(stall)
                    if way == "ours":
                        written.append(time.perf_counter() - started)
        ours_bytes = sum(f.stat().st_size for f in store.path(store.versions()[-1]).iterdir())
        full_bytes = (folder / "full.pt").stat().st_size
    finally:
        shutil.rmtree(folder)
    ratio = [f / o for f, o in zip(times["full"], times["ours"], strict=True)]
    result = {
        "provenance": provenance(),
        "options": vars(options),
        "stall_s": times,
        "written_after_s": written,
        "bytes": {"full": full_bytes, "ours": ours_bytes},
        "stall_shorter_by": statistics.median(ratio),
        "low": min(ratio),
        "high": max(ratio),
    }
    for way, size in (("full", full_bytes), ("ours", ours_bytes)):
        print(f"{way}: stall {1e3 * statistics.median(times[way]):.0f} ms, {size / 2**20:.0f} MiB")
    print(
        f"the stall is {result['stall_shorter_by']:.1f}x shorter ({min(ratio):.1f} to "
        f"{max(ratio):.1f}); on disk after {1e3 * statistics.median(written):.0f} ms"
    )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
