"""Stock vLLM loads an exported drafter, without any code of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workloads import greedy, load_policy, random_prompts

from speed import limit
from tlt.errors import ConfigError

pytestmark = pytest.mark.vllm

MAX_TOKENS = 32

STOCK = """
import json, sys
from vllm import LLM, SamplingParams
model, drafter, prompts, max_tokens, out = sys.argv[1:]
speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 4}
llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, disable_log_stats=False,
          kv_cache_memory_bytes=2**28, speculative_config=speculative if drafter else None)
outputs = llm.generate([{"prompt_token_ids": p} for p in json.loads(prompts)],
                       SamplingParams(temperature=0, max_tokens=int(max_tokens), ignore_eos=True))
values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
json.dump({"tokens": [o.outputs[0].token_ids for o in outputs],
           "modules": [name for name in sys.modules if name.split(".")[0] == "tlt"],
           "drafted": values["vllm:spec_decode_num_draft_tokens"],
           "accepted": values["vllm:spec_decode_num_accepted_tokens"]}, open(out, "w"))
"""


@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_stock_vllm_loads_it_with_nothing_but_its_name(
    form: str, tiny: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    done = subprocess.run(
        [sys.executable, "-m", "tlt", "drafter", "export", str(tiny_drafter), "--model", str(tiny),
         "--out", str(folder), "--format", form, "--card"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    prompts = random_prompts(8, seed=3)
    out = tmp_path / "out.json"
    environment = os.environ | {
        "VLLM_PLUGINS": "",  # our entry point is not loaded either
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-c", STOCK),
            *((str(tiny), str(folder)) if form == "eagle3" else (str(folder), "")),
            *(json.dumps(prompts), str(MAX_TOKENS), str(out)),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=limit(300),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["modules"] == []
    assert result["accepted"] / result["drafted"] > 0.2
    expected = greedy(load_policy(tiny), prompts, MAX_TOKENS)
    assert [tuple(tokens) for tokens in result["tokens"]] == expected


def test_a_drafter_of_another_model_is_refused(
    tiny_drafter: Path, smollm2: Path, tmp_path: Path
) -> None:
    from tlt.drafter.export import ExportPlan, export

    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="hidden_size"):
        export(ExportPlan(source=tiny_drafter, target=smollm2, out=out))
    assert not out.exists()
