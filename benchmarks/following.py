"""How well drafters follow a policy that learns: the frozen one, the published one, the next one.

    python benchmarks/following.py RUN --frozen models/smollm2-words-eagle3

RUN is the folder of a run with TLT that kept its checkpoints (`checkpoint.keep`). Each checkpoint
holds the policy of its RL step and the drafter that was published by then. Every kept policy, and
the one that the run began with, answers the same word problems at temperature 1 in the same
engines, with the same random numbers. Three drafters then draft for these samples:

- `frozen`: one that never changes, such as a drafter that was trained offline for the first policy,
  or the one of an early checkpoint (left out without `--frozen`),
- `published`: the one that engines had when the policy was new,
- `next`: the one of the next checkpoint.

Tokens per draft are those that the policy is expected to accept at draft length 3, by
`tlt.drafter.evaluation`; intervals are over problems, and so are those of the ratios of two
drafters on the same samples. Writes benchmarks/results/following.json.
"""

from __future__ import annotations

import argparse
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common import save
from tlt.drafter.checkpoint import load_drafter
from tlt.drafter.eagle3.config import default_aux_layers
from tlt.drafter.evaluation import HeldOutWindow, evaluate, prepare_windows
from tlt.drafter.passes import DraftPasses
from tlt.report.gain import interval
from tlt.states.captured import Captured, capture

DRAFT_LENGTH = 3


def policy_of(checkpoint: Path, model: Path, out: Path) -> Path:
    """Write the policy of a checkpoint as a model folder like `model`."""
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reader = dcp.FileSystemReader(checkpoint / "learner")
    names = {
        name.removeprefix("policy.")
        for name in reader.read_metadata().state_dict_metadata
        if name.startswith("policy.")
    }
    own = {name: tensor for name, tensor in policy.state_dict().items() if name in names}
    dcp.load({"policy": own}, storage_reader=reader, no_dist=True)
    policy.load_state_dict(own, strict=False)
    policy.tie_weights()
    shutil.copytree(model, out, dirs_exist_ok=True)
    policy.save_pretrained(out)
    return out


def solved(model: Path, num_problems: int, max_tokens: int) -> list[tuple[Captured, float]]:
    """Return states and reward of the policy's samples at temperature 1, one per problem.

    Two engines in float32 sample them: the same problems and weights give the same samples.
    """
    from transformers import AutoModelForCausalLM

    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.rollout.offline import generate
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems, score

    chat = Chat(str(model))
    sampling = SamplingSpec(max_tokens=max_tokens, temperature=1.0, logprobs=False)
    asked = problems("word_problems", num_problems, 0, "following")
    requests = [
        SampleRequest(str(index), chat.prompt(problem.question), sampling)
        for index, problem in enumerate(asked)
    ]
    arguments = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": max(len(each.prompt_token_ids) for each in requests) + max_tokens,
        "max_num_seqs": 64,
    }
    config = EngineConfig(model=str(model), kv_cache_gib=1, engine_args=arguments)
    samples = generate(config, requests, num_engines=2)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    layers = default_aux_layers(policy.config.num_hidden_layers)
    found = []
    for problem, request, sample in zip(asked, requests, samples, strict=True):
        prompt = list(request.prompt_token_ids)
        states = capture(policy, [*prompt, *sample.token_ids], len(prompt), layers)
        found.append((states, score(problem, chat.tokenizer.decode(sample.token_ids))))
    return found


class Judge:
    """A policy's samples, on which drafters are evaluated."""

    def __init__(self, model: Path, samples: Sequence[Captured]) -> None:
        from transformers import AutoModelForCausalLM

        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._head = policy.get_output_embeddings().weight.detach()
        self._embedding = policy.get_input_embeddings().weight.detach()
        self._samples = samples
        self._windows: list[HeldOutWindow] = []

    def lengths(self, drafter: Path) -> list[tuple[float, int]]:
        """Return the expected tokens per draft of each sample, and how many drafts it has."""
        passes = DraftPasses(
            load_drafter(drafter).float(), self._head, self._embedding, DRAFT_LENGTH, bfloat16=False
        )
        self._windows = self._windows or prepare_windows(passes, self._samples, [1.0])
        return [
            (evaluate(passes, [window], [1.0]).length(1.0), len(window.row.chains.starts))
            for window in self._windows
        ]


def mean(values: Sequence[tuple[float, int]]) -> float:
    return sum(length * count for length, count in values) / sum(count for _, count in values)


def _ratio(both: Sequence[tuple[tuple[float, int], tuple[float, int]]]) -> float:
    """Return the ratio of two drafters' means on the same problems."""
    return mean([mine for mine, _ in both]) / mean([other for _, other in both])


def described(found: dict[str, list[tuple[float, int]]]) -> dict[str, Any]:
    """Return mean and interval of each drafter, and of its ratio to the frozen one."""
    result: dict[str, Any] = {}
    for name, values in found.items():
        result[name] = {"length": mean(values), "interval": list(interval(mean, values))}
        if name != "frozen" and "frozen" in found:
            frozen = found["frozen"]
            result[name]["to_frozen"] = mean(values) / mean(frozen)
            both = list(zip(values, frozen, strict=True))
            result[name]["to_frozen_interval"] = list(interval(_ratio, both))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--frozen", type=Path)
    parser.add_argument("--num-problems", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=480)
    options = parser.parse_args()
    config = tomllib.loads((options.run / "config.toml").read_text())
    model = Path(config["policy"]["model"])
    kept = sorted((options.run / "checkpoints").glob("step-*"))
    steps = [0, *(int(each.name.removeprefix("step-")) for each in kept)]
    published: list[Path | None] = [None, *(each / "drafter" for each in kept)]
    folder = Path("runs/following")
    rows: list[dict[str, Any]] = []
    for place, step in enumerate(steps):
        policy = model if not step else policy_of(kept[place - 1], model, folder / f"{step}")
        answers = solved(policy, options.num_problems, options.max_tokens)
        samples = [states for states, _ in answers]
        judge = Judge(policy, samples)
        drafters = {"frozen": options.frozen, "published": published[place]}
        if place + 1 < len(published):
            drafters["next"] = published[place + 1]
        found = {name: judge.lengths(drafter) for name, drafter in drafters.items() if drafter}
        tokens = sum(int(sample.loss_mask_T.sum()) for sample in samples)
        rewards = [reward for _, reward in answers]
        rows.append(
            {
                "step": step,
                "tokens": tokens,
                "rewards": rewards,
                "reward": sum(rewards) / len(rewards),
                "drafters": described(found),
            }
        )
        lengths = {name: round(mean(each), 3) for name, each in found.items()}
        print(step, f"reward {rows[-1]['reward']:.2f}", lengths, flush=True)
        result = {
            "num_problems": options.num_problems,
            "draft_length": DRAFT_LENGTH,
            "policies": rows,
        }
        save("following", result)


if __name__ == "__main__":
    main()
