"""Checks of what a run does to an engine: swaps, policy updates, sleep, and recorded states."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, replace
from typing import Any

from tlt.contracts import EngineStats, Text
from tlt.doctor.engines import (
    KV_CACHE_BYTES,
    LEAST_ACCEPTED,
    Place,
    collect,
    engine_config,
    expect_same,
    started,
    tokens_of,
    work,
)
from tlt.rollout.client import Engine

OFF = {"kind": "off"}
EAGLE = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 3}


def _load_policy(place: Place) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place.models["model"], dtype=torch.float32)


def drafter_swap(place: Place) -> dict[str, Any]:
    """A drafter swap in mid-sample changes no token, and the new drafter drafts."""
    import torch

    from tlt.drafter.checkpoint import drafter_weights, load_drafter
    from tlt.node.weights import SharedWeights

    drafter = load_drafter(place.folder / "drafter")
    good = drafter_weights(drafter.state_dict(), drafter.config, torch.float32)
    torch.manual_seed(0)
    bad = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in good.items()}
    requests = work(32, 256) if place.num_gpus else work(16, 96)  # long enough for swaps
    with (
        SharedWeights(good.items()) as trained,
        SharedWeights(bad.items()) as untrained,
        started(engine_config(place)) as engine,
    ):
        engine.call(Engine.set_strategy, OFF)
        expected = tokens_of(engine, requests)
        engine.call(Engine.set_strategy, EAGLE)
        engine.call(Engine.submit, requests)
        seconds, in_mid_sample = [], 0
        for version, weights in enumerate((untrained, trained, untrained), start=1):
            in_mid_sample += engine.call(Engine.stats).running > 0
            seconds.append(engine.call(Engine.update_drafter, weights.manifest(), version))
        tokens = collect(engine, requests)
        differing = [expect_same(place, tokens, expected, "drafters swapped in mid-sample")]
        accepted = {}
        for name, weights in (("random", untrained), ("trained", trained)):
            version += 1
            engine.call(Engine.update_drafter, weights.manifest(), version)
            before = engine.call(Engine.stats)
            tokens = tokens_of(engine, requests)
            differing.append(expect_same(place, tokens, expected, f"the {name} drafter"))
            counted = EngineStats.difference([before], [engine.call(Engine.stats)])
            accepted[name] = counted.accepted_tokens / max(1, counted.draft_tokens)
    if not in_mid_sample:
        raise AssertionError("all samples ended before the first swap: this proves nothing")
    if not accepted["random"] < LEAST_ACCEPTED < accepted["trained"]:
        raise AssertionError(f"accepted shares do not follow the drafter: {accepted}")
    notes = {"swap_s": seconds, "swaps_in_mid_sample": in_mid_sample}
    return notes | {"accepted": accepted, "differing_samples": differing}


def policy_update(place: Place) -> dict[str, Any]:
    """After a policy update, an engine generates what the new policy generates."""
    import torch

    from tlt.node.weights import SharedWeights

    policy = _load_policy(place)
    original = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    moved = place.folder / "policy-moved"
    shutil.copytree(place.models["model"], moved, dirs_exist_ok=True)  # with its tokenizer
    policy.save_pretrained(moved)
    requests = work(24, 64)
    with started(engine_config(place, model=str(moved), drafter=None, strategy=OFF)) as engine:
        expected = tokens_of(engine, requests)
    seconds, differing = [], []
    with started(engine_config(place)) as engine:
        first = tokens_of(engine, requests)
        updates = ((policy.state_dict(), expected), (original, first))
        for version, (state, wanted) in enumerate(updates, start=1):
            with SharedWeights(state.items()) as weights:
                seconds.append(engine.call(Engine.update_policy, weights.manifest(), version))
            tokens = tokens_of(engine, requests)
            differing.append(expect_same(place, tokens, wanted, f"policy version {version}"))
    if first == expected:
        raise AssertionError("both policies generate the same tokens: this proves nothing")
    return {"update_s": seconds, "differing_samples": differing}


def continued(place: Place) -> dict[str, Any]:
    """Samples that another engine began continue with the same tokens."""
    requests = work(24, 64)
    with started(engine_config(place)) as engine:
        expected = tokens_of(engine, requests)
        begun = []
        for number, (request, tokens) in enumerate(zip(requests, expected, strict=True)):
            size = 1 + 7 * number % 63
            text = Text(tokens[:size], (0.0,) * size, policy_version=0)
            begun.append(replace(request, begun=text))
        tokens_again = tokens_of(engine, begun)
    return {"differing": expect_same(place, tokens_again, expected, "continued by another engine")}


def sleep(place: Place) -> dict[str, Any]:
    """An engine sleeps, gives its memory back, wakes, and generates the same tokens."""
    from tlt.node.weights import SharedWeights

    requests = work(24, 64)
    args = {"enable_sleep_mode": True} if place.num_gpus else {}
    notes = {}
    with (
        SharedWeights(_load_policy(place).state_dict().items()) as weights,
        started(engine_config(place, engine_args=args)) as engine,
    ):
        expected = tokens_of(engine, requests)
        for policy in ("kept", "synced"):
            free = _free_bytes(place)
            engine.call(Engine.sleep, policy == "kept")
            freed = _free_bytes(place) - free
            if place.num_gpus and freed < KV_CACHE_BYTES / 2:
                raise AssertionError(f"an engine that sleeps freed {freed} bytes")
            began_s = time.monotonic()
            if policy == "synced":
                engine.call(Engine.wake_weights)
                engine.call(Engine.update_policy, weights.manifest(), 1)
            engine.call(Engine.wake)  # allocates the KV cache again, the last step
            seconds = time.monotonic() - began_s
            tokens = tokens_of(engine, requests)
            differing = expect_same(place, tokens, expected, f"after a sleep, policy {policy}")
            notes[policy] = {"freed_bytes": freed, "wake_s": seconds, "differing": differing}
    return notes


def _free_bytes(place: Place) -> int:
    """Return the free memory of the first GPU; 0 without one."""
    import torch

    return int(torch.cuda.mem_get_info(0)[0]) if place.num_gpus else 0


def states(place: Place) -> dict[str, Any]:
    """The hidden states that an engine records are the policy's."""
    import torch

    from tlt.drafter.checkpoint import load_drafter
    from tlt.states.buffer import BufferSettings, SampleBuffer
    from tlt.states.captured import capture

    settings = BufferSettings(str(place.folder / "states"), 2**28, max_sample_tokens=4096)
    requests = work(16, 64, rl_step=1)
    with started(engine_config(place, capture=asdict(settings))) as engine:
        responses = tokens_of(engine, requests)
        buffer = SampleBuffer(settings)
        deadline_s = time.monotonic() + 30  # a thread stores states while the engine works
        while len(buffer.entries()) < len(requests) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        kept = [buffer.read(entry.name) for entry in buffer.entries()]
    found = {tuple(one.token_ids_T.tolist()): one for one in kept if one is not None}
    if len(found) < len(requests):
        raise AssertionError(f"{len(found)} of {len(requests)} samples left their states")
    policy = _load_policy(place)
    layers = load_drafter(place.folder / "drafter").config.aux_layer_ids
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
