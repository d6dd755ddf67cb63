"""Which source drafts for which request: by the match, by what was right before, by the price."""

from typing import Any

import numpy as np
import pytest

from tlt.rollout.sources import LONG, PRICE, Sources

PLACES = 8
IN_PROMPT, ANYWHERE, NOWHERE = 0, 1, -1
WRONG = 10**6


def choose(sources: Sources, matches: list[tuple[int, int]], num_model: int = 3) -> list[int]:
    found: Any = np.array([PLACES if scope >= 0 else 0 for scope, _ in matches])
    lengths = sources.choose(np.array(matches), found, num_model, PLACES)
    return [int(length) for length in lengths]


def teach(
    sources: Sources,
    match: tuple[int, int],
    history: float,
    model: float,
    steps: int = 60,
    seed: int = 0,
) -> None:
    """Verify drafts of 16 requests a step, each token right with the chance of its source."""
    rng = np.random.default_rng(seed)
    names = [str(i) for i in range(16)]
    matches: Any = np.tile(match, (16, 1))
    text: Any = np.tile(np.arange(PLACES + 1), (16, 1))
    for step in range(steps):
        places: Any = np.full(16, 10 * step)
        by_history = np.where(rng.random((16, PLACES)) < history, text[:, :-1], WRONG)
        by_model = np.where(rng.random((16, 3)) < model, text[:, :3], WRONG)
        sources.begin(names, places, matches, by_history.tolist(), by_model)
        # The model's drafts are verified: one token more than was accepted.
        accepted = (by_model == text[:, :3]).cumprod(1).sum(1)
        drawn = np.where(np.arange(PLACES + 1) <= accepted[:, None], text, -1)
        sources.verified(names, places, drawn)


@pytest.mark.parametrize("scope", [IN_PROMPT, ANYWHERE])
def test_long_matches_draft_from_the_history_at_first(scope: int) -> None:
    short, long = choose(Sources(PLACES), [(scope, LONG - 1), (scope, LONG)])
    assert short == 0
    assert 3 < long <= PLACES
    assert choose(Sources(PLACES), [(NOWHERE, 0), (scope, 32)])[0] == 0


def test_the_better_source_of_each_cell_is_learned_without_trials() -> None:
    """All drafts that are verified here are the model's, and still tell about the history."""
    sources = Sources(PLACES)
    teach(sources, (IN_PROMPT, 3), history=0.95, model=0.4)
    teach(sources, (ANYWHERE, 30), history=0.2, model=0.7)
    good, other_scope, bad, same = choose(
        sources, [(IN_PROMPT, 3), (ANYWHERE, 3), (ANYWHERE, 30), (IN_PROMPT, 30)]
    )
    assert good == PLACES
    assert other_scope == 0
    assert bad == 0
    assert same > 0


def test_drafts_end_where_they_are_not_worth_their_verification() -> None:
    sources = Sources(PLACES)
    teach(sources, (IN_PROMPT, 7), history=0.8, model=0.3)
    lengths = []
    for price in (0.05, PRICE, 0.45, 0.75, 0.95):
        sources.price = price
        lengths += choose(sources, [(IN_PROMPT, 7)])
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == PLACES
    assert lengths[2] in (3, 4)  # 0.8 ** 3 = 0.51, 0.8 ** 4 = 0.41
    assert lengths[-1] == 0


def test_a_draft_is_no_longer_than_what_was_found() -> None:
    sources = Sources(PLACES)
    found: Any = np.array([2, 0])
    lengths = sources.choose(np.array([(IN_PROMPT, 32)] * 2), found, 1, PLACES)
    assert lengths.tolist() == [2, 0]
    assert sources.choose(np.array([(IN_PROMPT, 32)]), np.array([8]), 1, 4).tolist() == [4]


def test_a_new_text_replaces_an_old_one() -> None:
    sources = Sources(PLACES)
    teach(sources, (IN_PROMPT, 7), history=0.95, model=0.3)
    assert choose(sources, [(IN_PROMPT, 7)])[0] > 0
    teach(sources, (IN_PROMPT, 7), history=0.1, model=0.6, seed=1)
    assert choose(sources, [(IN_PROMPT, 7)]) == [0]


def test_drafts_count_for_their_own_places_only() -> None:
    """A preempted request, one that ended, and one without a draft."""
    sources = Sources(PLACES)
    before = choose(sources, [(IN_PROMPT, 7)])
    none: Any = np.empty((3, 0), dtype=np.int64)
    for _ in range(200):
        matches: Any = np.tile((IN_PROMPT, 7), (3, 1))
        wrong = [[WRONG] * PLACES] * 3
        sources.begin(["moved", "ended", ""], np.array([5, 5, 5]), matches, wrong, none)
        drawn: Any = np.zeros((2, 4), dtype=np.int64)
        sources.verified(["moved", "new"], np.array([6, 5]), drawn)
        sources.verified(["ended"], np.array([5]), drawn)
    assert choose(sources, [(IN_PROMPT, 7)]) == before


def test_the_models_drafts_may_come_later() -> None:
    """As on vLLM's V2 runner, where the host learns texts and not draws."""
    sources = Sources(PLACES)
    for step in range(80):
        matches: Any = np.tile((IN_PROMPT, 12), (2, 1))
        places: Any = np.array([step, step])
        right = [list(range(PLACES))] * 2
        sources.begin(["a", "b"], places, matches, [[WRONG] * 8] * 2, np.empty((2, 0)))
        sources.add_model(np.array(right)[:, :3])
        assert sources.places(["c", "b"], np.array([3, 4])).tolist() == [3, step]
        sources.verified(["a", "b"], places, np.array(right))
    assert choose(sources, [(IN_PROMPT, 12)]) == [0]


def test_a_mix_gains_more_than_either_source_on_mixed_text() -> None:
    """Two requests in three have no match or a bad one; the third repeats a known text."""
    rng, sources = np.random.default_rng(0), Sources(PLACES)
    kinds = [((NOWHERE, 0), 0.0), ((ANYWHERE, 2), 0.3), ((IN_PROMPT, 16), 0.92)]
    matches: Any = np.array([match for match, _ in kinds] * 4)
    chance: Any = np.array([chance for _, chance in kinds] * 4)[:, None]
    names = [str(i) for i in range(12)]
    gained = {"model": 0, "history": 0, "mixed": 0}
    for step in range(400):
        places: Any = np.full(12, step)
        text: Any = np.tile(np.arange(PLACES + 1), (12, 1))
        by_history = np.where(rng.random((12, PLACES)) < chance, text[:, :-1], WRONG)
        by_model = np.where(rng.random((12, 3)) < 0.65, text[:, :3], WRONG)
        found: Any = np.where(matches[:, 0] >= 0, PLACES, 0)
        length = sources.choose(matches, found, 3, PLACES)
        right_h = (by_history == text[:, :-1]).cumprod(1)
        right_m = (by_model == text[:, :3]).cumprod(1).sum(1)
        accepted = np.where(
            length > 0, (right_h * (np.arange(PLACES) < length[:, None])).sum(1), right_m
        )
        gained["model"] += right_m.sum()
        gained["history"] += (right_h.sum(1) * (found > 0)).sum()
        gained["mixed"] += accepted.sum()
        history = [row if n else [] for row, n in zip(by_history.tolist(), found, strict=True)]
        sources.begin(names, places, matches, history, by_model)
        drawn = np.where(np.arange(PLACES + 1) <= accepted[:, None], text, -1)
        sources.verified(names, places, drawn)
    assert gained["mixed"] > 1.3 * max(gained["model"], gained["history"])
