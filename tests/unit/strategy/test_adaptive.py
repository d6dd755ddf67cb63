"""Strategies that learn: only their own arms, bounded switching, any reports survived."""

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from benchmarks.replay import SCENARIOS, Run, StepTable, compare, published_h100, replay
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.bench.steps import step_table
from tlt.contracts import OFF, Arm, StepContext, StepReport, Strategy
from tlt.errors import ConfigError
from tlt.strategy.acceptance import Acceptance
from tlt.strategy.adaptive import Adaptive, Caution
from tlt.strategy.beg_mab import BegMab
from tlt.strategy.spec import Fixed, build_strategy, complete_strategy
from tlt.strategy.step_time import StepTime, batch_bucket
from tlt.tasks.tail import HeavyTail

EAGLE = [Arm("eagle3", k) for k in (1, 2, 4)]
NGRAM = [Arm("ngram", k) for k in (2, 4)]
MIXED = [Arm("mixed", k) for k in (1, 2, 4)]
ARMS = [OFF, *EAGLE, *NGRAM]


def make_strategies() -> list[Strategy]:
    return [Adaptive(ARMS), BegMab(ARMS, random.Random(0)), Adaptive([*ARMS, *MIXED])]


def report(
    arms: tuple[Arm, Arm],
    num_decodes: int,
    elapsed_s: float,
    accepted_at: tuple[int, ...] = (),
) -> StepReport:
    verified, proposed = arms
    return StepReport(
        step=0,
        verified=verified,
        proposed=proposed,
        num_decodes=num_decodes,
        num_prefill_tokens=0,
        num_drafts=num_decodes if verified.num_draft_tokens else 0,
        num_draft_tokens=num_decodes * verified.num_draft_tokens,
        num_accepted_tokens=sum(accepted_at),
        accepted_at=accepted_at,
        num_output_tokens=num_decodes + sum(accepted_at),
        elapsed_s=elapsed_s,
    )


