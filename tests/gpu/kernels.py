"""Compile the Triton kernels of engines for GPUs, on a machine without one.

    python tests/gpu/kernels.py --record   # run the tests of the V2 runner, and note their launches
    python tests/gpu/kernels.py            # compile what was noted, and write the result

`make check-gpu` does both, the second with the Triton that torch has on GPUs.

TLT has no Triton kernel of its own: its engines launch vLLM's. Which ones, and with which types of
arguments, is noted while Triton's interpreter runs the tests of vLLM's V2 runner, and kept in
`launches.json`. Triton's wheel has NVIDIA's assembler, so each launch compiles to machine code
without a device: as noted, and once more with bfloat16 in the place of float32 for states, logits
and caches. That a kernel compiles does not show that it is right, or fast.

Writes benchmarks/results/kernels.json.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAUNCHES = Path(__file__).with_name("launches.json")
RESULT = ROOT / "benchmarks" / "results" / "kernels.json"
VARIABLE = "TLT_NOTE_LAUNCHES"
"""Names a folder in which interpreted engines note their launches."""
V2_TESTS = [f"tests/integration/test_{name}.py" for name in ("v2", "lossless_v2", "sampler_v2")]
ARCHITECTURES = {"sm_80": "A100", "sm_90": "H100", "sm_100": "B200"}
POINTERS = {
    "bfloat16": "*bf16",
    "bool": "*i1",
    "float16": "*fp16",
    "float32": "*fp32",
    "float64": "*fp64",
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
    "uint64": "*u64",
}
STATES = ("logits", "hidden", "key", "value", "embed", "states", "cache")
"""Parts of the names of arguments that are bfloat16 in engines on GPUs."""
FLOAT32 = ("argmax", "max_ptr")
"""Parts of the names of those that are float32 everywhere."""
OPTIONS = ("num_warps", "num_stages")
ON_GPUS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "_topk_topp_kernel": (
        {"BLOCK_SIZE": 8192, "BLOCK_SIZE_TRUNC": 4096, "VOCAB_SIZE": 151936},
        {"num_warps": 8},
    )
}
"""Constants and options with which vLLM launches a kernel on GPUs only, with a real vocabulary."""

Launch = tuple[str, str, dict[str, list[Any]], dict[str, int]]
"""Module and name of a kernel, the kind of every argument, and options."""


# --- noting launches, in interpreted engines ------------------------------------------------------


def note(folder: Path) -> None:
    """Let Triton's interpreter note every new kind of launch in a file of this process."""
    from triton.runtime.interpreter import InterpretedFunction

    run, seen = InterpretedFunction.run, set[str]()

    def noting(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        parameters = inspect.signature(self.fn).parameters
        values = dict(zip(parameters, args, strict=False))
        values |= {name: value for name, value in kwargs.items() if name in parameters}
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        kinds = {
            name: kind(value, "constexpr" in str(parameters[name].annotation))
            for name, value in values.items()
        }
        line = json.dumps([self.fn.__module__, self.fn.__qualname__, kinds, options])
        if line not in seen:
            seen.add(line)
            with (folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(line + "\n")
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = noting


def kind(value: Any, is_constant: bool) -> list[Any]:
    """Return what a compiled kernel depends on in an argument."""
    if value is None:
        return ["none"]
    if hasattr(value, "data_ptr"):
        return ["tensor", str(value.dtype).removeprefix("torch.")]
    if is_constant or isinstance(value, bool) or value == 1:
        return ["value", value if isinstance(value, bool | int | float | str) else repr(value)]
    if isinstance(value, int):
        return ["int", 64 if abs(value) >= 2**31 else 32]
    return ["float"]


def record() -> None:
    """Run the tests of the V2 runner, and keep the launches that they noted."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *V2_TESTS]
        environment = os.environ | {VARIABLE: folder, "CHECK_ALL": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        lines = {line for file in Path(folder).iterdir() for line in file.read_text().splitlines()}
    LAUNCHES.write_text("[\n" + ",\n".join(sorted(lines)) + "\n]\n")


# --- compiling, under the stand-in for CUDA -------------------------------------------------------


def launches() -> list[Launch]:
    """Return the launches that were noted."""
    found: list[Launch] = json.loads(LAUNCHES.read_text())
    return found


def typed(
    kernel: Any, kinds: Mapping[str, list[Any]], constants: Mapping[str, int], in_bfloat16: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the types of a kernel's arguments, and the values of those that are constant."""
    signature, values = {}, {}
    for parameter in kernel.params:
        name = parameter.name
        what, *of = kinds.get(name, ["value", parameter.default if parameter.has_default else None])
        if what == "tensor":
            is_state = any(part in name.lower() for part in STATES)
            if in_bfloat16 and is_state and not any(part in name for part in FLOAT32):
                of = ["bfloat16" if of[0] == "float32" else of[0]]
            signature[name] = POINTERS[of[0]]
        elif what == "float" and not parameter.is_constexpr:
            signature[name] = "fp32"
        elif what == "int":
            signature[name] = f"i{of[0]}"
        elif what == "value" and isinstance(of[0], bool) and not parameter.is_constexpr:
            signature[name] = "i1"
        else:
            signature[name] = "constexpr"
            values[name] = constants.get(name, of[0] if of else None)
    return signature, values


def loaded(module: str, name: str) -> Any:
    """Return a kernel, without what chooses its settings by timing it."""
    kernel: Any = importlib.import_module(module)
    for part in name.split("."):
        kernel = getattr(kernel, part)
    while not hasattr(kernel, "params"):
        kernel = getattr(kernel, "kernel", None) or kernel.fn
    return kernel


def variants(noted: Iterable[Launch]) -> Iterator[tuple[str, Any, dict[str, str], Any, Any, bool]]:
    """Yield each kernel with all kinds of arguments, each of them once."""
    done = set()
    for module, name, kinds, options in noted:
        kernel = loaded(module, name)
        constants, more = ON_GPUS.get(name, ({}, {}))
        for in_bfloat16 in (False, True):
            signature, values = typed(kernel, kinds, constants, in_bfloat16)
            key = json.dumps([module, name, signature, values, options], default=repr)
            if key not in done:
                done.add(key)
                yield f"{module}.{name}", kernel, signature, values, options | more, in_bfloat16


def compiled(
    noted: Sequence[Launch], architectures: Sequence[str], every: int = 1
) -> dict[str, Any]:
    """Compile these launches, or every so many of each kernel's; return what came of them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    began_s, kernels, faults = time.monotonic(), dict[str, int](), list[str]()
    for name, kernel, signature, values, options, in_bfloat16 in variants(noted):
        kernels[name] = number = kernels.get(name, -1) + 1
        if number % every:
            continue
        constants = {(kernel.arg_names.index(key),): value for key, value in values.items()}
        for architecture in architectures:
            target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
            try:
                source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
                made = triton.compile(source, target=target, options=options)
                assert made.asm["ptx"]
                assert made.asm["cubin"]
            except Exception as error:  # of Triton or of NVIDIA's assembler, as different types
                of = f"{name}, {architecture}, {'bfloat16' if in_bfloat16 else 'float32'}"
                faults.append(f"{of}: {type(error).__name__}: {str(error).splitlines()[-1:]}")
    return {
        "triton": triton.__version__,
        "architectures": list(architectures),
        "kernels": {name: number + 1 for name, number in sorted(kernels.items())},
        "faults": faults,
        "seconds": time.monotonic() - began_s,
    }


def main() -> None:
    from gpu.stand_in import under
    from tlt.observe.provenance import provenance

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="note the launches anew")
    if parser.parse_args().record:
        return record()
    found = under("H100", compiled, launches(), list(ARCHITECTURES))
    RESULT.write_text(json.dumps({"provenance": provenance()} | found, indent=1) + "\n")
    for fault in found["faults"]:
        print(fault)  # noqa: T201
    count = sum(found["kernels"].values())
    print(  # noqa: T201
        f"{len(found['kernels'])} kernels in {count} variants on {len(ARCHITECTURES)} "
        f"architectures, {len(found['faults'])} faults, {found['seconds']:.0f} s"
    )
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]
    main()
