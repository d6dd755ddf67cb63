"""Classes of vLLM that a value belongs to: by vLLM's own annotations, or by the name of the value.

Most of our parameters that hold objects of vLLM are typed `Any`, because vLLM is not typed here:
`ROLES` says what the names of such parameters and variables stand for, and the elements of lists.
"""

from __future__ import annotations

import ast

from contract.sources import Definition, Function, Sources, is_property

_BATCHES = (
    "vllm.v1.worker.gpu_input_batch.InputBatch",
    "vllm.v1.worker.gpu.input_batch.InputBatch",
)
_RUNNERS = (
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
)
_ATTENTION = "vllm.v1.attention.backend.CommonAttentionMetadata"
_SAMPLING = "vllm.v1.sample.metadata.SamplingMetadata"

ROLES: dict[str, tuple[str, ...]] = {
    "batch": _BATCHES,
    "common_attn_metadata": (_ATTENTION,),
    "common": (_ATTENTION,),
    "completion": ("vllm.outputs.CompletionOutput",),
    "gpu_input_batch": _BATCHES[:1],
    "input_batch": _BATCHES,
    "llm": ("vllm.v1.engine.llm_engine.LLMEngine",),
    "metadata": ("vllm.v1.spec_decode.metadata.SpecDecodeMetadata", _ATTENTION),
    "model_runner": _RUNNERS,
    "model_runner_output": ("vllm.v1.outputs.ModelRunnerOutput",),
    "output": ("vllm.outputs.RequestOutput",),
    "processor": (
        "vllm.v1.sample.logits_processor.interface.LogitsProcessor",
        "vllm.v1.sample.logits_processor.builtin.LogitBiasLogitsProcessor",
        "vllm.v1.sample.logits_processor.builtin.MinPLogitsProcessor",
        "vllm.v1.sample.logits_processor.builtin.MinTokensLogitsProcessor",
    ),
    "request": ("vllm.v1.request.Request", "vllm.v1.core.sched.output.NewRequestData"),
    "requests[]": ("vllm.v1.worker.gpu_input_batch.CachedRequestState",),
    "runner": _RUNNERS,
    "_runner": _RUNNERS,
    "sampling": (_SAMPLING,),
    "sampling_metadata": (_SAMPLING,),
    "scheduler_output": ("vllm.v1.core.sched.output.SchedulerOutput",),
    "speculative": ("vllm.config.speculative.SpeculativeConfig",),
    "state": (
        "vllm.v1.worker.gpu_model_runner.ExecuteModelState",
        "vllm.v1.worker.gpu.model_runner.ExecuteModelState",
    ),
    "vllm_config": ("vllm.config.vllm.VllmConfig",),
}
"""Classes of vLLM by the names of ours that hold their instances. Where there are several, such as
one for each of vLLM's model runners, an attribute must exist in one of them."""

SETTINGS: dict[str, dict[str, str]] = {
    "args.py": {
        "args": "vllm.engine.arg_utils.EngineArgs",
        "speculative": "vllm.config.speculative.SpeculativeConfig",
    },
    "core.py": {"arguments": "vllm.sampling_params.SamplingParams"},
}
"""Variables of ours whose keys are arguments of vLLM, by file."""


def by_role(vllm: Sources, name: str) -> list[Definition]:
    """Return the classes that a name of ours stands for."""
    found = [vllm.find(dotted) for dotted in ROLES.get(name, ())]
    return [d for d in found if d is not None]


def types_of_members(vllm: Sources, owners: list[Definition], name: str) -> list[Definition]:
    """Return the classes that a member of these classes belongs to, by vLLM's annotations."""
    found: list[Definition] = []
    for owner in owners:
        member = vllm.member(owner, name)
        if member is None:
            continue
        node = member.node
        if isinstance(node, Function):
            found += annotated(vllm, member.module, node.returns) if is_property(node) else []
        elif isinstance(node, ast.AnnAssign):
            found += annotated(vllm, member.module, node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            found += annotated(vllm, member.module, node.value.func)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            found += _role_of(vllm, node.value)
    return [d for place, d in enumerate(found) if d not in found[:place]]


def _role_of(vllm: Sources, value: ast.Name | ast.Attribute) -> list[Definition]:
    name = value.id if isinstance(value, ast.Name) else value.attr
    if name not in ROLES and name.endswith("_config"):
        config = vllm.find("vllm.config.vllm.VllmConfig")
        assert config is not None
        return types_of_members(vllm, [config], name)
    return by_role(vllm, name)


def annotated(vllm: Sources, module: str, node: ast.expr | None) -> list[Definition]:
    """Return the classes that an annotation names, without those inside brackets."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp):
        return [*annotated(vllm, module, node.left), *annotated(vllm, module, node.right)]
    if not isinstance(node, ast.Name):
        return []
    return classes(vllm.named(module, node.id))


def classes(definition: Definition | None) -> list[Definition]:
    """Return a definition in a list if it is a class; an empty list otherwise."""
    if definition is None or not isinstance(definition.node, ast.ClassDef):
        return []
    return [definition]
