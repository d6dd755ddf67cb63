"""Rounds of training, and the lineage of the drafter's weights. Pure: the caller passes the time.

In a round all trainers that hold a lease start from the same weights and train for a few seconds.
Then one of them, the leader, averages the results, evaluates the average on held-out samples, and
publishes it if it is better than the published drafter. A trainer that is late, dead or called back
in the middle is left out. A worker leased alone is a round of one.

    begun -> Train -> trained; when all have trained, the leader: Settle -> settled [-> Publish];
    then the next round, or Release when the lease is over.

Every set of weights has a version. The newest version is the `head`: it stays with the trainer that
learned it, published or not. A trainer that continues from the head gets its weights from that
trainer, or the newest weights that are known here. A trainer is never sent a version that it has.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from tlt.harvest.contract import Evaluation, Trained, TrainerHandle, Version, Weights
from tlt.harvest.leases import Leases

REST_S = 5.0
"""Seconds without a lease for a trainer that failed, or has nothing to learn from."""
GRACE_S = 1.0
"""Seconds that a round waits after its end for members that have not answered."""
MAX_BROKEN_OFF = 2
"""Evaluations broken off in a row until more training comes first: leases may be too short."""
EVALUATED_SHARE = 0.15
"""Seconds of evaluating and merging per second of training, over many rounds."""


@dataclass(slots=True)
class Tally:
    """Totals of harvest since the coordinator started."""

    trained_tokens: int = 0
    trained_steps: int = 0
    used_s: float = 0.0
    """Worker seconds of training, evaluating and merging."""
    evaluated_s: float = 0.0
    """Worker seconds of evaluating and merging."""
    loss: float = 0.0
    length: float = 0.0
    published: int = 0
    refused: int = 0
    """Results that were no better than the published drafter."""
    merges: int = 0
    faults: int = 0
    trainer_restarts: int = 0
    late_s: float = 0.0
    """Seconds by which training took longer than its emulated time."""
    stop_max_s: float = 0.0
    """Longest time between calling a lease back and the device being free."""


@dataclass(eq=False, slots=True)
class Member:
    """A trainer's process beside a worker, and the versions of weights that it has.

    A failed call costs the process, so weights that were sent count as received.
    """

    worker: str
    trainer: TrainerHandle
    """Opaque here; the coordinator calls it."""
    base: int | None = 0
    """Version of the drafter; None once the trainer has trained it further."""
    published: int = 0
    policy: int = 0


@dataclass(eq=False, slots=True)
class Held:
    """A lease that a trainer works under."""

    lease: int
    member: Member
    round: _Round | None = None


@dataclass(frozen=True, slots=True)
class Train:
    """Send the trainer these weights and let it train; answer with `trained`.

    The base comes from `source` if that trainer answers in time (`head_arrived`); else it is
    `base`. None stands for the trainer's own weights.
    """

    held: Held
    base: Weights | None
    published: Weights | None
    policy: Weights | None
    until_s: float
    source: Member | None
    source_version: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Average the weights of others into the leader's, compare them with the published drafter,
    and export them, each if the step before worked; answer with `settled`."""

    held: Held
    others: list[tuple[Held, float]]
    """Other trainers, and what their weights count."""
    own_weight: float
    published: Weights | None
    """The published drafter; None if the leader has it."""
    seconds: float
    """Time to merge and evaluate in."""


@dataclass(frozen=True, slots=True)
class Release:
    """Let the trainer leave the device, and end the lease; the worker rests for `rest_s`."""

    held: Held
    rest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Publish:
    """Hand a better drafter to the engines."""

    version: Version


RoundAction = Train | Settle | Release | Publish


class _Round:
    def __init__(self, started_s: float, ends_s: float) -> None:
        self.started_s = started_s
        self.ends_s = ends_s
        self.training: set[Held] = set()
        self.results: dict[Held, Trained] = {}
        """Results of trainers that are done or were called back."""
        self.waiting: dict[Held, None] = {}
        """Leases whose trainers wait for the end of the round, in order."""
        self.leader: Held | None = None
        """The lease of the trainer that makes one drafter of the results."""
        self.closed = False


