"""The policy goes from learner to engines by vLLM's `ipc` and `nccl` transfers.

Real engines on a CPU, both halves of vLLM's transfer, and its state machine of sleep; only NCCL's
broadcast and CUDA's shared memory are stand-ins (`device_stand_in`). What a CPU cannot show: that
sleep frees memory, and that level 2 keeps the drafter.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import device_stand_in
import pytest
from engine_process import EngineProcess
from workloads import (
    EngineFactory,
    change,
    drafter_tensors,
    greedy,
    load_policy,
    random_prompts,
)

from tlt.contracts import SamplingSpec
from tlt.errors import WeightMismatch
from tlt.node.weights import SharedWeights

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def no_files_left() -> Iterator[None]:
    yield
    for path in Path("/dev/shm").glob("tlt-test-ipc-*"):
        path.unlink()


Shapes = list[tuple[str, list[int]]]
GREEDY = SamplingSpec(max_tokens=16, temperature=0, ignore_eos=True)
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


class ProcessLinks:
    """Calls of several engines at once, as `PolicyRoute` makes them through Ray."""

    def __init__(self, engines: Sequence[EngineProcess]) -> None:
        self._engines = engines
        self.num_workers = (1,) * len(engines)
        self.calls: list[str] = []

    def connect(self, init_infos: Sequence[dict[str, Any]]) -> None:
        self._all("connect_policy", [(info,) for info in init_infos])

    def start(self, shapes: Shapes) -> None:
        self._all("start_policy", [(shapes,)] * len(self._engines))

    def receive(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._all("receive_policy", [(update_info,)] * len(self._engines))

    def finish(self, version: int, seed: int, fingerprints: dict[str, Any]) -> None:
        self._all("finish_policy", [(version, seed, fingerprints)] * len(self._engines))

    def _all(self, method: str, args: Sequence[tuple[Any, ...]]) -> None:
        self.calls.append(method)
        with ThreadPoolExecutor(len(self._engines)) as threads:
            calls = [
                threads.submit(engine.call, method, *own)
                for engine, own in zip(self._engines, args, strict=True)
            ]
        for call in calls:
            call.result()


class Policy:
    """A policy of the learner, and the weights as it yields them."""

    def __init__(self, folder: Path) -> None:
        self.model = load_policy(folder)
        self.shapes = [(name, list(p.shape)) for name, p in self.model.named_parameters()]
        self.is_restless = False

    def weights(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach().clone()
            yield name, tensor
            if self.is_restless:
                tensor.mul_(1.5)  # changed while it is being sent


def sleep(engine: Any) -> tuple[bool, bool]:
    """Sleep without the policy; return whether vLLM sleeps, and whether waking is refused."""
    engine.between_steps(lambda: engine.core.sleep(keep_policy=False))
    try:
        engine.core.wake()
    except WeightMismatch:
        return engine.core.llm.is_sleeping(), True
    return engine.core.llm.is_sleeping(), False


def wake(engine: Any) -> tuple[bool, bool]:
    """Wake completely; return whether vLLM sleeps before and after."""
    before = engine.core.llm.is_sleeping()
    engine.between_steps(engine.core.wake)
    return before, engine.core.llm.is_sleeping()


@pytest.mark.parametrize(("backend", "num_engines"), [("nccl", 2), ("ipc", 1)])
def test_a_policy_that_is_sent_is_the_engines_policy(
    backend: str,
    num_engines: int,
    engines: EngineFactory,
    tiny: Path,
    fresh_drafter: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sleep, wake the weights, send, wake the KV cache; swap a drafter; send again."""
    drafting = {"kind": "fixed", "drafter": "eagle3", "num_draft_tokens": 3}
    own = {"model": str(tiny), "weights": backend}
    running = [engines(drafter=str(fresh_drafter), strategy=drafting, **own)]
    running += [engines(**own) for _ in range(num_engines - 1)]
    for engine in running:
        engine.call(device_stand_in.install)
    policy, prompts = Policy(tiny), random_prompts(4, seed=5)
    links = ProcessLinks(running)
    device_stand_in.install(put=monkeypatch.setattr)
    from tlt.vllm.send import PolicySender

    sender = PolicySender(
        backend, 0, "127.0.0.1", links, policy.shapes, torch.float32, policy.weights
    )
    for version in (7, 8):
        change(policy.model, seed=version)
        for engine in running:
            assert engine.call(sleep) == (True, True)
            engine.call("wake_weights")  # a CPU engine has nothing to do; the update wakes them
        kept = dict(sender.send(version, ENDS))
        for engine in running:
            assert engine.call(wake) == (True, False)  # the KV cache slept until now
            samples = engine.generate(prompts, GREEDY)
            assert [s.token_ids for s in samples] == greedy(policy.model, prompts, 16)
            assert {s.policy_version for s in samples} == {version}
            assert engine.stats().policy_mismatches == 0
        assert torch.equal(kept[ENDS[1]], policy.model.lm_head.weight)
        swap(running[0], fresh_drafter, version)
    chunks = ["receive_policy"] * (links.calls.count("receive_policy") // 2)
    assert links.calls[0] == "connect_policy"
    assert links.calls[1:] == ["start_policy", *chunks, "finish_policy"] * 2

    if backend == "nccl":  # CUDA IPC copies a tensor before the next one comes
        policy.is_restless = True
        with pytest.raises(WeightMismatch):
            sender.send(9, ENDS)
    sender.close()
    for engine in running:
        engine.close()


def swap(engine: EngineProcess, drafter: Path, version: int) -> None:
    """A drafter comes through shared memory, whatever way the policy comes."""
    with SharedWeights(drafter_tensors(drafter).items()) as weights:
        engine.call("update_drafter", weights.manifest(), version)
    assert engine.stats().drafter_version == version


def test_shapes_that_do_not_fit_change_nothing(engines: EngineFactory, tiny: Path) -> None:
    engine = engines(model=str(tiny), weights="ipc")
    engine.call(device_stand_in.install)
    policy, prompts = Policy(tiny), random_prompts(2, seed=6)
    before = [s.token_ids for s in engine.generate(prompts, GREEDY)]
    shapes = policy.shapes
    with pytest.raises(ValueError):
        engine.call("start_policy", shapes[:1] + shapes[2:])
    assert [s.token_ids for s in engine.generate(prompts, GREEDY)] == before
    engine.call("start_policy", shapes)
    with pytest.raises(WeightMismatch):
        engine.call("receive_policy", {"names": ["x"]})
    engine.close()


class Heard:
    """Links to engines of one, two and one workers that only listen."""

    num_workers = (1, 2, 1)

    def __init__(self) -> None:
        self.infos: list[dict[str, Any]] = []

    def connect(self, init_infos: Sequence[dict[str, Any]]) -> None:
        self.infos += init_infos

    def start(self, shapes: Shapes) -> None: ...
    def receive(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...
    def finish(self, version: int, seed: int, fingerprints: dict[str, Any]) -> None: ...


def test_every_worker_of_every_engine_has_a_rank_of_its_own() -> None:
    """vLLM's code alone would give workers of two engines the same rank."""
    from tlt.vllm.send import PolicySource, TransferClient

    heard = Heard()
    source = PolicySource([], torch.float32, lambda: iter(()), is_sender=True)
    TransferClient(heard, source).init_weight_transfer_engine({"rank_offset": 1, "port": 5})
    assert heard.infos == [{"rank_offset": rank, "port": 5} for rank in (1, 2, 4)]


def test_a_large_tensor_fits_the_ipc_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of Qwen2.5-7B in bfloat16 is larger than vLLM's default chunk."""
    device_stand_in.install(put=monkeypatch.setattr)
    from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

    from tlt.vllm.send import PolicySender

    embedding = [152064, 3584]
    assert embedding[0] * embedding[1] * 2 > DEFAULT_PACKED_BUFFER_SIZE_BYTES
    shapes = [("model.embed_tokens.weight", embedding)]
    sender = PolicySender("ipc", 0, "", Heard(), shapes, torch.bfloat16, lambda: iter(()))
    assert sender._engine.packed_buffer_size_bytes >= embedding[0] * embedding[1] * 2
