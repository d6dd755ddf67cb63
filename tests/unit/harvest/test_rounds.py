"""What rounds decide at moments that trainers in simulated time hardly ever meet."""

from typing import Any, cast

import pytest

from tlt.harvest.contract import Evaluation, Trained, Version
from tlt.harvest.leases import Begin, Leases, LeaseSettings
from tlt.harvest.rounds import REST_S, Held, Member, Publish, Release, Rounds, Settle, Train

BETTER = Evaluation(better=True, length=3.0, published_length=2.0)
LEARNED = Trained(num_steps=1, num_tokens=100, loss=0.5, starved=False)


class Setting:
    """Two workers, both leased at 0 s for 20 s; rounds take 2 s."""

    def __init__(self) -> None:
        settings = LeaseSettings(min_s=0, lease_s=20, stop_timeout_s=4, max_leases=2)
        self.leases = Leases(settings)
        self.rounds = Rounds(2.0, True, self.leases)
        for worker in "ab":
            self.leases.set_ready(worker, True)
            self.leases.idle(worker, 0.0)
        self.a, self.b = (
            Held(action.lease, Member(action.worker, cast(Any, None)))
            for action in self.leases.actions(0.0)
            if isinstance(action, Begin)
        )

    def train(self, held: Held, at_s: float) -> Settle:
        """Let a trainer that works alone train for a round."""
        self.rounds.begun(held, at_s)
        (train,) = self.rounds.actions()
        assert isinstance(train, Train)
        self.rounds.trained(held, LEARNED, 2.0, at_s + 2)
        (settle,) = self.rounds.actions()
        assert isinstance(settle, Settle)
        return settle

    def settle(self, held: Held, blob: str, at_s: float) -> Version | None:
        """Let a leader evaluate weights that are better; return the drafter that is published."""
        self.rounds.settled(held, False, BETTER, blob, 0.1, at_s)
        decided = self.rounds.actions()
        self.decided = [action for action in decided if not isinstance(action, Publish)]
        published = [action.version for action in decided if isinstance(action, Publish)]
        return published[0] if published else None


@pytest.mark.parametrize("called_back_s", [None, 3.0])
@pytest.mark.parametrize("settled_s", [3.5, 20.5])
def test_only_a_lease_that_is_good_publishes(called_back_s: float | None, settled_s: float) -> None:
    s = Setting()
    s.train(s.a, 0.0)
    if called_back_s is not None:
        s.leases.needed("a", called_back_s)
    published = s.settle(s.a, "weights", settled_s) is not None
    assert published == (called_back_s is None and settled_s < 20)
    assert s.rounds.tally.published == published


def test_after_a_death_training_continues_from_the_newest_known_weights() -> None:
    s = Setting()
    s.train(s.a, 0.0)
    s.settle(s.a, "known", 2.1)
    s.rounds.trained(s.a, LEARNED, 2.0, 4.1)
    s.rounds.settled(s.a, False, None, None, 0.1, 4.2)  # broken off: only a has the weights
    s.rounds.actions()
    s.rounds.replaced(s.a.member)
    s.rounds.begun(s.b, 4.3)
    (train,) = s.rounds.actions()
    assert isinstance(train, Train)
    assert train.source is None
    assert train.base is not None
    assert train.base.blob == "known"


def test_a_round_ends_without_its_late_members() -> None:
    s = Setting()
    s.rounds.begun(s.a, 0.0)
    s.rounds.begun(s.b, 0.0)
    s.rounds.actions()
    s.rounds.trained(s.a, LEARNED, 2.0, 2.0)
    assert s.rounds.actions() == []
    s.rounds.tick(s.rounds.next_s())
    (settle,) = s.rounds.actions()
    assert isinstance(settle, Settle)
    assert settle.held is s.a
    assert settle.others == []
    s.leases.needed("b", 4.0)
    s.rounds.called_back(s.b)
    s.rounds.trained(s.b, LEARNED, 4.0, 4.0)
    assert s.rounds.actions() == [Release(s.b)]


def test_nothing_to_learn_from_ends_the_lease_and_rests_the_worker() -> None:
    s = Setting()
    s.rounds.begun(s.a, 0.0)
    s.rounds.actions()
    s.rounds.trained(s.a, Trained(0, 0, 0.0, True), 0.0, 0.0)
    assert s.rounds.actions() == [Release(s.a, REST_S)]


def test_a_drafter_compared_with_an_older_one_than_published_is_not_published() -> None:
    s = Setting()
    s.train(s.a, 0.0)
    s.train(s.b, 2.0)
    assert s.settle(s.a, "of a", 4.1) is not None
    assert s.settle(s.b, "of b", 4.2) is None
    (again,) = s.decided
    assert isinstance(again, Train)
    assert again.published is not None
    assert again.published.blob == "of a", "compared with this one next"


def test_training_continues_without_a_published_drafter_whose_weights_are_lost() -> None:
    s = Setting()
    s.train(s.a, 0.0)
    first = s.settle(s.a, "first", 2.1)
    assert first is not None
    s.rounds.arrived(first, "where it arrived")
    s.rounds.trained(s.a, LEARNED, 2.0, 4.1)
    second = s.settle(s.a, "second", 4.2)
    assert second is not None
    s.rounds.lost(second)
    s.rounds.begun(s.b, 4.3)
    (train,) = s.rounds.actions()
    assert isinstance(train, Train)
    assert train.source is None
    assert train.base == train.published
    assert train.base is not None
    assert train.base.blob == "where it arrived"
    assert s.rounds.tally.faults == 1
