"""Policy and drafter weights on their way into the engines of a pool.

Every engine has the current weights: those in the pool load new ones together, and a later engine
loads them before it joins. An engine that fails to load what others load is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tlt.errors import EngineError, EngineGone, LearnerLost, WeightMismatch
from tlt.rollout.client import Engine, EngineClient, EngineProcess

if TYPE_CHECKING:
    import torch

    from tlt.node.weights import SharedWeights

    NewWeights = SharedWeights | Iterable[tuple[str, torch.Tensor]]
    """Named tensors, or a file in this node's shared memory, which the pool then removes."""
    Publish = Callable[[], Coroutine[Any, Any, SharedWeights]]

logger = logging.getLogger(__name__)
Load = Callable[[Engine, dict[str, Any], int], float]
"""`Engine.update_policy` or `Engine.update_drafter`."""


class WeightDistribution:
    """The current weights of a pool, by the command that loads them."""

    def __init__(self, engines: Mapping[str, EngineClient]) -> None:
        self._engines = engines
        """The engines of the pool, as they come and go."""
        self._current: dict[Load, tuple[SharedWeights, int]] = {}
        self._publish: tuple[Publish, int] | None = None
        """Writes the policy of this version, which engines got from GPU to GPU."""
        self._publishing = asyncio.Lock()
        """Engines that wake together share what the learner writes."""
        self._newer = asyncio.Event()
        """Set when the next policy comes."""
        self._without_policy: set[str] = set()
        """Engines that have dropped their policy to sleep, and got no other one since."""
        self.num_tainted = 0
        """Engines that were replaced because they may not have held the learner's policy."""

    def close(self) -> None:
        """Remove the files in shared memory."""
        for weights, _ in self._current.values():
            weights.close()
        self._current.clear()

    # --- into the engines of the pool ---------------------------------------------------------

    async def update_policy(self, weights: NewWeights, version: int) -> list[float]:
        """Load policy weights into all engines; return the seconds of each."""
        self._publish = None
        self._policy_is_newer()
        return await self._update(Engine.update_policy, weights, version)

    async def update_drafter(
        self, weights: NewWeights, version: int, skip: Collection[str]
    ) -> list[float]:
        """Load drafter weights into all other engines; return the seconds of each."""
        return await self._update(Engine.update_drafter, weights, version, skip)

    @contextlib.asynccontextmanager
    async def policy_comes(
        self, version: int, publish: Publish
    ) -> AsyncIterator[Mapping[str, EngineProcess]]:
        """Yield the engines that a learner sends a policy to; replace them if that fails."""
        clients = dict(self._engines)
        self._publish = publish, version
        self._policy_is_newer()
        if (old := self._current.pop(Engine.update_policy, None)) is not None:
            old[0].close()
        try:
            yield {name: client.process for name, client in clients.items()}
        except BaseException as error:
            for client in clients.values():
                client.mark_failed(f"it may hold a part of policy {version} only: {error!r}")
            raise

    def _policy_is_newer(self) -> None:
        self._without_policy.clear()
        self._newer.set()
        self._newer = asyncio.Event()

    async def _update(
        self, load: Load, new: NewWeights, version: int, skip: Collection[str] = ()
    ) -> list[float]:
        from tlt.node.weights import SharedWeights

        old = self._current.get(load)
        weights = (
            new if isinstance(new, SharedWeights) else await asyncio.to_thread(SharedWeights, new)
        )
        # From here on a starting engine loads these weights; the running engines follow.
        self._current[load] = (weights, version)
        try:
            seconds = await self._load(load, weights.manifest(), version, skip)
        except BaseException:
            del self._current[load]
            if old is not None:
                self._current[load] = old
            weights.close()
            raise
        if old is not None:
            old[0].close()
        return seconds

    async def _load(
        self, load: Load, manifest: dict[str, Any], version: int, skip: Collection[str]
    ) -> list[float]:
        """Load weights into all engines. Replace an engine that fails where others succeed."""
        clients = {name: client for name, client in self._engines.items() if name not in skip}
        calls = [client.call(load, manifest, version) for client in clients.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [a for a in answers if isinstance(a, BaseException)]
        # An engine that ends by itself is replaced. The weights may still be right.
        refused = [a for a in errors if not isinstance(a, EngineGone | WeightMismatch)]
        tainted = [a for a in errors if isinstance(a, WeightMismatch)]
        self.num_tainted += len(tainted)
        if load is Engine.update_drafter and tainted and len(tainted) == len(answers):
            raise tainted[0]  # the run continues with the previous drafter
        if refused and len(errors) == len(answers):
            raise refused[0]  # the weights are wrong, not the engines
        for client, answer in zip(clients.values(), answers, strict=True):
            if isinstance(answer, BaseException):
                client.mark_failed(f"it did not take new weights: {answer!r}", held_policy=False)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # --- engines that sleep -------------------------------------------------------------------

    async def sleep(self, client: EngineClient) -> None:
        """Let an engine give its device's memory away.

        Most engines wake for the next policy, so the present one is dropped. Before the first
        weight sync the engine keeps it: it comes from disk, and the pool cannot load it again.
        """
        can_load = self._publish is not None or Engine.update_policy in self._current
        if can_load:
            self._without_policy.add(client.name)
        await client.call(Engine.sleep, keep_policy=not can_load)

    async def wake(self, client: EngineClient) -> None:
        """Let an engine take its device's memory back, with the policy that it dropped."""
        if client.name in self._without_policy:
            await self._publish_policy()
            weights, version = self._current[Engine.update_policy]
            await client.call(Engine.update_policy, weights.manifest(), version)
            self._without_policy.discard(client.name)
        await client.call(Engine.wake)

    async def refresh_drafter(self, client: EngineClient) -> None:
        """Load the current drafter into an engine that `update_drafter` skipped."""
        loaded: dict[Load, tuple[SharedWeights, int]] = {}
        while await self._load_newer(client, loaded, (Engine.update_drafter,)):
            pass

    # --- into a new engine --------------------------------------------------------------------

    async def bring_up_to_date(self, client: EngineClient, limit_s: float) -> None:
        """Load the current weights into a new engine, and newer ones that arrive meanwhile.

        A learner that is lost cannot write the policy, but its successor sends one: the engine
        waits for that, up to `limit_s`.
        """
        loaded: dict[Load, tuple[SharedWeights, int]] = {}
        while True:
            newer_policy = self._newer
            try:
                await self._publish_policy()
            except LearnerLost as error:
                logger.warning("%s waits for the next policy: %s", client.name, error)
                async with asyncio.timeout(limit_s):
                    await newer_policy.wait()
                continue
            if not await self._load_newer(client, loaded, tuple(self._current)):
                return

    async def _load_newer(
        self,
        client: EngineClient,
        loaded: dict[Load, tuple[SharedWeights, int]],
        loads: Collection[Load],
    ) -> bool:
        """Load current weights that an engine has not `loaded`; return whether there were any."""
        current = {load: self._current[load] for load in loads if load in self._current}
        newer = {load: of for load, of in current.items() if loaded.get(load) is not of}
        for load, (weights, version) in newer.items():
            try:
                await client.call(load, weights.manifest(), version)
            except EngineError:
                if self._current.get(load) is newer[load]:
                    raise  # newer weights have not replaced these meanwhile
            loaded[load] = newer[load]
        return bool(newer)

    async def _publish_policy(self) -> None:
        """Let the learner write the policy to shared memory, if it sent it from GPU to GPU."""
        async with self._publishing:
            while self._publish is not None and Engine.update_policy not in self._current:
                publish, version = self._publish
                weights = await publish()
                if self._publish == (publish, version):
                    self._current[Engine.update_policy] = weights, version
                else:
                    weights.close()  # a newer policy has come
