"""What the drafter that a run leaves is worth in a stock vLLM server, on the policy the run leaves.

    python benchmarks/served.py RUN [--rounds 5] [--tokens 3]

Two servers of unmodified vLLM (our plug-in is not even loaded), each on one core, one with
`--speculative-config` and nothing else. Requests are greedy: vLLM's CPU build samples wrongly with
drafts otherwise. Rounds alternate between the servers, 1 and 4 requests at a time. Writes
benchmarks/results/served.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlt.bench.metrics import spread
from tlt.observe.provenance import provenance

RESULT = Path(__file__).parent / "results" / "served.json"
PORTS = {"plain": 8431, "drafted": 8432}


def serve(run: Path, name: str, core: int, tokens: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(run / "policy"), "--served-model-name", "policy"]
    command += ["--port", str(PORTS[name]), "--host", "127.0.0.1", "--max-model-len", "2048"]
    if name == "drafted":
        drafter = {
            "method": "eagle3",
            "model": str(run / "drafter"),
            "num_speculative_tokens": tokens,
        }
        command += ["--speculative-config", json.dumps(drafter)]
    environment = os.environ | {
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def post(name: str, prompt: list[int], max_tokens: int) -> int:
    """Return the number of returned tokens."""
    body = {"model": "policy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORTS[name]}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def wait_for(name: str, server: subprocess.Popen[bytes], limit_s: float = 600) -> None:
    ends_s = time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        assert server.poll() is None, f"the {name} server ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORTS[name]}/health", timeout=5)
        except OSError:
            time.sleep(1)
        else:
            return
    raise TimeoutError(name)


def tokens_per_s(name: str, prompts: list[list[int]], at_once: int) -> float:
    started_s = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        tokens = sum(pool.map(lambda prompt: post(name, prompt, 400), prompts))
    return tokens / (time.monotonic() - started_s)


def main() -> None:
    from tlt.tasks.chat import Chat
    from tlt.tasks.gym import problems

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=3)
    options = parser.parse_args()
    chat = Chat(str(options.run / "policy"))
    prompts = [list(chat.prompt(p.question)) for p in problems("chain_sum", 16, 7, "served")]
    servers = {
        name: serve(options.run, name, core, options.tokens) for core, name in enumerate(PORTS)
    }
    found: list[dict[str, Any]] = []
    try:
        for name, server in servers.items():
            wait_for(name, server)
            tokens_per_s(name, prompts[:2], 1)
        for round_ in range(options.rounds):
            for at_once in (1, 4):
                mine = prompts[round_ % 4 :: 4]
                row = {name: tokens_per_s(name, mine, at_once) for name in PORTS}
                found.append({"round": round_, "at_once": at_once, **row})
                print(found[-1], flush=True)
    finally:
        for server in servers.values():
            server.terminate()
    result: dict[str, Any] = {"rounds": found}
    for at_once in (1, 4):
        ratios = [r["drafted"] / r["plain"] for r in found if r["at_once"] == at_once]
        result[f"speed_up_{at_once}"] = asdict(spread(ratios))
        print(at_once, "at once:", result[f"speed_up_{at_once}"])
    RESULT.write_text(json.dumps({"provenance": provenance()} | result, indent=2) + "\n")


if __name__ == "__main__":
    main()
