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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import switch_programs as programs
from switch_programs import NGRAMS, run
from workloads import greedy, random_prompts

from speed import limit

pytestmark = pytest.mark.vllm

PROMPTS = random_prompts(6, seed=5)
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
TWO_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[tuple[int, ...]]:
    """Return the greedy responses of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return greedy(policy, PROMPTS, 40)


@pytest.fixture(scope="module")
def offline(tiny: Path) -> dict[str, Any]:
    return run(programs.offline, str(tiny), PROMPTS, TLT_CONFIG=NGRAMS, **ONE_PROCESS)


# --- vllm.LLM ---------------------------------------------------------------------------------


@pytest.mark.gate
def test_an_offline_program_drafts_and_says_the_same(
    offline: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    assert offline["greedy"] == expected
    assert offline["after"] == expected[:2]
    for part in ("scheduler", "worker", "sampler"):
        assert offline[part].startswith("tlt.vllm."), part
    assert offline["report"]["plugin"]
    assert offline["report"]["faults"] == []


@pytest.mark.gate
def test_its_mistakes_are_explained(offline: dict[str, Any]) -> None:
    assert "leave speculative_config out" in offline["refused start"]
    assert "min_p = 0.1 is refused while TLT drafts" in offline["refused request"]


@pytest.mark.gate
def test_its_metrics_hold_the_arms(offline: dict[str, Any]) -> None:
    found = offline["metrics"]
    assert found.keys() == {"off", "ngram:4"}  # nothing is drafted before the first engine step
    drafted = found["ngram:4"]
    assert 0 < drafted["accepted_tokens"] < drafted["draft_tokens"]
    assert sum(arm["output_tokens"] for arm in found.values()) == 2 * 6 * 40


@pytest.mark.gate
def test_without_the_variable_vllm_stays_as_it_is() -> None:
    assert run(programs.untouched, TLT_CONFIG="") == {
        "plugin": True,
        "create_engine_config": False,
        "verify": False,
        "record": False,
    }


def test_without_the_variable_engines_are_vllms_own(
    tiny: Path, expected: list[tuple[int, ...]]
) -> None:
    found = run(programs.offline, str(tiny), PROMPTS, **ONE_PROCESS)
    assert found["greedy"] == expected
    assert found["metrics"] == {}
    assert found["min_p"] == 40
    for part in ("scheduler", "worker", "sampler"):
        assert found[part].startswith("vllm."), part


def test_an_engine_in_a_process_of_its_own(tiny: Path, offline: dict[str, Any]) -> None:
    found = run(programs.offline, str(tiny), PROMPTS, TLT_CONFIG=NGRAMS, **TWO_PROCESSES)
    assert "scheduler" not in found
    assert found["report"]["keyed"]
    for key in ("greedy", "sampled", "refused request"):
        assert found[key] == offline[key], key
    assert sum(arm["output_tokens"] for arm in found["metrics"].values()) == 2 * 6 * 40
    assert found["metrics"]["ngram:4"]["accepted_tokens"] > 0


def test_samples_are_the_same_without_drafts(tiny: Path, offline: dict[str, Any]) -> None:
    off = run(programs.offline, str(tiny), PROMPTS, TLT_CONFIG="strategy.kind=off", **ONE_PROCESS)
    assert off["sampled"] == offline["sampled"]
    assert off["metrics"].keys() == {"off"}


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


def test_a_drafter_is_swapped_and_the_policy_stays(
    tiny: Path, fresh_drafter: Path, tiny_drafter: Path, expected: list[tuple[int, ...]]
) -> None:
    config = f"drafter={fresh_drafter} strategy.kind=fixed strategy.drafter=eagle3"
    found = run(
        programs.swaps,
        *(str(tiny), str(tiny_drafter), PROMPTS),
        TLT_CONFIG=f"{config} strategy.num_draft_tokens=4",
        **ONE_PROCESS,
    )
    assert found["report"]["proposer"] == "SwitchingProposer"
    assert found["before"] == found["swapped"] == expected
    before, after = found["accepted"]
    assert after > before
    assert "model.nothing.weight" in found["refused"]
    assert found["new policy"] != expected
    assert found["swapped again"] == found["new policy"]
    assert found["report again"]["policy_faults"] == []
    assert found["report again"]["drafter_faults"] == []


def test_an_engine_stores_the_states_of_its_samples_by_itself(
    tiny: Path, fresh_drafter: Path, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    found = run(
        programs.records,
        *(str(tiny), str(fresh_drafter), PROMPTS, str(tmp_path / "states")),
        TLT_CONFIG=f"drafter={fresh_drafter}",
        **ONE_PROCESS,
    )
    assert found["first"] == expected
    whole = [(*prompt, *tokens) for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    assert sorted(found["stored"]) == sorted(
        [*((0, text) for text in whole), *((1, text) for text in whole[:2])]
    )
    assert found["swaps"] == 1, "the strategy hears of a new drafter"


def test_a_drafter_is_loaded_where_the_policy_comes_later(
    tiny: Path, fresh_drafter: Path, expected: list[tuple[int, ...]]
) -> None:
    """Under `load_format = "dummy"` the drafter still comes from its folder."""
    import torch

    from tlt.drafter.checkpoint import load_drafter

    config = f"drafter={fresh_drafter}"
    found = run(programs.policy_comes_later, str(tiny), PROMPTS, TLT_CONFIG=config, **ONE_PROCESS)
    assert found["greedy"] == expected
    there = load_drafter(fresh_drafter).fc.weight
    assert torch.allclose(torch.tensor(found["fc"]), there, atol=1e-5)


def test_a_tied_head_follows_a_policy_that_comes_later(tiny: Path, tmp_path: Path) -> None:
    """vLLM's CPU engines pack the head when they start, and `reload_weights` skips a tied one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny, tie_word_embeddings=True)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    policy.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, tmp_path)
    program = programs.policy_with_a_tied_head
    found = run(program, str(tmp_path), PROMPTS[:2], TLT_CONFIG=NGRAMS, **ONE_PROCESS)
    assert found == greedy(policy, PROMPTS[:2], 40)


