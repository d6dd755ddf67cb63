"""Programs that know nothing of TLT: each builds vLLM engines as its users do.

The test module runs them in processes of their own, with and without `TLT_CONFIG`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, call_in_process

ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**28,
}
"""Arguments of every engine here."""
NGRAMS = "strategy.kind=fixed strategy.drafter=ngram strategy.num_draft_tokens=4"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
METRICS = ("engine_steps", "drafts", "draft_tokens", "accepted_tokens", "output_tokens")


def run(program: Callable[..., Any], *args: Any, **environment: str) -> Any:
    """Run a program in a process of its own, and return its result."""
    prepare = partial(_set, ENVIRONMENT | environment)
    return call_in_process(EngineProcess.context, prepare, program, *args)


def _set(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def params(**settings: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | settings))


def tokens_of(llm: Any, prompts: Sequence[Sequence[int]], **settings: Any) -> list[tuple[int, ...]]:
    """Return the tokens of one sample per prompt, the third with seed 2 and so on."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    each = [params(seed=index, **settings) for index in range(len(prompts))]
    outputs = llm.generate(inputs, each, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def refusal(function: Callable[[], Any]) -> str:
    """Return the message of the user's mistake that a call is refused for."""
    try:
        function()
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


def counted(llm: Any) -> dict[str, dict[str, int]]:
    """Return vLLM's metrics that TLT adds, by arm."""
    found: dict[str, dict[str, int]] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:tlt_")
        if name in METRICS:
            found.setdefault(metric.labels["arm"], {})[name] = metric.value
    return found


# --- programs ---------------------------------------------------------------------------------


def offline(model: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Generate with `vllm.LLM` under TLT."""
    from vllm import LLM

    found: dict[str, Any] = {}
    own = {"method": "ngram", "num_speculative_tokens": 2}
    found["refused start"] = refusal(lambda: LLM(model, **ENGINE, speculative_config=own))
    llm = LLM(model, **ENGINE, disable_log_stats=False)
    found["greedy"] = tokens_of(llm, prompts, temperature=0)
    found["sampled"] = tokens_of(llm, prompts, temperature=1)
    found["metrics"] = counted(llm)
    (found["report"],) = llm.collective_rpc("tlt_report", args=(True,))
    found["refused request"] = refusal(lambda: llm.generate("a", params(min_p=0.1)))
    found["after"] = tokens_of(llm, prompts[:2], temperature=0)
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    parts = (core.scheduler, worker, worker.model_runner.sampler)
    found["modules"] = [type(part).__module__ for part in parts]
    return found


def untouched() -> dict[str, bool]:
    """Say what the plug-in leaves of vLLM without `TLT_CONFIG`."""
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.metrics.loggers import StatLoggerManager

    from tlt.vllm import plugin

    plugin.register()
    return {
        "plugin": plugin.active,
        "create_engine_config": hasattr(EngineArgs.create_engine_config, "__wrapped__"),
        "verify": hasattr(SamplingParams.verify, "__wrapped__"),
        "record": hasattr(StatLoggerManager.record, "__wrapped__"),
    }


def to_the_limit(model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Generate up to `max_model_len`, where no draft fits any more, beside shorter samples."""
    from vllm import LLM

    llm = LLM(model, **ENGINE)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    each = [
        params(seed=index, max_tokens=60 if index % 2 else ENGINE["max_model_len"] - len(prompt))
        for index, prompt in enumerate(prompts)
    ]
    outputs = llm.generate(inputs, each, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def policy_comes_later(model: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Start with dummy weights, load the policy, generate, and run a layer of the drafter."""
    import torch
    from safetensors.torch import load_file
    from vllm import LLM

    llm = LLM(model, **ENGINE, load_format="dummy")
    policy = load_file(Path(model) / "model.safetensors")
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(policy.items())})
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    drafter = worker._runner.draft_model
    # vLLM packs weights on CPUs and leaves empty tensors behind, so a layer must run to show them.
    states = torch.eye(drafter.model.fc_input_size)
    with torch.inference_mode():
        fc = drafter.model.fc(states)
    return {"greedy": tokens_of(llm, prompts, temperature=0), "fc": fc.T.tolist()}


def broken_sampler(model: str) -> str:
    """Start an engine whose sampler lets drafts stand; return why it does not start."""
    from vllm import LLM
    from vllm.v1.worker.cpu_worker import CPUWorker

    from broken_verification import break_verification

    load_model = CPUWorker.load_model

    def load_and_break(worker: Any, *args: Any, **kwargs: Any) -> None:
        from tlt.vllm.v1 import sampler  # loads numba, which must come after vLLM's start-up

        break_verification(sampler)
        load_model(worker, *args, **kwargs)

    CPUWorker.load_model = load_and_break
    try:
        LLM(model, **ENGINE)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("the engine started")
