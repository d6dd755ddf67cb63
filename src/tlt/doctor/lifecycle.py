"""Checks of what a run does to an engine: swaps, policy updates, sleep, and recorded states."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlt.contracts import EngineStats
from tlt.doctor.engines import (
    LEAST_ACCEPTED,
    collect,
    engine_config,
    expect_same,
    started,
    tokens_of,
    work,
)
from tlt.doctor.place import Place
from tlt.rollout.offline import ChildEngine

OFF = {"kind": "off"}
EAGLE = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 3}


def _accepted(before: EngineStats, after: EngineStats) -> float:
    counted = EngineStats.difference([before], [after])
    return counted.accepted_tokens / max(1, counted.draft_tokens)


def drafter_swap(place: Place) -> dict[str, Any]:
    """Swap between the trained and a random drafter while samples run."""
    import torch

    from tlt.drafter.checkpoint import drafter_weights, load_drafter
    from tlt.node.weights import SharedWeights

    drafter = load_drafter(place.drafter)
    good = drafter_weights(drafter.state_dict(), drafter.config, torch.float32)
    torch.manual_seed(0)
    bad = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in good.items()}
    requests = work(32, 256) if place.num_gpus else work(16, 96)  # long enough to swap meanwhile
    with (
        SharedWeights(good.items()) as good_file,
        SharedWeights(bad.items()) as bad_file,
        started(engine_config(place)) as engine,
    ):
        engine.call("set_strategy", OFF)
        expected = tokens_of(engine, requests)
        engine.call("set_strategy", EAGLE)
        engine.call("submit", requests)
        seconds, in_mid_sample = [], 0
        for version, file in enumerate([bad_file, good_file, bad_file], start=1):
            in_mid_sample += engine.call("stats").running > 0
            seconds.append(engine.call("update_drafter", file.manifest(), version))
        differing = [
            expect_same(
                place, collect(engine, requests), expected, "drafters swapped in mid-sample"
            )
        ]
        rates = {}
        for version, (name, file) in enumerate(
            [("random", bad_file), ("trained", good_file)], start=4
        ):
            engine.call("update_drafter", file.manifest(), version)
            before = engine.call("stats")
            tokens = tokens_of(engine, requests)
            differing.append(expect_same(place, tokens, expected, f"{name} drafter"))
            rates[name] = _accepted(before, engine.call("stats"))
        engine.call("set_strategy", OFF)
        tokens = tokens_of(engine, requests)
        differing.append(expect_same(place, tokens, expected, "no drafts after the swaps"))
    if not in_mid_sample:
        raise AssertionError("all samples ended before the first swap: nothing was shown")
    if not rates["random"] < LEAST_ACCEPTED < rates["trained"]:
        raise AssertionError(f"accepted shares do not follow the drafter: {rates}")
    return {
        "swap_s": seconds,
        "swaps_in_mid_sample": in_mid_sample,
        "accepted": rates,
        "differing_samples": differing,
    }


def policy_update(place: Place) -> dict[str, Any]:
    """Load other weights into an engine, and compare with an engine that began with them."""
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.node.weights import SharedWeights

    policy = AutoModelForCausalLM.from_pretrained(place.policy, dtype=torch.float32)
    original = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    moved = Path(place.folder) / "policy-moved"
    shutil.copytree(place.policy, moved, dirs_exist_ok=True)  # with its tokenizer
    policy.save_pretrained(moved)
    requests = work(24, 64)
    with started(engine_config(place, model=str(moved), drafter=None, strategy=OFF)) as engine:
        expected = tokens_of(engine, requests)
    seconds, differing = [], []
    with started(engine_config(place)) as engine:
        first = tokens_of(engine, requests)
        for version, (state, wanted) in enumerate(
            [(policy.state_dict(), expected), (original, first)], start=1
        ):
            with SharedWeights(state.items()) as weights:
                seconds.append(engine.call("update_policy", weights.manifest(), version))
            tokens = tokens_of(engine, requests)
            differing.append(expect_same(place, tokens, wanted, f"policy version {version}"))
    if first == expected:
        raise AssertionError("both policies generate the same tokens: nothing was shown")
    return {"update_s": seconds, "differing_samples": differing}


def sleep(place: Place) -> dict[str, Any]:
    """Let an engine sleep and wake: first with its policy kept, then with a weight sync."""
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.node.weights import SharedWeights

    policy = AutoModelForCausalLM.from_pretrained(place.policy, dtype=torch.float32)
    requests = work(24, 64)
    args = {"enable_sleep_mode": True} if place.num_gpus else {}
    notes: dict[str, Any] = {}
    with (
        SharedWeights(policy.state_dict().items()) as weights,
        started(engine_config(place, engine_args=args)) as engine,
    ):
        expected = tokens_of(engine, requests)
        notes["kept"] = _asleep(place, engine, keep_policy=True)
        began_s = time.monotonic()
        engine.call("wake")
        notes["wake_s"] = time.monotonic() - began_s
        tokens = tokens_of(engine, requests)
        kept = expect_same(place, tokens, expected, "after a sleep that kept the policy")
        notes["dropped"] = _asleep(place, engine, keep_policy=False)
        began_s = time.monotonic()
        for method, *arguments in _waking(weights.manifest()):
            engine.call(method, *arguments)
        notes["wake_and_update_s"] = time.monotonic() - began_s
        tokens = tokens_of(engine, requests)
        synced = expect_same(place, tokens, expected, "after a sleep and a weight sync")
    return notes | {"differing_samples": [kept, synced]}


def _asleep(place: Place, engine: ChildEngine, keep_policy: bool) -> dict[str, int]:
    """Let an engine sleep; return the free memory before and after, and check the difference."""
    awake = _free_bytes(place)
    engine.call("sleep", keep_policy)
    asleep = _free_bytes(place)
    if place.num_gpus and asleep - awake < place.room()["kv_cache_memory_bytes"] / 2:
        raise AssertionError(f"an engine that sleeps freed {asleep - awake} bytes")
    return {"awake_free_bytes": awake, "asleep_free_bytes": asleep}


def _waking(manifest: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the calls of a weight sync to a sleeping engine, in their order."""
    update = ("update_policy", manifest, 1)
    return [("wake_weights",), update, ("wake",)]  # the KV cache comes last