def test_an_engine_that_samples_wrongly_does_not_start(tiny: Path) -> None:
    said = run(programs.broken_sampler, str(tiny), TLT_CONFIG=NGRAMS, **ONE_PROCESS)
    assert "failed TLT's self-test" in said


# --- AsyncLLM ---------------------------------------------------------------------------------


def test_an_asynchronous_program(
    tiny: Path, offline: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    found = run(programs.online, str(tiny), PROMPTS[:3], TLT_CONFIG=NGRAMS)
    assert found["greedy"] == [expected[0]]
    assert "repetition_penalty = 1.2 is refused" in found["refused"]
    assert found["metrics"] == set(programs.METRICS)
    # vLLM gives the second sample of a request the next seed.
    assert [first for first, _ in found["samples"]] == offline["sampled"][:3]
    assert all(first != second for first, second in found["samples"])


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

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=limit(60)) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, prompt: list[int], **settings: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        return self.post("/v1/completions", **(body | settings), return_token_ids=True)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    started = Server(tiny, log, TLT_CONFIG=NGRAMS, VLLM_LOGGING_LEVEL="INFO")
    try:
        started.wait()
        yield started
    finally:
        started.close()


def test_a_server_drafts_and_says_so(server: Server, expected: list[tuple[int, ...]]) -> None:
    status, answer = server.complete(PROMPTS[0], temperature=0)
    assert status == 200, answer
    assert tuple(answer["choices"][0]["token_ids"]) == expected[0]
    lines = [line for line in server.log.read_text().splitlines() if "TLT is on" in line]
    assert len(lines) == 1
    assert "ngram:4" in lines[0]


def test_a_server_refuses_a_request_and_goes_on(server: Server) -> None:
    status, answer = server.complete(PROMPTS[0], min_p=0.1)
    assert status == 400
    assert "min_p = 0.1 is refused while TLT drafts" in json.dumps(answer)
    assert server.complete(PROMPTS[1], top_p=0.9, seed=3)[0] == 200


def test_a_servers_metrics_hold_the_arms(server: Server) -> None:
    server.complete(PROMPTS[2], temperature=0)
    found = {
        line.split("{")[0]: float(line.split()[-1])
        for line in server.get("/metrics").splitlines()
        if line.startswith("vllm:tlt_") and 'arm="ngram:4"' in line and "_created" not in line
    }
    assert found.keys() == {f"vllm:tlt_{name}_total" for name in programs.METRICS}
    assert found["vllm:tlt_accepted_tokens_total"] > 0


def test_a_server_with_a_mistake_in_its_settings_does_not_start(tiny: Path, tmp_path: Path) -> None:
    started = Server(tiny, tmp_path / "log", TLT_CONFIG="draftr=models/d")
    try:
        assert started.process.wait(limit(120)) != 0
    finally:
        started.close()
    assert "draftr is not a setting; did you mean drafter?" in started.log.read_text()
