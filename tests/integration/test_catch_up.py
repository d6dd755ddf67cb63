"""Skipping the draft model and catching up equals running it in every engine step."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workloads import random_prompts

pytestmark = pytest.mark.vllm

OFF, NGRAM, EAGLE3 = ["off", 0], ["ngram", 4], ["eagle3", 4]
BLOCK_TOKENS = 32
ROW_BYTES = 3 * 128 * 4 + 8 + 4  # states of three layers in fp32, position, token

ONCE = {"arms": [OFF] * 40 + [EAGLE3] * 200}
SCENARIOS: dict[str, dict[str, Any]] = {
    "once": ONCE,
    "ngrams": {"arms": [OFF] * 5 + [NGRAM] * 25 + [OFF] * 5 + [EAGLE3] * 10 + [NGRAM] * 300},
    "random": {"seed": 3},
    "small_budget": {"arms": [OFF, NGRAM] * 25 + [EAGLE3] * 200, "budget": 100 * ROW_BYTES},
}


@pytest.fixture(scope="module")
def recorded(tiny: Path, tiny_drafter: Path, tmp_path_factory: Any) -> Any:
    from speed import limit

    out = tmp_path_factory.mktemp("catch_up") / "recorded.pt"
    done = subprocess.run(
        [sys.executable, __file__, str(tiny), str(tiny_drafter), str(out)],
        capture_output=True,
        text=True,
        timeout=limit(600),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import torch

    return torch.load(out)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_same_drafts_and_same_cache(recorded: Any, scenario: str) -> None:
    import torch

    always, skipping = recorded[scenario]
    assert skipping["tokens"] == always["tokens"]
    assert skipping["drafts"] == always["drafts"]
    assert len(skipping["blocks"]) == len(always["blocks"]) > 20
    for (where, ours), (also, theirs) in zip(skipping["blocks"], always["blocks"], strict=True):
        assert where == also
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert always["written"] == 0
    assert skipping["written"] > 100
    assert skipping["passes"] < 0.9 * always["passes"]
    assert always["preemptions"] == skipping["preemptions"] > 0


def test_what_the_comparison_would_miss(recorded: Any) -> None:
    """A drafter that does not catch up drafts other tokens: the comparison can fail."""
    always, _ = recorded["once"]
    assert recorded["without catching up"]["drafts"] != always["drafts"]
    assert recorded["without catching up"]["tokens"] == always["tokens"]


# --- in a separate process ----------------------------------------------------------------------


class Recorder:
    """The proposer's calls, and full blocks of its KV cache after each EAGLE-3 draft."""

    def __init__(self) -> None:
        from vllm.v1.spec_decode.eagle import EagleProposer

        from tlt.vllm.v1.proposer import SwitchingProposer

        self.catches_up = True
        self.clear()
        propose, write, one_pass = (
            SwitchingProposer.propose,
            SwitchingProposer.write_missed,
            EagleProposer.propose,
        )

        def spied_propose(proposer: Any, **inputs: Any) -> Any:
            proposed = propose(proposer, **inputs)
            if proposer.drafter == "eagle3":
                self.note(proposer, proposed, inputs["common_attn_metadata"].block_table_tensor)
            return proposed

        def spied_write(proposer: Any, missed: Any, first: Any, inputs: Any) -> None:
            self.written += len(missed)
            if self.catches_up:
                write(proposer, missed, first, inputs)

        def spied_pass(proposer: Any, *args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            return one_pass(proposer, *args, **kwargs)

        SwitchingProposer.propose = spied_propose  # type: ignore[assignment, method-assign]
        SwitchingProposer.write_missed = spied_write  # type: ignore[assignment, method-assign]
        EagleProposer.propose = spied_pass

    def clear(self) -> None:
        self.drafts: list[Any] = []
        self.blocks: list[Any] = []
        self.written = self.passes = self.preemptions = 0

    def note(self, proposer: Any, proposed: Any, block_table: Any) -> None:
        batch = proposer.input_batch
        (layer,) = proposer._draft_attn_layer_names
        cache = proposer.compilation_config.static_forward_context[layer].kv_cache
        for row, request_id in enumerate(batch.req_ids):
            if proposer.discarded[row]:
                continue  # a prefill: the request drafts nothing yet
            name = request_id.split("-")[0]
            sampled = [t for t in proposer.sampled_token_ids[row].tolist() if t >= 0]
            num_seen = int(batch.num_tokens_no_spec[row]) + len(sampled) - 1
            self.drafts.append((name, num_seen, proposed[row].tolist()))
            for index in range(num_seen // BLOCK_TOKENS):
                block = cache[block_table[row, index]].clone()
                self.blocks.append(((name, num_seen, index), block))


def record(model: str, drafter: str, out: str) -> None:
    import os
    import random

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    import torch
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from v2_calls import Scripted
    from workloads import SWITCHING_ARMS

    from tlt.config.rollout import EngineConfig, NgramConfig
    from tlt.vllm.args import engine_args
    from tlt.vllm.scheduler import active_controller

    config = EngineConfig(
        model=model,
        drafter=drafter,
        max_draft_tokens=8,
        ngram=NgramConfig(history_tokens=0),  # no run may learn from an earlier one
        strategy={"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4},
        engine_args={
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 256,
            "block_size": BLOCK_TOKENS,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 96,  # splits prompts and catch-up
            "num_gpu_blocks_override": 18,  # requests are preempted
        },
    )
    engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(config)))
    recorder = Recorder()  # loads numba, which must come after vLLM's start-up
    scheduler = engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def spied_preempt(*args: Any, **kwargs: Any) -> None:
        recorder.preemptions += 1
        preempt(*args, **kwargs)

    scheduler._preempt_request = spied_preempt
    proposer = engine.collective_rpc(lambda worker: worker.model_runner.drafter)[0]
    assert proposer.missed.budget_bytes == config.drafter_state_mib * 2**20 > 0

    def run(arms: list[Any], budget: int, catches_up: bool = True) -> dict[str, Any]:
        recorder.clear()
        recorder.catches_up = catches_up
        proposer.missed.budget_bytes = budget
        active_controller(scheduler).set_strategy(Scripted(arms))
        tokens = generate(engine)
        assert engine.reset_prefix_cache()
        return {
            "tokens": tokens,
            "preemptions": recorder.preemptions,
            "drafts": recorder.drafts,
            "blocks": recorder.blocks,
            "written": recorder.written,
            "passes": recorder.passes,
        }

    runs: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        if "seed" in scenario:
            arms = random.Random(scenario["seed"]).choices(SWITCHING_ARMS, k=600)
        else:
            arms = scenario["arms"] + [OFF] * 300
        runs[name] = [run(arms, 0), run(arms, scenario.get("budget", 2**29))]
    runs["without catching up"] = run(ONCE["arms"], 2**29, catches_up=False)
    torch.save(runs, out)


def generate(engine: Any) -> dict[str, list[int]]:
    """Generate requests of several lengths. One joins late with a known prompt, one is aborted."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    prompts = random_prompts(6, seed=4)
    prompts[1] = prompts[1] * 5  # several blocks
    lengths = [120, 100, 12, 150, 60, 90]
    joins = {0: [0, 1, 2, 3], 12: [4], 20: [5]}
    prompts[5] = prompts[1]
    tokens: dict[str, list[int]] = {}
    step = 0
    while engine.has_unfinished_requests() or step <= max(joins):
        for index in joins.get(step, []):
            sampling = SamplingParams(
                temperature=0,
                max_tokens=lengths[index],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(f"r{index}", tokens_input(prompts[index]), sampling)
        if step == 30:
            engine.abort_request(["r4"])
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    engine.step()  # tells the workers that the last requests have ended
    return tokens


if __name__ == "__main__":
    record(*sys.argv[1:])
