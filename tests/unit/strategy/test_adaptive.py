"""Strategies that learn: only their own arms, bounded switching, any reports survived."""

import math
import pickle
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from benchmarks.replay import SCENARIOS, StepTable, compare, published_h100, replay
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_fixtures import ARMS, EAGLE, NGRAM, recorded, report, rollouts

from tlt.contracts import OFF, Arm, StepContext, Strategy
from tlt.strategy.adaptive import Adaptive, Caution
from tlt.strategy.beg_mab import BegMab
from tlt.strategy.spec import Fixed, build_strategy
from tlt.tasks.tail import HeavyTail


def make_strategies() -> list[Strategy]:
    # With few switches allowed, the chosen arm often differs from the arm in use.
    slow = Caution(switches_per_s=0.5, retry_interval_steps=8, probe_share=0.2)
    return [Adaptive(ARMS), Adaptive(ARMS, slow), BegMab(ARMS, random.Random(0))]


def drawn(rng: random.Random, num_decodes: int, arm: Arm, chance: float) -> tuple[int, ...]:
    """Return how many drafts are accepted up to each position, each with this chance."""
    accepted, left = [], num_decodes
    for _ in range(arm.num_draft_tokens):
        left = sum(rng.random() < chance for _ in range(left))
        accepted.append(left)
    return tuple(accepted)


Outcome = Callable[[int, int, Arm, Arm], tuple[float, tuple[int, ...]]]
"""Seconds and acceptances of an engine step, by step, decodes, verified and proposed arm."""


def drive(
    strategy: Strategy, num_steps: int, context: Callable[[int], StepContext], outcome: Outcome
) -> list[Arm]:
    """Run engine steps and return the arms that the strategy chose."""
    used = [OFF]
    for step in range(num_steps):
        now = context(step)
        used.append(strategy.decide(now))
        seconds, accepted = outcome(step, now.num_decodes, *used[-2:])
        made = report((used[-2], used[-1]), now.num_decodes, seconds, accepted)
        strategy.observe(
            made._replace(
                num_prefill_tokens=60 * now.num_prefills,
                drafter_version=now.drafter_version,
            )
        )
    return used[1:]


def all_accepted(count: int, arm: Arm, drafter: str = "eagle3") -> tuple[int, ...]:
    return (count * (arm.drafter == drafter),) * arm.num_draft_tokens


steps = st.lists(
    st.tuples(
        st.integers(0, 300),  # decodes
        st.integers(0, 20),  # prefills
        st.one_of(
            st.floats(1e-4, 1.0),
            st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e30, 1e-30]),
        ),
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