times = st.one_of(
    st.floats(1e-4, 1.0),
    st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e30, 1e-30]),
)
steps = st.lists(
    st.tuples(
        st.integers(0, 300),  # decodes
        st.integers(0, 20),  # prefills
        times,
        st.booleans(),  # is it reported at all
        st.integers(0, 3),  # drafter version
        st.integers(0, 100),  # share of drafts accepted
    ),
    max_size=300,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_survives_any_observations_and_chooses_only_its_arms(
    script: list[tuple[int, int, float, bool, int, int]],
) -> None:
    for strategy in make_strategies():
        last = OFF
        for step, (decodes, prefills, elapsed_s, reported, version, percent) in enumerate(script):
            arm = strategy.decide(StepContext(step, decodes, prefills, 0, version))
            assert arm in strategy.arms()
            if reported:
                accepted = tuple([decodes * percent // 100] * last.num_draft_tokens)
                strategy.observe(report((last, arm), decodes, elapsed_s, accepted))
            last = arm


def test_a_trial_that_has_to_wait_for_its_switch_is_charged_to_no_other_arm() -> None:
    """With few switches allowed, the chosen arm often differs from the arm in use."""
    for seed in range(60):
        rng = random.Random(seed)
        caution = Caution(
            switches_per_s=rng.choice([0.5, 2.0, 10.0]), retry_interval_steps=8, probe_share=0.2
        )
        strategy, last = Adaptive(ARMS, caution), OFF
        for step in range(600):
            decodes, chance = rng.choice([1, 1, 2, 4, 16]), rng.random()
            arm = strategy.decide(StepContext(step, decodes, 0, 0, 0))
            accepted, left = [], decodes
            for _ in range(last.num_draft_tokens):
                left = sum(rng.random() < chance for _ in range(left))
                accepted.append(left)
            elapsed_s = 0.003 * rng.uniform(0.5, 2) + 0.002 * (arm != OFF)
            strategy.observe(report((last, arm), decodes, elapsed_s, tuple(accepted)))
            last = arm


@settings(max_examples=30, deadline=None)
@given(steps, st.randoms(use_true_random=False))
def test_switches_per_second_are_bounded(
    script: list[tuple[int, int, float, bool, int, int]], rng: random.Random
) -> None:
    caution = Caution(switches_per_s=10)
    strategy = Adaptive(ARMS, caution)
    last, switches, busy_s = OFF, 0, 0.0
    for step in range(400):
        decodes, prefills, _, _, version, percent = script[step % len(script)] if script else (
            4, 0, 0, True, 0, 50)  # fmt: skip
        arm = strategy.decide(StepContext(step, decodes, prefills, 0, version))
        switches += arm != last
        elapsed_s = rng.uniform(1e-4, 2e-3)
        busy_s += elapsed_s
        accepted = tuple([decodes * percent // 100] * last.num_draft_tokens)
        strategy.observe(report((last, arm), decodes, elapsed_s, accepted))
        last = arm
    assert switches <= 3 + caution.switches_per_s * busy_s


def test_the_same_reports_give_the_same_decisions() -> None:
    table, lengths = published_h100(), [[200] * 8]
    for make in (
        lambda run: Adaptive(list(table.seconds)),
        lambda run: BegMab(list(table.seconds), random.Random(3)),
    ):
        first = replay(make, table, SCENARIOS["abrupt"], lengths, seed=1)
        second = replay(make, table, SCENARIOS["abrupt"], lengths, seed=1)
        assert first == second


def test_memory_does_not_grow_with_time() -> None:
    strategy = Adaptive(ARMS)
    table = recorded()
    replay(lambda run: strategy, table, SCENARIOS["drifting"], [[1000] * 4], seed=0)
    size = _size(strategy)
    replay(lambda run: strategy, table, SCENARIOS["drifting"], [[5000] * 4], seed=0)
    assert _size(strategy) < 1.5 * size


def _size(thing: object) -> int:
    """Return the bytes of an object and of everything it holds."""
    seen: set[int] = set()
    todo, total = [thing], 0
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        total += sys.getsizeof(item) if not isinstance(item, float) else 0
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        elif hasattr(item, "__dict__"):
            todo.append(vars(item))
        elif hasattr(item, "__slots__"):
            todo += [getattr(item, name) for name in item.__slots__]
    return total


def recorded() -> StepTable:
    """Return the table of a small engine on one core, where verifying costs compute."""
    off = [(1.0, 0.030), (8.0, 0.032), (32.0, 0.045), (64.0, 0.065)]
    seconds = {OFF: off}
    for arm in EAGLE:
        k = arm.num_draft_tokens
        seconds[arm] = [(b, s + 0.002 + 0.0014 * k + 0.0011 * k * b) for b, s in off]
    for arm in NGRAM:
        seconds[arm] = [(b, s + 0.0005 * arm.num_draft_tokens * b) for b, s in off]
    accepted = {"eagle3": [0.72, 0.52, 0.40, 0.30], "ngram": [0.3, 0.15, 0.1, 0.07]}
    return StepTable(seconds, accepted, {"eagle3": 1.0, "ngram": 0.5})


def with_mixed(table: StepTable, accepted: list[float], share: float = 1.4) -> StepTable:
    """Return the table with mixed arms, which cost a little more than EAGLE-3."""
    seconds = dict(table.seconds)
    for arm in MIXED:
        points = table.seconds[Arm("eagle3", arm.num_draft_tokens)]
        seconds[arm] = [(b, 1.01 * s) for b, s in points]
    return StepTable(
        seconds, table.accepted | {"mixed": accepted}, table.drafted_share | {"mixed": share}
    )


def rollouts(count: int, requests: int, scale: int = 1) -> list[list[int]]:
    rng = random.Random(0)
    tail = HeavyTail(60, 300, 500)
    return [[scale * tail.draw(rng) for _ in range(requests)] for _ in range(count)]


TABLES: dict[str, Callable[[], StepTable]] = {
    "recorded": lambda: recorded(),
    "mixed is best": lambda: with_mixed(recorded(), [0.80, 0.62, 0.50, 0.42]),
    "mixed is no better": lambda: with_mixed(recorded(), [0.72, 0.52, 0.40, 0.30]),
    "h100": published_h100,
}


@pytest.mark.parametrize("name", TABLES)
def test_near_the_oracle(name: str) -> None:
    table = TABLES[name]()
    work = rollouts(8, 32, scale=4) if name == "h100" else rollouts(8, 64)
    arms = list(table.seconds)
    rows = compare(table, {"adaptive": lambda run: Adaptive(arms)}, work, seeds=[0, 1])
    for row in rows:
        assert row["of_oracle"] > 0.95, row


def test_a_worthless_drafter_costs_next_to_nothing() -> None:
    table = recorded()
    worthless = StepTable(table.seconds, {"eagle3": [0.0] * 4, "ngram": [0.0] * 4}, {})
    work = rollouts(4, 64)
    off = replay(lambda run: build_strategy({"kind": "off"}), worthless, lambda p: 1.0, work, 0)
    mine = replay(lambda run: Adaptive(ARMS), worthless, lambda p: 1.0, work, 0)
    assert mine.tokens_per_s > 0.98 * off.tokens_per_s
    mixed = with_mixed(worthless, [0.0] * 4)
    more = replay(lambda run: Adaptive([*ARMS, *MIXED]), mixed, lambda p: 1.0, work, 0)
    assert more.tokens_per_s > 0.98 * off.tokens_per_s
    assert more.tokens_per_s > 0.997 * mine.tokens_per_s


def test_a_mixed_arm_that_is_no_better_costs_next_to_nothing() -> None:
    work = rollouts(8, 64)
    ratios = []
    for seed in range(4):
        table = with_mixed(recorded(), [0.72, 0.52, 0.40, 0.30])
        speeds = [
            replay(lambda run, arms=arms: Adaptive(arms), table, lambda p: 1.0, work, seed)  # type: ignore[misc]
            for arms in ([*ARMS, *MIXED], ARMS)
        ]
        ratios.append(speeds[0].tokens_per_s / speeds[1].tokens_per_s)
    assert sum(ratios) / len(ratios) > 0.99, ratios


@pytest.mark.parametrize("seed", range(3))
def test_ngrams_that_become_good_are_found_beside_a_worthless_drafter(seed: int) -> None:
    """A run without a trained drafter begins like this: n-grams have no text to be found in yet."""
    rng = random.Random(seed)
    strategy, last, found_at = Adaptive([*ARMS, Arm("ngram", 8)]), OFF, 0
    for step in range(4000):
        decodes = max(1, 32 - step // 8)
        arm = strategy.decide(StepContext(step, decodes, 0, 0, 0))
        elapsed_s = 0.003 + 0.00005 * decodes * (1 + last.num_draft_tokens)
        elapsed_s += 0.0033 * (arm != OFF)
        elapsed_s += 0.002 * arm.num_draft_tokens * (arm.drafter == "eagle3")
        chance = 0.0 if last.drafter != "ngram" else 0.05 if step < 250 else 0.7
        accepted, left = [], decodes
        for _ in range(last.num_draft_tokens):
            left = sum(rng.random() < chance for _ in range(left))
            accepted.append(left)
        strategy.observe(
            report((last, arm), decodes, elapsed_s * rng.uniform(0.9, 1.1), tuple(accepted))
        )
        if arm.drafter != "ngram":
            found_at = step + 1
        last = arm
    assert found_at < 3900, "n-grams are still not in use"


def test_a_new_drafter_is_tried_at_once() -> None:
    strategy = Adaptive([OFF, *EAGLE])
    last, tried_after = OFF, None
    for step in range(400):
        version = int(step >= 300)
        arm = strategy.decide(StepContext(step, 4, 0, 0, version))
        if version and arm != OFF and tried_after is None:
            tried_after = step - 300
        good = 3 if version else 0
        accepted = tuple([good] * last.num_draft_tokens)
        seconds = 0.03 + 0.002 * last.num_draft_tokens
        made = report((last, arm), 4, seconds, accepted)
        strategy.observe(replace(made, drafter_version=version))
        last = arm
    assert tried_after is not None
    assert tried_after <= 8
    assert last.drafter == "eagle3"


def test_ngrams_are_tried_at_once_when_texts_of_look_ahead_come() -> None:
    """Beside a drafter in use, n-grams that were of no use would wait for hundreds of steps."""

    def tried_after(texts_version: int) -> tuple[int, Arm]:
        strategy, last, found = Adaptive(ARMS), OFF, 10**9
        for step in range(1100):
            after = step - 1000
            version = texts_version if after >= 0 else 0
            arm = strategy.decide(StepContext(step, 4, 0, 0, texts_version=version))
            if after >= 0 and arm.drafter == "ngram":
                found = min(found, after)
            good = 2 if last.drafter == "eagle3" else 4 if after >= 0 else 0
            accepted = tuple([good] * last.num_draft_tokens)
            seconds = 0.03 + 0.002 * last.num_draft_tokens
            strategy.observe(report((last, arm), 4, seconds, accepted))
            last = arm
        return found, last

    found, last = tried_after(texts_version=1)
    assert found <= 8, found
    assert last == NGRAM[-1]
    assert tried_after(texts_version=0)[0] > 50


def test_nothing_is_tried_while_the_batch_fills_up() -> None:
    strategy = Adaptive(ARMS)
    for step in range(50):
        arm = strategy.decide(StepContext(step, 5, 10, 100))
        assert arm == OFF
        strategy.observe(report((OFF, arm), 5, 0.03))


def test_a_drafter_is_found_while_prompts_keep_coming() -> None:
    """Continuous batching: nearly every step also prefills a prompt."""
    strategy = Adaptive(ARMS)
    last = OFF
    for step in range(300):
        arm = strategy.decide(StepContext(step, 8, 1, 100))
        k = last.num_draft_tokens
        accepted = tuple([7] * k) if last.drafter == "eagle3" else ()
        seconds = 0.03 + 0.0002 * 8 * k + 0.01
        strategy.observe(replace(report((last, arm), 8, seconds, accepted), num_prefill_tokens=60))
        last = arm
    assert last.drafter == "eagle3"


def test_acceptance_is_shared_between_lengths() -> None:
    acceptance = Acceptance(max_draft_tokens=6)
    for _ in range(50):
        acceptance.observe(report((Arm("eagle3", 2), OFF), 10, 0.1, accepted_at=(8, 6)))
    assert acceptance.recent_tokens(1)[0] == pytest.approx(1.8, abs=0.03)
    assert acceptance.recent_tokens(2)[0] == pytest.approx(2.4, abs=0.05)
    expected, optimistic = acceptance.recent_tokens(4, in_use=2)
    assert 2.6 < expected < 3.4
    assert optimistic > expected + 0.1  # no draft reached these positions
    assert acceptance.recent_tokens(1, in_use=2)[1] == acceptance.recent_tokens(1)[0]  # no doubt


def test_a_mixed_arm_gains_beyond_the_models_draft_length() -> None:
    """Every other draft comes from the history, has six tokens, and half of these are accepted."""
    acceptance = Acceptance(max_draft_tokens=4)
    made = report((Arm("mixed", 2), OFF), 10, 0.1, accepted_at=(8, 7, 5, 5, 5, 5))
    made = replace(
        made,
        num_draft_tokens=5 * 2 + 5 * 6,
        history_drafts=5,
        history_draft_tokens=30,
        history_accepted_at=(5, 5, 5, 5, 5, 5),
    )
    for _ in range(100):
        acceptance.observe(made)
    assert acceptance.usual_tokens(2)[0] == pytest.approx(1 + 0.8 + 0.7 + 4 * 0.5, rel=0.03)
    assert acceptance.usual_tokens(1)[0] == pytest.approx(1 + 0.8 + 5 * 0.5, rel=0.03)
    assert acceptance.drafted(2) == pytest.approx(4.0, rel=0.03)
    assert acceptance.drafted(4) == pytest.approx(0.5 * 4 + 3.0, rel=0.03)


def price_at(strategy: Adaptive, batch: int) -> float:
    """Return the price after some steps, in which one more token to verify takes 0.5 ms."""
    last = OFF
    for step in range(200):
        arm = strategy.decide(StepContext(step, batch, 0, 0))
        accepted = tuple(
            int(batch * rate) for rate in (0.6, 0.4, 0.3, 0.2)[: last.num_draft_tokens]
        )
        seconds = 0.03 + 0.0003 * batch + 0.0005 * batch * last.num_draft_tokens
        strategy.observe(report((last, arm), batch, seconds, accepted))
        last = arm
    assert strategy.price is not None
    return strategy.price


def test_the_price_of_a_draft_token_grows_with_the_batch() -> None:
    strategy = Adaptive([OFF, *NGRAM])
    prices = [price_at(strategy, batch) for batch in (64, 8, 1)]
    assert 0.05 <= prices[2] <= prices[1] < prices[0] <= 0.6
    assert prices[0] > 0.2


def test_hard_text_is_hard_for_longer_drafts_too() -> None:
    acceptance = Acceptance(max_draft_tokens=6)
    for _ in range(50):  # easy
        acceptance.observe(report((Arm("eagle3", 6), OFF), 4, 0.1, accepted_at=(4, 4, 3, 3, 3, 3)))
    for _ in range(80):  # hard, while short drafts are in use
        acceptance.observe(report((Arm("eagle3", 2), OFF), 4, 0.1, accepted_at=(1,)))
    assert acceptance.recent_tokens(6)[0] < acceptance.recent_tokens(2)[0] + 0.2
    assert acceptance.usual_tokens(6)[0] > 2
    acceptance.expect_other_text()
    assert acceptance.recent_tokens(2)[0] == pytest.approx(acceptance.usual_tokens(2)[0], abs=0.2)


def verified(acceptance: Acceptance, accepted_at: tuple[int, ...], steps: int) -> bool:
    """Verify ten drafts per step; return whether the text turned in any step."""
    made = report((Arm("eagle3", len(accepted_at)), OFF), 10, 0.1, accepted_at)
    return sum(bool(acceptance.observe(made)) for _ in range(steps)) > 0


def test_a_jump_replaces_the_short_memory_within_a_few_drafts() -> None:
    acceptance = Acceptance(max_draft_tokens=4)
    assert not verified(acceptance, (8, 6), steps=50)
    assert verified(acceptance, (0, 0), steps=3)
    assert acceptance.recent_tokens(2)[0] < 1.6
    assert acceptance.usual_tokens(2)[0] > 2  # other text is still as it was


def test_a_trial_that_does_not_fit_replaces_both_memories() -> None:
    acceptance = Acceptance(max_draft_tokens=4, prior=0.7)
    verified(acceptance, (1, 0), steps=150)
    acceptance.begin()
    verified(acceptance, (8,), steps=2)
    assert acceptance.usual_tokens(4)[0] < 1.3
    assert acceptance.believe_latest(ease=1.0)
    assert acceptance.usual_tokens(4)[0] > 2.5  # nothing of the old drafts is left
    assert acceptance.recent_tokens(4)[0] > 2.5


def test_text_that_is_easy_for_both_drafters_is_not_a_change() -> None:
    acceptance = Acceptance(max_draft_tokens=4)
    verified(acceptance, (4, 2), steps=150)
    acceptance.begin()
    verified(acceptance, (8, 6), steps=2)
    assert not acceptance.believe_latest(ease=2.0)
    assert acceptance.believe_latest(ease=1.0)


def test_the_long_memory_tells_the_short_one_about_rare_positions() -> None:
    """Few drafts get to the last positions, where nearly all are accepted."""
    acceptance = Acceptance(max_draft_tokens=12)
    for _ in range(200):
        easy = (3, *[2] * 11)
        acceptance.observe(report((Arm("eagle3", 12), OFF), 10, 0.1, accepted_at=easy))
    for _ in range(12):  # shorter drafts in the same text
        acceptance.observe(report((Arm("eagle3", 2), OFF), 10, 0.1, accepted_at=(3, 2)))
    acceptance.expect_other_text()
    assert acceptance.recent_tokens(12)[0] == pytest.approx(1 + 0.3 + 11 * 0.2, rel=0.1)


def find_again(strategy: Strategy, good_from: int, num_steps: int) -> int:
    """Return the steps from `good_from`, when drafters become good, until EAGLE-3 stays in use."""
    rng, last, found_at = random.Random(0), OFF, 0
    for step in range(num_steps):
        arm = strategy.decide(StepContext(step, 8, 0, 0, 0))
        seconds = 0.02 + 0.0002 * 8 * last.num_draft_tokens
        seconds += 0.001 * last.num_draft_tokens * (last.drafter == "eagle3")
        good = step >= good_from
        chance = {"off": 0.0, "eagle3": 0.85 * good, "ngram": 0.35 * good}[last.drafter]
        accepted, left = [], 8
        for _ in range(last.num_draft_tokens):
            left = sum(rng.random() < chance for _ in range(left))
            accepted.append(left)
        made = report((last, arm), 8, seconds * rng.uniform(0.95, 1.05), tuple(accepted))
        strategy.observe(made)
        if arm.drafter != "eagle3":
            found_at = step + 1
        last = arm
    return found_at - good_from


def test_a_drafter_that_failed_for_long_is_found_soon_after_a_jump() -> None:
    """EAGLE-3 wins over n-grams that became good, too, after many failed trials."""
    assert find_again(Adaptive(ARMS), good_from=3000, num_steps=4000) < 700


@pytest.mark.parametrize("seed", range(3))
def test_each_drafter_is_found_at_the_batch_sizes_where_it_is_best(seed: int) -> None:
    """N-grams win in large batches, EAGLE-3 in small ones; the retry interval never passes."""
    seconds = {OFF: [(1.0, 0.03), (64.0, 0.06)]}
    for arm in EAGLE:
        seconds[arm] = [(1.0, 0.034), (8.0, 0.04), (64.0, 0.12)]
    for arm in NGRAM:
        seconds[arm] = [(1.0, 0.031), (64.0, 0.07)]
    accepted = {"eagle3": [0.75, 0.6, 0.45, 0.35], "ngram": [0.5, 0.3, 0.2, 0.1]}
    table = StepTable(seconds, accepted, {})
    strategy = Adaptive(ARMS, Caution(retry_interval_steps=100_000))
    work = [[300] * 64, [400] * 4]
    made = replay(lambda run: strategy, table, SCENARIOS["stationary"], work, seed)
    large = [r.proposed.drafter for r in made.reports if r.num_decodes > 32][20:]
    small = [r.proposed.drafter for r in made.reports if r.num_decodes <= 4][40:]
    assert large.count("ngram") > 0.8 * len(large)
    assert small.count("eagle3") > 0.9 * len(small)


@pytest.mark.parametrize("seed", range(2))
def test_a_long_draft_that_costs_no_more_is_found(seed: int) -> None:
    """At batch size 1 the longer drafts take as long as the shorter ones. Only a trial shows it."""
    table = published_h100()
    strategy = Adaptive(list(table.seconds))
    made = replay(lambda run: strategy, table, SCENARIOS["stationary"], [[6000]], seed)
    used = [r.proposed.num_draft_tokens for r in made.reports]
    assert used.count(64) > 0.5 * len(used)


def test_as_fast_as_the_best_arm_where_text_and_machine_change() -> None:
    """Short rollouts, requests that turn hard in the middle, a host that slows down, new drafters.

    All of these mislead a strategy that compares observations of different moments.
    """
    ratios = []
    for seed in range(8):
        best = tail_rollouts(Fixed(Arm("eagle3", 3)), seed)
        ratios.append(tail_rollouts(Adaptive(list(tail_table().seconds)), seed) / best)
    assert sum(ratios) / len(ratios) > 0.98, ratios


def tail_table() -> StepTable:
    """Return the table of roughly SmolLM2 on one core."""
    off = [(1.0, 0.040), (2.0, 0.043), (4.0, 0.048), (8.0, 0.060)]
    seconds = {OFF: off}
    for k in (1, 2, 3, 4, 6):
        seconds[Arm("eagle3", k)] = [(b, s + 0.0025 + 0.0022 * k + 0.0009 * k * b) for b, s in off]
    for k in (2, 4, 8):
        seconds[Arm("ngram", k)] = [(b, s + 0.0003 * k + 0.00025 * k * b) for b, s in off]
    accepted = {
        "eagle3": [0.70, 0.55, 0.42, 0.30, 0.08, 0.03],
        "ngram": [0.2, 0.08, 0.04, 0.02, 0.01, 0.01, 0.005, 0.005],
    }
    return StepTable(seconds, accepted, {"eagle3": 1.0, "ngram": 0.5})


def tail_rollouts(strategy: Strategy, seed: int) -> float:
    """Return the tokens per second over 20 rollouts of 8 requests."""
    text, host, luck = (random.Random(f"{seed}/{part}") for part in ("text", "host", "luck"))
    table, verified = tail_table(), OFF
    pace = clock_s = 0.0
    tokens = step = 0
    for version in range(20):
        drafter = math.exp(text.gauss(0, 0.08))
        left = HeavyTail(30, 400, 560).spread(8, text)
        turns_hard = [n - text.expovariate(1 / 400) if text.random() < 0.8 else n for n in left]
        while left:
            proposed = strategy.decide(StepContext(step, len(left), 0, 0, version))
            accepted_at, output, still, turns = [0] * verified.num_draft_tokens, 0, [], []
            for rest, turn in zip(left, turns_hard, strict=True):
                power, point, gain = drafter * (0.45 if rest > turn else 2.0), luck.random(), 1
                while gain <= verified.num_draft_tokens and point < table.rate(
                    verified.drafter, gain - 1, power
                ):
                    accepted_at[gain - 1] += 1
                    gain += 1
                output += min(gain, rest)
                if rest > gain:
                    still.append(rest - gain)
                    turns.append(turn)
            pace += host.gauss(0, 0.018) - 0.004 * pace
            seconds = table.step_s(len(left), verified, proposed)
            seconds *= math.exp(pace + abs(host.gauss(0, 0.12)))
            made = report((verified, proposed), len(left), seconds, tuple(accepted_at))
            strategy.observe(replace(made, num_output_tokens=output, drafter_version=version))
            clock_s, tokens, step, verified = clock_s + seconds, tokens + output, step + 1, proposed
            left, turns_hard = still, turns
    return tokens / clock_s


class Stalling:
    """A strategy in an engine whose machine is five times slower during some engine steps."""

    def __init__(self, strategy: Strategy, slow: range) -> None:
        self._strategy = strategy
        self._slow = slow

    def arms(self) -> frozenset[Arm]:
        return self._strategy.arms()

    def decide(self, context: StepContext) -> Arm:
        version = int(context.step >= self._slow.stop)  # a drafter swap right after the stall
        return self._strategy.decide(replace(context, drafter_version=version))

    def observe(self, report: StepReport) -> None:
        factor, version = 5 if report.step in self._slow else 1, int(report.step >= self._slow.stop)
        made = replace(report, elapsed_s=factor * report.elapsed_s, drafter_version=version)
        self._strategy.observe(made)


def test_a_machine_that_stalls_for_minutes_makes_no_arm_look_slow() -> None:
    """EAGLE-3 drafts during the stall; n-grams and plain steps were timed before it."""
    table, slow = tail_table(), range(500, 630)
    work = [[60, 80, 100, 120, 140, 160, 180, 220]] * 14
    shares = []
    for seed in (1, 3):
        strategy = Stalling(Adaptive(list(table.seconds)), slow)
        made = replay(partial(given_strategy, strategy), table, lambda p: 1.0, work, seed)
        after = [r.proposed.drafter for r in made.reports if r.step >= slow.stop + 50]
        assert len(after) > 300
        shares.append(after.count("eagle3") / len(after))
    assert min(shares) > 0.9, shares


def test_the_pace_follows_a_machine_that_stalls_and_the_arms_keep_their_times() -> None:
    model, arm = StepTime(frozenset(ARMS)), EAGLE[1]
    rng = random.Random(0)

    def run(used: Arm, seconds: float, steps: int) -> None:
        for _ in range(steps):
            made = report((used, used), 8, seconds * rng.uniform(0.9, 1.1))
            model.observe(made, steady=True)

    def seconds(used: Arm) -> float:
        return model.expected_s(8, 8 * used.num_draft_tokens, used)[0]

    run(OFF, 0.09, 40)
    run(arm, 0.12, 60)
    before = seconds(arm) / seconds(OFF)
    run(arm, 5 * 0.12, 10)
    assert seconds(arm) == pytest.approx(5 * 0.12, rel=0.2)
    assert seconds(arm) / seconds(OFF) == pytest.approx(before, rel=0.05)
    run(arm, 0.12, 10)
    assert seconds(arm) == pytest.approx(0.12, rel=0.2)
    assert seconds(arm) / seconds(OFF) == pytest.approx(before, rel=0.05)


def test_one_long_step_is_no_stall() -> None:
    model = StepTime(frozenset(ARMS))
    for step in range(60):
        model.observe(report((OFF, OFF), 8, 2.0 if step % 20 == 19 else 0.09), steady=True)
    assert model.expected_s(8, 0, OFF)[0] == pytest.approx(0.09, rel=0.1)


def test_step_time_predicts_arms_never_tried() -> None:
    model = StepTime(frozenset(ARMS))

    def truth(decodes: int, arm: Arm) -> float:
        k = arm.num_draft_tokens
        return 0.02 + 0.0005 * decodes + 0.001 * decodes * k + (0.001 + 0.002 * k) * (k > 0)

    rng = random.Random(0)
    for _ in range(600):
        decodes, arm = rng.randint(1, 32), rng.choice([OFF, EAGLE[0], EAGLE[1]])
        model.observe(report((arm, arm), decodes, truth(decodes, arm)), steady=True)
    seconds, error = model.expected_s(16, 16 * 4, EAGLE[2])
    assert seconds == pytest.approx(truth(16, EAGLE[2]), rel=0.15)
    assert error > model.expected_s(16, 16, EAGLE[0])[1]


def test_buckets_are_coarse_for_large_batches() -> None:
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 13, 17, 25, 64)] == [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64]  # fmt: skip


def test_specs() -> None:
    spec = complete_strategy({"kind": "adaptive"}, ["ngram"])
    assert build_strategy(spec).arms() == {OFF, Arm("ngram", 2), Arm("ngram", 4), Arm("ngram", 8)}
    assert build_strategy(complete_strategy({"kind": "beg_mab"}, [])).arms() == {OFF}
    named = {"kind": "adaptive", "arms": [["eagle3", 3]], "margin": 0.1}
    assert build_strategy(complete_strategy(named, ["ngram"])).arms() == {OFF, Arm("eagle3", 3)}
    with pytest.raises(ConfigError, match=r"strategy\.margins is not known"):
        build_strategy({"kind": "adaptive", "arms": [], "margins": 1})


def test_tables_survive_being_written(tmp_path: Path) -> None:
    table = recorded()
    path = tmp_path / "rollout.json"
    path.write_text(json.dumps({"steps": table.as_dict()}))
    assert StepTable.load(path) == table


def test_a_table_is_learned_from_reports() -> None:
    table = recorded()
    arm = EAGLE[2]
    made = replay(always(arm), table, lambda p: 1.0, rollouts(4, 64), 0)
    learned = StepTable.from_dict(step_table(made.reports))
    assert learned.accepted["eagle3"] == pytest.approx(table.accepted["eagle3"], abs=0.03)
    for batch in (2, 16, 40):
        assert learned.step_s(batch, arm, arm) == pytest.approx(
            table.step_s(batch, arm, arm), rel=0.15
        )


def given_strategy(strategy: Strategy, run: Run) -> Strategy:
    return strategy


def always(arm: Arm) -> Callable[[Run], Strategy]:
    return partial(given_strategy, Fixed(arm))


@pytest.mark.parametrize("make", [recorded, published_h100])
def test_a_replay_accepts_as_many_tokens_as_the_oracle_expects(
    make: Callable[[], StepTable],
) -> None:
    table = make()
    for arm in table.seconds:
        made = replay(always(arm), table, lambda p: 1.0, [[9000] * 16], seed=0)
        steady = [r for r in made.reports if r.verified == arm and r.num_decodes == 16]
        gained = sum(r.num_decodes + r.num_accepted_tokens for r in steady)
        decodes = sum(r.num_decodes for r in steady)
        assert gained / decodes == pytest.approx(table.tokens(arm, 1.0), rel=0.02), arm


def test_rates_that_rise_with_the_position_are_refused_by_the_table() -> None:
    table = StepTable({OFF: [(1.0, 0.01)]}, {"eagle3": [0.5, 0.2, 0.3]}, {})
    assert table.accepted == {"eagle3": [0.5, 0.2, 0.2]}


def test_by_the_same_seed_every_strategy_drafts_the_same_text() -> None:
    """Two strategies that draft alike from some token on get the same acceptances from there on."""
    table, arm = recorded(), Arm("eagle3", 4)

    class LateStart(Fixed):
        def decide(self, context: StepContext) -> Arm:
            return OFF if context.step < 7 else super().decide(context)

    ends = []
    for strategy in (Fixed(arm), LateStart(arm)):
        made = replay(partial(given_strategy, strategy), table, lambda p: 1.0, [[600]], seed=0)
        left = [600 - sum(r.num_output_tokens for r in made.reports[:n]) for n in range(200)]
        ends.append([rest for rest in left if 0 < rest < 500])
    assert len(set(ends[0]) & set(ends[1])) > 0.8 * len(set(ends[0]))


def test_the_oracle_is_not_beaten_by_a_fixed_arm() -> None:
    table, work = recorded(), rollouts(3, 64)
    for name in SCENARIOS:
        rows = compare(
            table,
            {str(arm): always(arm) for arm in EAGLE},
            work,
            seeds=[0],
        )
        assert all(row["of_oracle"] < 1.02 for row in rows if row["scenario"] == name)
    assert Run(table, SCENARIOS["stationary"]).progress == 0
