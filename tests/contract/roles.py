"""What names in our plug-in stand for objects of vLLM, where our annotations say `Any`."""

from __future__ import annotations

ROLES: dict[str, tuple[str, ...]] = {
    "batch": (
        "vllm.v1.worker.gpu_input_batch.InputBatch",
        "vllm.v1.worker.gpu.input_batch.InputBatch",
    ),
    "common_attn_metadata": ("vllm.v1.attention.backend.CommonAttentionMetadata",),
    "common": ("vllm.v1.attention.backend.CommonAttentionMetadata",),
    "completion": ("vllm.outputs.CompletionOutput",),
    "gpu_input_batch": ("vllm.v1.worker.gpu_input_batch.InputBatch",),
    "input_batch": (
        "vllm.v1.worker.gpu_input_batch.InputBatch",
        "vllm.v1.worker.gpu.input_batch.InputBatch",
    ),
    "llm": ("vllm.v1.engine.llm_engine.LLMEngine",),
    "metadata": (
        "vllm.v1.spec_decode.metadata.SpecDecodeMetadata",
        "vllm.v1.attention.backend.CommonAttentionMetadata",
    ),
    "model_runner": (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    ),
    "model_runner_output": ("vllm.v1.outputs.ModelRunnerOutput",),
    "output": ("vllm.outputs.RequestOutput",),
    "request": ("vllm.v1.request.Request",),
    "runner": (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    ),
    "_runner": (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    ),
    "sampling": ("vllm.v1.sample.metadata.SamplingMetadata",),
    "sampling_metadata": ("vllm.v1.sample.metadata.SamplingMetadata",),
    "scheduler_output": ("vllm.v1.core.sched.output.SchedulerOutput",),
    "speculative": ("vllm.config.speculative.SpeculativeConfig",),
    "state": (
        "vllm.v1.worker.gpu_model_runner.ExecuteModelState",
        "vllm.v1.worker.gpu.model_runner.ExecuteModelState",
    ),
    "vllm_config": ("vllm.config.vllm.VllmConfig",),
}
"""Classes of vLLM by the names of ours that hold their instances. Where there are several, one for
each of vLLM's model runners, an attribute must exist in one of them."""

SETTINGS: dict[str, dict[str, str]] = {
    "args.py": {
        "args": "vllm.engine.arg_utils.EngineArgs",
        "speculative": "vllm.config.speculative.SpeculativeConfig",
    },
    "core.py": {"arguments": "vllm.sampling_params.SamplingParams"},
}
"""Variables of ours whose keys are arguments of vLLM, by file."""
