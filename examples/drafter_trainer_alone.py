"""The drafter's trainer by itself: a Hugging Face policy, its samples, and no engine.

    tlt models tiny --out models/tiny
    python examples/drafter_trainer_alone.py models/tiny --steps 100 --out models/tiny-eagle3

The policy writes samples, one pass over each captures its hidden states, and the trainer learns
from them. Held-out samples show the expected acceptance length before and after.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tlt import (
    BufferSettings,
    DrafterTrainer,
    SampleBuffer,
    TrainerSettings,
    capture,
    evaluate_samples,
    fresh_drafter,
    save_drafter,
)

PROMPT_TOKENS, SAMPLE_TOKENS = 8, 72


def main(model: str, num_samples: int, num_steps: int, out: Path | None, folder: str) -> None:
    """Train a new drafter for `model`, and print what it learned."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more; drop this for a larger one
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    head = policy.get_output_embeddings().weight.detach()
    embedding = policy.get_input_embeddings().weight.detach()
    drafter = fresh_drafter(policy.config, head, None)  # None: drafts from the whole vocabulary
    buffer = SampleBuffer(BufferSettings(folder, capacity_bytes=2**30, max_sample_tokens=4096))
    prompts = torch.randint(4, policy.config.vocab_size, (num_samples, PROMPT_TOKENS))
    samples = policy.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        max_length=SAMPLE_TOKENS,
        min_length=SAMPLE_TOKENS,
    )
    for number, token_ids in enumerate(samples.tolist()):
        states = capture(policy, token_ids, PROMPT_TOKENS, drafter.config.aux_layer_ids)
        buffer.put(str(number), 0, states)
    print(f"{num_samples} samples captured, {buffer.num_bytes() / 1e6:.1f} MB of hidden states")

    settings = TrainerSettings(
        num_draft_tokens=4, row_tokens=1024, lr=1e-3, temperature=1.0, seed=0
    )
    trainer = DrafterTrainer(drafter, head, embedding, settings)
    held_out = buffer.held_out(max_tokens=2048)
    before = evaluate_samples(trainer.passes, held_out, [1.0]).length(1.0)
    trainer.session(buffer, should_stop=lambda: trainer.step >= num_steps)
    after = evaluate_samples(trainer.passes, held_out, [1.0]).length(1.0)
    print(f"expected acceptance length on {len(held_out)} held-out samples: ", end="")
    print(f"{before:.2f} before, {after:.2f} after {trainer.step} optimizer steps")
    if out is not None:
        print(f"wrote {save_drafter(drafter, out)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder of the policy, in Hugging Face format")
    parser.add_argument("--samples", type=int, default=64, help="samples that the policy writes")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--out", type=Path, help="folder for the trained drafter")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as states:
        main(arguments.model, arguments.samples, arguments.steps, arguments.out, states)
