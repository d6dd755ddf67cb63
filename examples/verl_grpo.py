"""GRPO with verl's own trainer, and a drafter that TLT trains on verl's idle replicas.

    python examples/verl_grpo.py /models/policy trainer.n_gpus_per_node=8
    python examples/verl_grpo.py /models/policy --without trainer.n_gpus_per_node=8

The second run is verl alone. Further arguments are settings of verl, or of TLT (`+tlt.lr=1e-4`).
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from tlt.integrations.training import new_drafter

QUESTIONS = ["What is 2 + 3?", "Name a colour.", "Count to ten.", "Say hello."]


def variety(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Reward responses that repeat few characters; verl calls it for every sample."""
    return len(set(solution_str)) / max(1, len(solution_str))


def settings_of_verl(model: str, num_steps: int, out: Path, trainer: str) -> list[str]:
    """Return verl's settings, as its command takes them."""
    settings = {
        "algorithm.adv_estimator": "grpo",
        **{f"data.{kind}_files": out / "prompts.parquet" for kind in ("train", "val")},
        **{"data.train_batch_size": 4, "data.max_prompt_length": 64},
        "data.max_response_length": 512,
        "reward.custom_reward_function.path": Path(__file__).absolute(),
        "reward.custom_reward_function.name": variety.__name__,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
        **{"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.n": 4},
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
        **{"trainer.logger": "[console]", "trainer.val_before_train": False},
        **{"trainer.total_training_steps": num_steps, "trainer.default_local_dir": out},
        "trainer.v1.trainer_mode": trainer,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def main(model: str, num_steps: int, out: Path, without: bool, more: list[str]) -> int:
    """Write prompts and an untrained drafter, and run verl."""
    truth = {"style": "rule", "ground_truth": ""}
    rows = [
        {"prompt": [{"role": "user", "content": q}], "data_source": "own", "reward_model": truth}
        for q in QUESTIONS * num_steps
    ]
    out.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(out / "prompts.parquet")
    if not without:
        drafter = new_drafter(model, str(out / "drafter-start"))
        os.environ["TLT_CONFIG"] = f"drafter={Path(drafter).absolute()}"
    words = settings_of_verl(model, num_steps, out, "sync" if without else "tlt")
    words.append(f"hydra.run.dir={out}/hydra")
    return subprocess.call([sys.executable, "-m", "verl.trainer.main_ppo", *words, *more])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder of the policy, in Hugging Face format")
    parser.add_argument("--steps", type=int, default=10, help="RL steps")
    parser.add_argument("--out", type=Path, default=Path("runs/verl"), help="folder of the run")
    parser.add_argument("--without", action="store_true", help="run verl alone")
    options, more = parser.parse_known_args()
    out = options.out.absolute()
    sys.exit(main(options.model, options.steps, out, options.without, more))
