"""`TLT_CONFIG` puts TLT into the engines of programs that know nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import switch_programs as programs
from switch_programs import NGRAMS, run
from workloads import greedy, load_policy, random_prompts, save_fresh_drafter

from speed import limit

pytestmark = pytest.mark.vllm

Tokens = tuple[int, ...]
PROMPTS = random_prompts(6, seed=5)
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Tokens]:
    """Return the greedy responses of transformers."""
    return greedy(load_policy(tiny), PROMPTS, 40)


@pytest.mark.gate
def test_an_offline_program_drafts_and_says_the_same(tiny: Path, expected: list[Tokens]) -> None:
    found = run(programs.offline, str(tiny), PROMPTS, TLT_CONFIG=NGRAMS, **ONE_PROCESS)
    assert found["greedy"] == expected
    assert all(module.startswith("tlt.vllm.") for module in found["modules"])
    assert found["report"]["plugin"]
    assert found["report"]["faults"] == []
    # Its mistakes are explained, and it goes on.
    assert "speculative_config" in found["refused start"]
    assert "min_p" in found["refused request"]
    assert found["after"] == expected[:2]
    metrics = found["metrics"]
    assert metrics.keys() == {"off", "ngram:4"}  # nothing is drafted before the first engine step
    drafted = metrics["ngram:4"]
    assert 0 < drafted["accepted_tokens"] < drafted["draft_tokens"]
    assert sum(arm["output_tokens"] for arm in metrics.values()) == 2 * 6 * 40


@pytest.mark.gate
def test_without_the_variable_vllm_stays_as_it_is() -> None:
    assert run(programs.untouched, TLT_CONFIG="") == {
        "plugin": True,
        "create_engine_config": False,
        "verify": False,
        "record": False,
    }


def test_every_behaviour_in_the_engine_of_a_program(
    tiny: Path, fresh_drafter: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    """Samples, switching, swaps, policies, states and refusals, as with other versions of vLLM."""
    for name, made in {"tiny": tiny, "new": fresh_drafter, "trained": tiny_drafter}.items():
        (tmp_path / name).symlink_to(made)
    program = Path(__file__).with_name("vllm_behaviours.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=limit(600),
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert results, done.stderr[-3000:]
    found = json.loads(results[-1])
    assert {name: said for name, said in found.items() if said != "passed"} == {}
    assert len(found) == 9


def test_samples_up_to_the_length_limit(tiny: Path, fresh_drafter: Path) -> None:
    """Near the limit vLLM turns the drafter off for all requests; their samples stay the same."""
    drafts = f"drafter={fresh_drafter} strategy.kind=random strategy.arms="
    arms = [["off", 0], ["eagle3", 4], ["ngram", 4], ["eagle3", 2]]
    texts = ["strategy.kind=off", drafts + json.dumps(arms, separators=(",", ":"))]
    off, on = (
        run(programs.to_the_limit, str(tiny), PROMPTS, TLT_CONFIG=text, **ONE_PROCESS)
        for text in texts
    )
    assert len(off[0]) + len(PROMPTS[0]) == 256
    assert on == off


def test_a_policy_with_a_tied_head_comes_later_than_its_drafter(tiny: Path, tmp_path: Path) -> None:
    """Under `load_format = "dummy"` the drafter still comes from its folder.

    vLLM's CPU engines pack the head when they start, and `reload_weights` skips a tied one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tlt.drafter.checkpoint import load_drafter

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny, tie_word_embeddings=True)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    folder = tmp_path / "policy"
    policy.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, folder)
    drafter = save_fresh_drafter(policy, tmp_path / "drafter")
    found = run(
        programs.policy_comes_later,
        *(str(folder), PROMPTS[:2]),
        TLT_CONFIG=f"drafter={drafter}",
        **ONE_PROCESS,
    )
    assert found["greedy"] == greedy(policy, PROMPTS[:2], 40)
    assert torch.allclose(torch.tensor(found["fc"]), load_drafter(drafter).fc.weight, atol=1e-5)


def test_an_engine_that_samples_wrongly_does_not_start(tiny: Path) -> None:
    assert "self-test" in run(programs.broken_sampler, str(tiny), TLT_CONFIG=NGRAMS, **ONE_PROCESS)


# --- the OpenAI server ------------------------------------------------------------------------


class Server:
    """vLLM's OpenAI server as its users start it."""

    def __init__(self, model: Path, log: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        arguments = "--enforce-eager --dtype float32 --max-model-len 256 --max-num-seqs 16"
        where = f"--host 127.0.0.1 --port {self.port} --kv-cache-memory-bytes {2**28}"
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--model", str(model), "--served-model-name", "tiny"),
                    *arguments.split(),
                    *where.split(),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(os.environ) | programs.ENVIRONMENT | environment,
            )

    def wait(self) -> None:
        until_s = time.monotonic() + limit(300)
        while time.monotonic() < until_s:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], **settings: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body | settings | {"return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=limit(60)) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def test_a_server_drafts_refuses_and_counts(
    tiny: Path, expected: list[Tokens], tmp_path: Path
) -> None:
    server = Server(tiny, tmp_path / "log", TLT_CONFIG=NGRAMS, VLLM_LOGGING_LEVEL="INFO")
    try:
        server.wait()
        status, answer = server.complete(PROMPTS[0], temperature=0)
        assert status == 200, answer
        assert tuple(answer["choices"][0]["token_ids"]) == expected[0]
        status, answer = server.complete(PROMPTS[0], min_p=0.1)
        assert status == 400
        assert "min_p" in json.dumps(answer)
        assert server.complete(PROMPTS[1], top_p=0.9, seed=3)[0] == 200
        server.complete(PROMPTS[2], temperature=0)  # its text repeats itself
        metrics = server.get("/metrics")
    finally:
        server.close()
    assert sum("TLT is on" in line for line in server.log.read_text().splitlines()) == 1
    found = {
        line.split("{")[0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("vllm:tlt_") and 'arm="ngram:4"' in line and "_created" not in line
    }
    assert found.keys() == {f"vllm:tlt_{name}_total" for name in programs.METRICS}
    assert found["vllm:tlt_accepted_tokens_total"] > 0
