"""GRPO with TRL's trainer on CPU, and a drafter that TLT trains between generation and update.

    make setup-trl && source .venv-trl/bin/activate
    tlt models tiny --out models/tiny
    python examples/trl_grpo.py models/tiny --without
    python examples/trl_grpo.py models/tiny

Both runs print the same rewards: the first one generates without drafts.
"""

import argparse
import os
from functools import partial
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from tlt.integrations.trl import TLTCallback, TltConfig, new_drafter

QUESTIONS = ["What is 2 + 3?", "Name a colour.", "Count to ten.", "Say hello."]
SHOWN = "reward", "step_time", "tlt/"  # TRL's metrics that begin like this are printed


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward responses that repeat few tokens."""
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def main(model: str, steps: int, out: str, drafter: str, ask: list[str], without: bool) -> None:
    """Train, and print rewards, seconds and TLT's metrics of every RL step."""
    start = drafter or new_drafter(model, f"{out}/drafter-start", dtype="float32")
    os.environ["TLT_CONFIG"] = f"drafter={start} strategy.kind={'off' if without else 'adaptive'}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"  # both runs draw the same samples
    # TRL has no settings for this; by default vLLM compiles for a minute, and rounds to bfloat16.
    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True, dtype="float32")
    settings: dict[str, Any] = {"use_vllm": True, "vllm_max_model_length": 256, "use_cpu": True}
    settings |= {"bf16": False, "max_steps": steps, "save_strategy": "no", "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 8, "num_generations": 4, "report_to": "none"}
    settings |= {"max_completion_length": 128, "learning_rate": 1e-5, "output_dir": out}
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in ask * steps]})
    trainer = GRPOTrainer(model, variety, args=GRPOConfig(**settings), train_dataset=data)
    share = 0.0 if without else 0.1 if drafter else 1.0  # a new drafter has much to learn
    trainer.add_callback(TLTCallback(trainer, share, TltConfig(session_s=2.0)))
    trainer.train()
    for step in trainer.state.log_history[:steps]:
        print("step", *(f"{name}={step[name]}" for name in step if name.startswith(SHOWN)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder of the policy, in Hugging Face format")
    parser.add_argument("--steps", type=int, default=20, help="RL steps")
    parser.add_argument("--out", default="runs/trl", help="folder for the drafter")
    parser.add_argument("--drafter", default="", help="folder of a trained drafter to start from")
    parser.add_argument("--ask", nargs="+", default=QUESTIONS, help="questions to train on")
    parser.add_argument("--without", action="store_true", help="generate without drafts")
    main(**vars(parser.parse_args()))
