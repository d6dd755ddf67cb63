"""Each fix is needed: without it, the fault shows (the keyed sampler: test_lossless_sampled.py)."""

import subprocess
import sys
from pathlib import Path

import pytest
from workloads import EngineFactory, greedy, load_policy, random_prompts

from speed import limit
from tlt.errors import EngineError
from tlt.hardware import cpu_flags

pytestmark = pytest.mark.vllm


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=dict(os.environ) | environment,
        timeout=limit(300),
        check=False,
    )


KERNELS = {
    # Library, in the order of vLLM's choice: what torch must report, and the instructions needed.
    "_C": ((True, True), "avx512_bf16"),
    "_C_AVX512": ((True, False), "avx512f"),
    "_C_AVX2": ((False, False), "avx2"),
}
PROBE = """
from tlt.vllm.plugin import probe
print("FAULTS", probe()["faults"])
"""
CHOOSE = """
import torch
torch.cpu._is_avx512_supported = lambda: {avx512}
torch.cpu._is_avx512_bf16_supported = lambda: {bf16}
"""
SMALL_ENGINE = """
from tlt.config.rollout import EngineConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.rollout.offline import generate_here

config = EngineConfig(model={model!r}, kv_cache_gib=0.1, core_group="test-kernels",
    strategy={{"kind": "fixed", "drafter": "ngram", "num_draft_tokens": 3}},
    engine_args=dict(enforce_eager=True, dtype="float32", max_model_len=128))
request = SampleRequest("0", {prompt}, SamplingSpec(max_tokens=32, temperature=0, ignore_eos=True))
samples, _, report = generate_here(config, [request])
print("FAULTS", report["faults"])
print("TOKENS", list(samples[0].token_ids))
loaded = [line.split("/")[-1] for line in open("/proc/self/maps") if "/vllm/_C" in line]
print("LIBRARY", loaded[0])
"""


@pytest.mark.gate
@pytest.mark.parametrize("library", KERNELS)
def test_every_kernel_library_that_vllm_does_not_choose_here(tiny: Path, library: str) -> None:
    """vLLM chooses a library by torch's report of the CPU; each runs the probe and an engine.

    All other tests and `tlt doctor` run the library that vLLM chooses on this machine.
    """
    (avx512, bf16), instructions = KERNELS[library]
    usable = [name for name, (_, needed) in KERNELS.items() if needed in cpu_flags()]
    if library not in usable[1:]:
        pytest.skip("vLLM's choice here" if library in usable else f"no {instructions}")
    choose = CHOOSE.format(avx512=avx512, bf16=bf16)
    probed = run(choose + PROBE, VLLM_LOGGING_LEVEL="ERROR")
    assert "FAULTS []" in probed.stdout, probed.stderr[-3000:]
    prompt = tuple(random_prompts(1, seed=2)[0])
    done = run(choose + SMALL_ENGINE.format(model=str(tiny), prompt=prompt))
    assert "FAULTS []" in done.stdout, done.stderr[-3000:]
    assert f"TOKENS {list(greedy(load_policy(tiny), [prompt], 32)[0])}" in done.stdout
    assert f"LIBRARY {library}.abi3.so" in done.stdout


SHORT_PROMPT = """
from tlt.config.rollout import EngineConfig
from tlt.contracts import SampleRequest, SamplingSpec
from tlt.rollout.offline import generate_here
# bfloat16 selects the kernel that uses AMX; four tokens are too few for torch to ask for AMX.
config = EngineConfig(model={model!r}, kv_cache_gib=0.1, core_group="test-amx", engine_args=dict(
    enforce_eager=True, dtype="bfloat16", max_model_len=64))
request = SampleRequest("0", (5, 6, 7, 8), SamplingSpec(max_tokens=4, temperature=0))
print("GENERATED", len(generate_here(config, [request])[0][0].token_ids))
"""


def test_amx_is_needed(tiny: Path) -> None:
    code = SHORT_PROMPT.format(model=str(tiny))
    assert "GENERATED 4" in run(code).stdout
    if "amx_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AMX")
    assert run(code, TLT_COMPAT_SKIP="amx").returncode == -4  # SIGILL


@pytest.mark.gate
def test_an_engine_without_the_plug_in_is_refused(engines: EngineFactory, tiny: Path) -> None:
    engine = engines({"VLLM_PLUGINS": "none"}, begin=False, model=str(tiny))
    with pytest.raises((EngineError, ValueError)):
        engine.start()