def _free_bytes(place: Place) -> int:
    """Return the free memory of the first GPU; 0 without one."""
    if not place.num_gpus:
        return 0
    import torch

    return int(torch.cuda.mem_get_info(0)[0])


def states(place: Place) -> dict[str, Any]:
    """Compare the states that an engine records with those of transformers on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from tlt.drafter.checkpoint import load_drafter
    from tlt.states.buffer import BufferSettings, SampleBuffer
    from tlt.states.captured import capture

    settings = BufferSettings(str(Path(place.folder) / "states"), 2**28, max_sample_tokens=4096)
    requests = work(16, 64, rl_step=1)
    with started(engine_config(place, capture=asdict(settings))) as engine:
        responses = tokens_of(engine, requests)
        buffer = SampleBuffer(settings)
        deadline_s = time.monotonic() + 30  # a thread stores states beside the engine's work
        while len(buffer.entries()) < len(requests) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        kept = [buffer.read(entry.name) for entry in buffer.entries()]
    found = {tuple(one.token_ids_T.tolist()): one for one in kept if one is not None}
    if len(found) < len(requests):
        raise AssertionError(f"{len(found)} of {len(requests)} samples left their states")
    policy = AutoModelForCausalLM.from_pretrained(place.policy, dtype=torch.float32)
    layers = load_drafter(place.drafter).config.aux_layer_ids
    farthest = 0.0
    for request, response in zip(requests, responses, strict=True):
        text = request.prompt_token_ids + response
        own = found[text]
        right = capture(policy, text, len(request.prompt_token_ids), layers)
        for ours, theirs in ((own.aux_TA, right.aux_TA), (own.final_TH, right.final_TH)):
            # No engine step reads the last token of a sample.
            a, b = ours[:-1].float(), theirs[:-1].float()
            farthest = max(farthest, float((a - b).abs().max()))
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    return {"samples": len(found), "largest_difference": farthest}
