"""The scheduler for asynchronous scheduling, as vLLM drives it, without a model.

vLLM schedules asynchronously on GPUs only, but its scheduler needs no device. The test builds the
real scheduler from a real config and feeds it made-up model outputs, two engine steps in flight.
"""

from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_two_steps_in_flight(tiny: Path, tiny_drafter: Path) -> None:
    import subprocess
    import sys

    from speed import limit

    done = subprocess.run(
        [sys.executable, __file__, str(tiny), str(tiny_drafter)],
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ALL GOOD" in done.stdout


@pytest.mark.gpu
def test_asynchronous_engine_on_a_gpu(tiny: Path, tiny_drafter: Path) -> None:
    """Not run on CPU machines."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from workloads import TINY_ARGS, random_prompts

    from tlt.config.rollout import EngineConfig
    from tlt.contracts import SampleRequest, SamplingSpec
    from tlt.rollout.offline import generate

    sampling = SamplingSpec(max_tokens=64, temperature=0, ignore_eos=True)
    requests = [SampleRequest(str(i), tuple(p), sampling) for i, p in enumerate(random_prompts(32))]
    plain = EngineConfig(model=str(tiny), num_gpus=1, engine_args=TINY_ARGS)
    arms = [["off", 0], ["eagle3", 1], ["eagle3", 2], ["eagle3", 4]]
    drafting = plain.model_copy(
        update={"drafter": str(tiny_drafter), "strategy": {"kind": "random", "arms": arms}}
    )
    reference = [s.token_ids for s in generate(plain, requests)]
    assert [s.token_ids for s in generate(drafting, requests)] == reference


def drive(model: str, drafter: str) -> None:
    import torch
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from tlt.config.rollout import EngineConfig
    from tlt.contracts import Arm, StepContext, StepReport
    from tlt.vllm.args import engine_args
    from tlt.vllm.scheduler import AdaptiveAsyncScheduler, active_controller

    class Script:
        arms_ = (Arm("eagle3", 3), Arm("eagle3", 1), Arm(), Arm("eagle3", 2), Arm())

        def __init__(self) -> None:
            self.reports: list[StepReport] = []

        def arms(self) -> frozenset[Arm]:
            return frozenset(self.arms_)

        def decide(self, context: StepContext) -> Arm:
            return self.arms_[context.step]

        def observe(self, report: StepReport) -> None:
            self.reports.append(report)

    config = EngineConfig(
        model=model,
        drafter=drafter,
        strategy={"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 4},
        engine_args={"enforce_eager": True, "dtype": "float32", "max_model_len": 128},
    )
    vllm_config = EngineArgs(**engine_args(config)).create_engine_config()
    vllm_config.scheduler_config.async_scheduling = True  # the CPU platform turned it off
    vllm_config.cache_config.num_gpu_blocks = 64
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    scheduler = AdaptiveAsyncScheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=16,
    )
    strategy = Script()
    active_controller(scheduler).set_strategy(strategy)
    init_none_hash(hash)
    scheduler.add_request(
        Request(
            request_id="r",
            prompt_token_ids=list(range(10)),
            sampling_params=SamplingParams(max_tokens=50, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(16, hash),
        )
    )

    def output(tokens: list[int]) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            req_ids=["r"], req_id_to_index={"r": 0}, sampled_token_ids=[tokens]
        )

    prefill = scheduler.schedule()
    assert prefill.num_spec_tokens_to_schedule == 3
    second = scheduler.schedule()  # before the first has ended
    assert second.num_spec_tokens_to_schedule == 1
    assert len(second.scheduled_spec_decode_tokens["r"]) == 3, "placeholders of the first arm"
    scheduler.update_from_output(prefill, output([7]))
    third = scheduler.schedule()
    assert third.num_spec_tokens_to_schedule == 0
    assert len(third.scheduled_spec_decode_tokens["r"]) == 1
    scheduler.update_from_output(second, output([1, 2, 3]))  # 2 of 3 drafts accepted
    fourth = scheduler.schedule()
    assert "r" not in fourth.scheduled_spec_decode_tokens, "the third arm drafted nothing"
    assert fourth.num_spec_tokens_to_schedule == 2
    scheduler.update_from_output(third, output([4]))  # its one draft rejected
    scheduler.update_from_output(fourth, output([5]))
    first, verified, rejected, plain = strategy.reports
    assert (first.verified, first.num_prefill_tokens, first.num_decodes) == (Arm(), 10, 0)
    assert verified.verified == Arm("eagle3", 3)
    assert (verified.num_draft_tokens, verified.num_accepted_tokens) == (3, 2)
    assert rejected.verified == Arm("eagle3", 1)
    assert (rejected.num_draft_tokens, rejected.num_accepted_tokens) == (1, 0)
    assert (plain.verified, plain.num_drafts, plain.num_output_tokens) == (Arm(), 0, 1)
    request = scheduler.requests["r"]
    assert list(request.output_token_ids) == [7, 1, 2, 3, 4, 5]
    print("ALL GOOD")  # noqa: T201


if __name__ == "__main__":
    import sys

    drive(*sys.argv[1:])