@settings(max_examples=30, deadline=None)
@given(steps, st.randoms(use_true_random=False))
def test_switches_per_second_are_bounded(
    script: list[tuple[int, int, float, bool, int, int]], rng: random.Random
) -> None:
    caution = Caution(switches_per_s=10)
    script = script or [(4, 0, 0.0, True, 0, 50)]
    busy_s = 0.0

    def context(step: int) -> StepContext:
        decodes, prefills, _, _, version, _ = script[step % len(script)]
        return StepContext(step, decodes, prefills, 0, version)

    def outcome(step: int, decodes: int, last: Arm, arm: Arm) -> tuple[float, tuple[int, ...]]:
        nonlocal busy_s
        seconds = rng.uniform(1e-4, 2e-3)
        busy_s += seconds
        percent = script[step % len(script)][-1]
        return seconds, (decodes * percent // 100,) * last.num_draft_tokens

    used = [OFF, *drive(Adaptive(ARMS, caution), 400, context, outcome)]
    switches = sum(before != after for before, after in pairwise(used))
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


def test_beg_mab_has_a_group_of_arms_per_bucket_and_is_off_in_large_batches() -> None:
    arms = [OFF, *(Arm("eagle3", k) for k in (48, 32, 16, 8)), Arm("ngram", 8)]
    bandit = BegMab(arms, random.Random(0))
    of_size = {1: {48}, 2: {32}, 4: {32}, 5: {16}, 20: {16}, 21: {8}, 32: {8}, 33: {0}, 500: {0}}
    for num_decodes, lengths in of_size.items():
        allowed = bandit.arms(num_decodes)
        assert {arm.num_draft_tokens for arm in allowed} == lengths, num_decodes
        assert bandit.decide(StepContext(0, num_decodes, 0, 0)) in allowed
    assert bandit.arms(21) == {Arm("eagle3", 8), Arm("ngram", 8)}
    assert bandit.arms() == set(arms)
    assert BegMab([], random.Random(0)).arms(1) == {OFF}


def test_beg_mab_learns_for_each_batch_size_which_arm_of_the_group_is_faster() -> None:
    fast, slow = Arm("eagle3", 2), Arm("ngram", 2)

    def outcome(step: int, decodes: int, last: Arm, arm: Arm) -> tuple[float, tuple[int, ...]]:
        return 0.01 if (arm == fast) == (decodes == 8) else 0.02, (decodes,) * last.num_draft_tokens

    for num_decodes, best in ((8, fast), (9, slow)):
        bandit = BegMab([fast, slow], random.Random(0))
        used = drive(bandit, 400, lambda step, n=num_decodes: StepContext(step, n, 0, 0), outcome)  # type: ignore[misc]
        assert 0.9 < used.count(best) / len(used) < 1


def test_memory_does_not_grow_with_time() -> None:
    strategy = Adaptive(ARMS)
    sizes = []
    for length in (1000, 5000):
        replay(lambda run: strategy, recorded(), SCENARIOS["drifting"], [[length] * 4], seed=0)
        sizes.append(len(pickle.dumps(strategy)))
    assert sizes[1] < 1.5 * sizes[0]


@pytest.mark.parametrize("name", ["recorded", "h100"])
def test_near_the_oracle(name: str) -> None:
    table = recorded() if name == "recorded" else published_h100()
    work = rollouts(8, 64) if name == "recorded" else rollouts(8, 32, scale=4)
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


@pytest.mark.parametrize("seed", range(3))
def test_ngrams_that_become_good_are_found_beside_a_worthless_drafter(seed: int) -> None:
    """A run without a trained drafter begins like this: n-grams have no text to be found in yet."""
    rng = random.Random(seed)

    def outcome(step: int, decodes: int, last: Arm, arm: Arm) -> tuple[float, tuple[int, ...]]:
        seconds = 0.003 + 0.00005 * decodes * (1 + last.num_draft_tokens) + 0.0033 * (arm != OFF)
        seconds += 0.002 * arm.num_draft_tokens * (arm.drafter == "eagle3")
        chance = 0.0 if last.drafter != "ngram" else 0.05 if step < 250 else 0.7
        accepted = drawn(rng, decodes, last, chance)
        return seconds * rng.uniform(0.9, 1.1), accepted

    strategy = Adaptive([*ARMS, Arm("ngram", 8)])
    used = drive(strategy, 4000, lambda n: StepContext(n, max(1, 32 - n // 8), 0, 0), outcome)
    assert {arm.drafter for arm in used[3900:]} == {"ngram"}


def test_a_new_drafter_is_tried_at_once() -> None:
    def outcome(step: int, decodes: int, last: Arm, arm: Arm) -> tuple[float, tuple[int, ...]]:
        return 0.03 + 0.002 * last.num_draft_tokens, all_accepted(3 * (step >= 300), last)

    strategy = Adaptive([OFF, *EAGLE])
    used = drive(strategy, 400, lambda n: StepContext(n, 4, 0, 0, int(n >= 300)), outcome)
    assert any(arm != OFF for arm in used[300:309])
    assert used[-1].drafter == "eagle3"


def test_nothing_is_tried_while_the_batch_fills_up() -> None:
    used = drive(Adaptive(ARMS), 50, lambda n: StepContext(n, 5, 10, 100), lambda *_: (0.03, ()))
    assert set(used) == {OFF}


def test_a_drafter_is_found_while_prompts_keep_coming() -> None:
    """Continuous batching: nearly every step also prefills a prompt."""
    used = drive(
        Adaptive(ARMS),
        300,
        lambda n: StepContext(n, 8, 1, 100),
        lambda n, _, last, arm: (0.04 + 0.0016 * last.num_draft_tokens, all_accepted(7, last)),
    )
    assert used[-1].drafter == "eagle3"


def test_a_drafter_that_failed_for_long_is_found_soon_after_a_jump() -> None:
    """EAGLE-3 wins over n-grams that became good, too, after many failed trials."""
    rng = random.Random(0)

    def outcome(step: int, decodes: int, last: Arm, arm: Arm) -> tuple[float, tuple[int, ...]]:
        k, good = last.num_draft_tokens, step >= 3000
        seconds = 0.02 + 0.0002 * 8 * k + 0.001 * k * (last.drafter == "eagle3")
        chance = {"off": 0.0, "eagle3": 0.85 * good, "ngram": 0.35 * good}[last.drafter]
        accepted = drawn(rng, 8, last, chance)
        return seconds * rng.uniform(0.95, 1.05), accepted

    used = drive(Adaptive(ARMS), 4000, lambda n: StepContext(n, 8, 0, 0), outcome)
    assert {arm.drafter for arm in used[3700:]} == {"eagle3"}


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
            strategy.observe(made._replace(num_output_tokens=output, drafter_version=version))
            clock_s, tokens, step, verified = clock_s + seconds, tokens + output, step + 1, proposed
            left, turns_hard = still, turns
    return tokens / clock_s
