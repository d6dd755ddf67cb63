"""What rounds decide at moments that trainers in simulated time hardly ever meet."""

from typing import Any, cast

import pytest

from tlt.harvest.contract import Evaluation, Trained
from tlt.harvest.leases import Begin, Leases, LeaseSettings
from tlt.harvest.rounds import Held, Member, Publish, Release, Rounds, Settle, Train

BETTER = Evaluation(better=True, length=3.0, published_length=2.0)


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
        self.rounds.trained(held, Trained(1, 100, 0.5, False), 2.0, at_s + 2)
        (settle,) = self.rounds.actions()
        assert isinstance(settle, Settle)
        return settle


@pytest.mark.parametrize("called_back_s", [None, 3.0])
@pytest.mark.parametrize("settled_s", [3.5, 20.5])
def test_only_a_lease_that_is_good_publishes(called_back_s: float | None, settled_s: float) -> None:
    s = Setting()
    s.train(s.a, 0.0)
    if called_back_s is not None:
        s.leases.needed("a", called_back_s)
    s.rounds.settled(s.a, False, BETTER, "weights", 0.1, settled_s)
    published = any(isinstance(action, Publish) for action in s.rounds.actions())
    assert published == (called_back_s is None and settled_s < 20)
    assert s.rounds.tally.published == published


def test_a_head_that_only_a_dead_trainer_had_is_not_asked_for() -> None:
    s = Setting()
    s.train(s.a, 0.0)
    s.rounds.settled(s.a, False, None, None, 0.1, 2.1)  # broken off: only a has the weights
    s.rounds.actions()
    s.rounds.replaced(s.a.member)
    s.rounds.begun(s.b, 2.2)
    (train,) = s.rounds.actions()
    assert isinstance(train, Train)
    assert train.source is None


def test_a_round_ends_without_its_late_members() -> None:
    s = Setting()
    s.rounds.begun(s.a, 0.0)
    s.rounds.begun(s.b, 0.0)
    s.rounds.actions()
    s.rounds.trained(s.a, Trained(1, 100, 0.5, False), 2.0, 2.0)
    assert s.rounds.actions() == []
    s.rounds.tick(s.rounds.next_s())
    (settle,) = s.rounds.actions()
    assert isinstance(settle, Settle)
    assert settle.held is s.a
    assert settle.others == []
    s.leases.needed("b", 4.0)
    s.rounds.called_back(s.b)
    s.rounds.trained(s.b, Trained(1, 100, 0.5, False), 4.0, 4.0)
    assert s.rounds.actions() == [Release(s.b)]