class Rounds:
    """Feed it events, then carry out `actions()`; call `tick` when `next_s()` has come."""

    def __init__(
        self, session_s: float, publish: bool, leases: Leases, first_version: int = 0
    ) -> None:
        self._session_s = session_s
        self._publish = publish
        self._leases = leases
        self._actions: list[RoundAction] = []
        self._round: _Round | None = None
        """The round that trainers can join."""
        self._unevaluated_s = 0.0
        """Seconds trained since the last evaluation, carried over from short leases."""
        self._num_broken_off = 0
        self._evaluation_left_s = 0.0
        """Seconds of evaluating that the training so far has earned, minus those spent."""
        self._versions = itertools.count(1)
        self.head: Member | None = None
        """The trainer that has the newest weights; None if nothing was learned yet."""
        self._head_version = 0
        self._known = Weights(0)
        """The newest weights of a head that are known here."""
        self._policy = Weights(0)
        self._published_number, self._published = first_version, Weights(0)
        self._arrived = Weights(0)
        """The last published drafter whose weights reached the run."""
        self.tally = Tally()

    def actions(self) -> list[RoundAction]:
        """Return what to do now. Call it after every event, and carry out every action."""
        actions, self._actions = self._actions, []
        return actions

    # --- what the run says --------------------------------------------------------------------

    def follow(self, policy: Weights) -> None:
        """Set the policy that samples come from."""
        self._policy = policy

    def arrived(self, version: Version, blob: Any) -> None:
        """Note that the run has the weights of a published drafter; `blob` is where."""
        self._arrived = Weights(version.weights.version, blob)

    def lost(self, version: Version) -> None:
        """Continue from the last drafter that arrived: the weights of this one are lost."""
        self.tally.faults += 1
        if self._published.version == version.weights.version:
            self._published = self._known = self._arrived
            self.head = None

    # --- reports of trainers ------------------------------------------------------------------

    def replaced(self, member: Member) -> None:
        """Note that a trainer is gone, and with it the head that only it had."""
        if self.head is member:
            self.head = None  # its weights may still be known
        if (current := self._round) is not None:
            for held in [held for held in current.results if held.member is member]:
                del current.results[held]

    def begun(self, held: Held, now_s: float) -> None:
        """Let a trainer that has taken up a lease join the round."""
        if not self._holds(held):
            self._actions.append(Release(held))
            return
        if self._round is None:
            left_s = max(0.0, self._session_s - self._unevaluated_s)
            self._round = _Round(now_s, now_s + left_s)
        held.round = self._round
        held.round.training.add(held)
        self._train(held)

    def head_arrived(self, version: int, blob: Any) -> Weights:
        """Note the weights of a head, and return them."""
        weights = Weights(version, blob)
        if self.head is not None and self._head_version == version:
            self._known = weights
        return weights

    def trained(self, held: Held, trained: Trained, seconds: float, now_s: float) -> None:
        """Note a result, after `seconds` of training."""
        current = held.round
        assert current is not None
        self._count(trained, seconds)
        current.training.discard(held)
        if trained.num_steps or self._unevaluated_s:
            current.results[held] = trained
        if trained.starved or not self._holds(held):
            self._actions.append(Release(held, REST_S if trained.starved else 0.0))
            held.round = None
        else:
            current.waiting[held] = None
        self._check(current, now_s)

    def settled(
        self,
        held: Held,
        merged: bool,
        evaluation: Evaluation | None,
        blob: Any,
        spent_s: float,
        now_s: float,
    ) -> None:
        """Note the leader's average of the results, and publish it if it is better.

        No evaluation: it was broken off, or nothing is held out. No blob: it did not come in time.
        """
        assert held.round is not None
        self.tally.merges += merged
        self._evaluation_left_s -= spent_s
        self.tally.evaluated_s += spent_s
        self.tally.used_s += spent_s
        self._set_head(held.member)
        self._num_broken_off = self._num_broken_off + 1 if evaluation is None else 0
        if evaluation is not None or self._num_broken_off >= MAX_BROKEN_OFF:
            self._unevaluated_s, self._num_broken_off = 0.0, 0
        if evaluation is not None:
            self.tally.length = evaluation.length
            if blob is not None:
                self._keep(held, evaluation, blob, now_s)
        self._close(held.round, now_s)

    def _keep(self, held: Held, evaluation: Evaluation, blob: Any, now_s: float) -> None:
        """Remember the weights of a new head, and publish them if they are better."""
        weights = self.head_arrived(self._head_version, blob)
        if not evaluation.better:
            self.tally.refused += 1
        # Since the evaluation began, the lease may have been called back or have run out, and
        # another drafter may have been published.
        elif (
            self._publish
            and held.member.published == self._published.version
            and self._leases.may_publish(held.member.worker, held.lease, now_s)
        ):
            self._published_number, self._published = self._published_number + 1, weights
            self.tally.published += 1
            version = Version(self._published_number, weights, evaluation.length)
            self._actions.append(Publish(version))

    def called_back(self, held: Held) -> None:
        """Let a trainer go that only waits; a trainer at work notices, and answers."""
        current = held.round
        if current is not None and held in current.waiting and current.leader is not held:
            del current.waiting[held]
            held.round = None
            self._actions.append(Release(held))

    def failed(self, held: Held, now_s: float) -> None:
        """Note that the trainer is dead, and its lease over."""
        self.tally.faults += 1
        current, held.round = held.round, None
        if current is None or current.closed:
            return
        current.training.discard(held)
        current.waiting.pop(held, None)
        if current.leader is held:
            self._close(current, now_s)
        else:
            self._check(current, now_s)

    def _holds(self, held: Held) -> bool:
        return self._leases.lease_of(held.member.worker) == held.lease

    # --- weights for a trainer ----------------------------------------------------------------

    def _train(self, held: Held) -> None:
        """Let a trainer train until the round ends, with the weights that it does not have."""
        member, source = held.member, None
        assert held.round is not None
        base = _news(member.base, self._known)
        if self.head is not None:
            if self.head is member or member.base == self._head_version:
                base = None
            elif self._known.version != self._head_version:
                source = self.head
        policy = _news(member.policy, self._policy)
        published = self._news_of_published(member)
        member.base, member.policy = None, self._policy.version
        until_s, version = held.round.ends_s, self._head_version
        self._actions.append(Train(held, base, published, policy, until_s, source, version))

    def _news_of_published(self, member: Member) -> Weights | None:
        """Return the published drafter to send to a trainer; None if it has that one."""
        has, member.published = member.published, self._published.version
        return _news(has, self._published)

    def _set_head(self, member: Member) -> None:
        self.head, self._head_version = member, next(self._versions)
        member.base = self._head_version

    # --- the end of a round -------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """End a round whose last members are late."""
        if self._round is not None:
            self._check(self._round, now_s)

    def next_s(self) -> float:
        """Return the time at which `tick` has something to do."""
        current = self._round
        if current is None or not current.results:
            return math.inf
        return current.ends_s + GRACE_S

    def _check(self, current: _Round, now_s: float) -> None:
        """End the round if all have trained, or the last ones are late.

        The first result is waited for, however late; the others only for a while.
        """
        if current is not self._round:
            if current.closed:
                self._continue(current, now_s)
            return
        late = now_s >= current.ends_s + GRACE_S
        if not current.training or (late and current.results):
            self._round = None  # a trainer that comes now starts the next one
            self._settle(current, now_s)

    def _settle(self, current: _Round, now_s: float) -> None:
        """Make one drafter of the results."""
        self._evaluation_left_s += EVALUATED_SHARE * (now_s - current.started_s)
        results = {held: r for held, r in current.results.items() if held in current.waiting}
        if not results:
            # All were called back in the middle: the trainer that got furthest keeps its weights.
            if current.results:
                furthest = max(current.results, key=lambda held: current.results[held].num_tokens)
                self._set_head(furthest.member)
            self._close(current, now_s)
            return
        leader = current.leader = next(iter(results))
        if self._evaluation_left_s <= 0:
            # The last evaluation took longer than it should: train another round first.
            self._set_head(leader.member)
            self._unevaluated_s = 0.0
            self._close(current, now_s)
            return
        others = [(held, float(r.num_tokens)) for held, r in results.items() if held is not leader]
        own_weight, left_s = float(results[leader].num_tokens), self._evaluation_left_s
        published = self._news_of_published(leader.member)
        self._actions.append(Settle(leader, others, own_weight, published, left_s))

    def _close(self, current: _Round, now_s: float) -> None:
        current.closed = True
        self._continue(current, now_s)

    def _continue(self, current: _Round, now_s: float) -> None:
        """Let all waiting trainers join the next round."""
        waiting, current.waiting = current.waiting, {}
        for held in waiting:
            held.round = None
            self.begun(held, now_s)

    def _count(self, trained: Trained, seconds: float) -> None:
        self.tally.used_s += seconds
        self._unevaluated_s += seconds
        self.tally.trained_tokens += trained.num_tokens
        self.tally.late_s += trained.late_s
        self.tally.trained_steps += trained.num_steps
        if trained.num_steps:
            self.tally.loss = trained.loss


def _news(has: int | None, weights: Weights) -> Weights | None:
    """Return weights for a trainer that has this version; None if it has the same."""
    return None if has == weights.version else weights
