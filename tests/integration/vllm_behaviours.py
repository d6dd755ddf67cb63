"""What TLT does in an engine, tried part by part: `.ci/vllm_versions.py` runs it with every vLLM.

    python tests/integration/vllm_behaviours.py FOLDER

One engine of the tiny model starts under `TLT_CONFIG` in this process, and later one of TLT's own
in another. The last line is JSON: for every behaviour "passed", or its error. FOLDER holds the
model and two drafters, made if missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine_process import EngineProcess
from switch_programs import ENGINE, ENVIRONMENT, counted, refusal, tokens_of
from workloads import (
    TINY_ARGS,
    changed_policy,
    check_states,
    greedy,
    load_policy,
    random_prompts,
    save_fresh_drafter,
)

PASSED, NOT_RUN = "passed", "not run"
PROMPTS = random_prompts(6, seed=5)
NUM_TOKENS = 40
ARMS = [["off", 0], ["eagle3", 4], ["ngram", 4], ["eagle3", 2], ["ngram", 2]]
SAMPLED = {"temperature": 1.0, "top_p": 0.95}
LOSSY_REQUESTS: list[dict[str, Any]] = [{"min_p": 0.1}, {"repetition_penalty": 1.2}]
LOSSY_ENGINES: list[dict[str, Any]] = [
    {"logits_processors": ["some.module:Processor"]},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
]


def make_models(folder: Path) -> None:
    """Make the tiny model, a new drafter, and one with a little training."""
    import torch
    from learning import tiny_samples, train_tiny

    from tlt.drafter.checkpoint import save_drafter
    from tlt.models import tiny

    if not (folder / "tiny").exists():
        tiny.make(folder / "tiny")
    if not (folder / "new").exists():
        save_fresh_drafter(load_policy(folder / "tiny"), folder / "new")
    if not (folder / "trained").exists():
        trainer = train_tiny(folder / "tiny", tiny_samples(folder / "tiny", 64), num_steps=40)
        save_drafter(trainer.drafter, folder / "trained", torch.float32)


class Trial:
    """An engine, and one method for each behaviour."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        self._folder = folder
        self._llm: Any = LLM(str(folder / "tiny"), **ENGINE, disable_log_stats=False)
        from tlt.integrations.hosted import HostedEngine

        self._engine = HostedEngine(self._llm)
        self._greedy = greedy(load_policy(self._folder / "tiny"), PROMPTS, NUM_TOKENS)
        self._draw({"kind": "off"})
        self._sampled = self._drawn

    def _draw(self, strategy: dict[str, Any], **settings: Any) -> int:
        """Generate with a strategy, and return how many drafted tokens were accepted."""
        from tlt.strategy.spec import build_strategy

        controller = self._engine.controller
        controller.set_strategy(build_strategy(strategy))
        before = controller.totals.accepted_tokens
        self._drawn = tokens_of(self._llm, PROMPTS, **(settings or SAMPLED))
        return controller.totals.accepted_tokens - before

    def _fixed(self, drafter: str, **settings: Any) -> int:
        return self._draw({"kind": "fixed", "drafter": drafter, "num_draft_tokens": 4}, **settings)

    def says_the_same(self) -> None:
        for drafter in ("eagle3", "ngram"):
            accepted = self._fixed(drafter, temperature=0)
            assert self._drawn == self._greedy, f"{drafter} changes greedy tokens"
        assert accepted > 0, "no n-gram was accepted"

    def samples_the_same(self) -> None:
        for drafter in ("eagle3", "ngram"):
            self._fixed(drafter)
            assert self._drawn == self._sampled, f"{drafter} changes samples"

    def switches_arms(self) -> None:
        self._draw({"kind": "random", "arms": ARMS, "seed": 1})
        assert self._drawn == self._sampled, "switching changes samples"
        used = counted(self._llm).keys()
        assert used == {"off", "eagle3:4", "ngram:4", "eagle3:2", "ngram:2"}, f"only {used} ran"

    def swaps_its_drafter(self) -> None:
        from tlt.drafter.checkpoint import load_drafter

        before = self._fixed("eagle3", temperature=0)
        drafter = load_drafter(self._folder / "trained")
        self._engine.load_drafter(drafter.state_dict(), drafter.config, "float32", 1)
        after = self._fixed("eagle3", temperature=0)
        assert self._drawn == self._greedy, "a swap changes greedy tokens"
        assert after > before, f"{after} drafted tokens accepted, {before} before the swap"

    def loads_a_policy(self) -> None:
        changed = changed_policy(self._folder / "tiny", 1)
        for policy, expected in (
            (changed, greedy(changed, PROMPTS, NUM_TOKENS)),
            (load_policy(self._folder / "tiny"), self._greedy),
        ):
            self._engine.load_policy((name, p.data) for name, p in policy.named_parameters())
            self._fixed("eagle3", temperature=0)
            assert self._drawn == expected, "the engine's policy is not the one loaded"

    def records_states(self) -> None:
        from tlt.states.buffer import BufferSettings

        folder = self._folder / f"buffer-{os.getpid()}"
        settings = BufferSettings(str(folder), 2**28, max_sample_tokens=512)
        self._engine.record(settings)
        self._fixed("eagle3")
        texts = list(zip(PROMPTS, self._drawn, strict=True))
        check_states(settings, load_policy(self._folder / "tiny"), self._folder / "new", texts)

    def refuses_lossy_settings(self) -> None:
        from vllm.engine.arg_utils import EngineArgs

        for settings in LOSSY_REQUESTS:
            said = refusal(partial(tokens_of, self._llm, PROMPTS[:1], **settings))
            assert next(iter(settings)) in said, said
        for arguments in LOSSY_ENGINES:
            program = EngineArgs(str(self._folder / "tiny"), **ENGINE, **arguments)
            said = refusal(program.create_engine_config)
            assert next(iter(arguments)) in said, said

    def runs_on_its_own(self) -> None:
        """An engine of `tlt train`: its settings, its process, its weight transfer."""
        from tlt.config.rollout import EngineConfig
        from tlt.contracts import SamplingSpec
        from tlt.node.weights import SharedWeights

        config = EngineConfig(
            model=str(self._folder / "tiny"),
            drafter=str(self._folder / "trained"),
            strategy={"kind": "random", "arms": ARMS, "seed": 1},
            kv_cache_gib=0.25,
            core_group="vllm-versions",
            engine_args=TINY_ARGS,
        )
        sampling = SamplingSpec(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        engine = EngineProcess(config)
        try:
            faults = engine.start()["faults"]
            assert not faults, faults[0]
            tokens = [sample.token_ids for sample in engine.generate(PROMPTS, sampling)]
            assert tokens == self._greedy, "an engine of TLT changes greedy tokens"
            changed = changed_policy(self._folder / "tiny", 1)
            with SharedWeights(changed.state_dict().items()) as weights:
                engine.call("update_policy", weights.manifest(), 1)
            tokens = [sample.token_ids for sample in engine.generate(PROMPTS, sampling)]
            assert tokens == greedy(changed, PROMPTS, NUM_TOKENS), "a policy was not loaded"
        finally:
            engine.close()


BEHAVIOURS: dict[str, Callable[[Trial], None]] = {
    "greedy": Trial.says_the_same,
    "sampled": Trial.samples_the_same,
    "switching": Trial.switches_arms,
    "drafter swap": Trial.swaps_its_drafter,
    "weight sync": Trial.loads_a_policy,
    "hidden states": Trial.records_states,
    "refusals": Trial.refuses_lossy_settings,
    "own engine": Trial.runs_on_its_own,
}


def said(error: BaseException) -> str:
    """Return the innermost cause of an error in one line."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:240]


def tried(folder: Path) -> dict[str, str]:
    """Return the result of every behaviour, and of the engine's start."""
    try:
        trial = Trial(folder)
    except Exception as error:
        return {"start": said(error)} | dict.fromkeys(BEHAVIOURS, NOT_RUN)
    found = {"start": PASSED}
    for name, behaves in BEHAVIOURS.items():
        try:
            behaves(trial)
        except AssertionError as error:
            found[name] = said(error)
        except Exception as error:  # the engine has requests left that will never end
            return dict.fromkeys(BEHAVIOURS, NOT_RUN) | found | {name: said(error)}
        else:
            found[name] = PASSED
    return found


def main(given: Sequence[str]) -> None:
    folder = Path(given[0])
    make_models(folder)
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    os.environ["TLT_CONFIG"] = f"drafter={folder / 'new'}"
    sys.stdout.write(json.dumps(tried(folder)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
