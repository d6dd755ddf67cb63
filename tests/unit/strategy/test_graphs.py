"""The plan's own rules; that vLLM agrees is checked in tests/integration/test_graph_plan.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_model import Graph, cases, full_share, graph_for, graphs_of
from tlt.contracts import OFF, Arm
from tlt.strategy.graphs import STEPS_PER_DOUBLING, Choices, GraphPlan, choices_of
from tlt.strategy.spec import build_strategy, complete_strategy


def eagle(*lengths: int) -> frozenset[Arm]:
    return frozenset(Arm("eagle3", k) if k else OFF for k in lengths)


@st.composite
def any_choices(draw: st.DrawFn) -> tuple[Choices, int]:
    limits = draw(st.lists(st.integers(1, 96), min_size=1, max_size=3, unique=True).map(sorted))
    lengths = st.sets(st.integers(0, 8), min_size=1, max_size=4)
    return [(limit, eagle(*draw(lengths))) for limit in limits], limits[-1]


@settings(max_examples=60, deadline=None)
@given(any_choices(), st.sampled_from(["v1", "v2"]))
def test_every_choice_has_a_graph_with_little_padding(
    given_choices: tuple[Choices, int], runner: str
) -> None:
    choices, max_num_seqs = given_choices
    plan = GraphPlan.for_arms(choices, max_num_seqs)
    graphs = graphs_of(plan, runner)
    for num_decodes, arm in cases(plan):
        query_len = arm.num_draft_tokens + 1
        num_tokens = num_decodes * query_len
        graph = graph_for(graphs, num_decodes, arm)
        assert graph is not None
        most = num_tokens * (1 + 1 / STEPS_PER_DOUBLING) + query_len
        assert num_tokens <= graph.num_tokens < most
    # The drafter's later passes: a token a request, no more than there are requests.
    assert max_num_seqs in plan.sizes


@settings(max_examples=60, deadline=None)
@given(any_choices(), st.integers(1, 400))
def test_no_size_is_beyond_what_one_step_may_hold(
    given_choices: tuple[Choices, int], max_num_batched_tokens: int
) -> None:
    choices, max_num_seqs = given_choices
    plan = GraphPlan.for_arms(choices, max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert plan.sizes[-1] <= max_num_batched_tokens
    graphs = graphs_of(plan)
    for num_decodes, arm in cases(plan):
        fits = num_decodes * (arm.num_draft_tokens + 1) <= max_num_batched_tokens
        assert (graph_for(graphs, num_decodes, arm) is not None) == fits


@pytest.mark.parametrize("max_num_seqs", [7, 64, 200, 256])
def test_lengths_with_a_small_common_multiple_get_full_graphs(max_num_seqs: int) -> None:
    def share(*lengths: int) -> float:
        return full_share(GraphPlan.for_arms([(max_num_seqs, eagle(*lengths))], max_num_seqs))

    for powers_of_two in [(0,), (4,), (0, 1, 3), (0, 1, 3, 7), (1, 3)]:
        assert share(*powers_of_two) == 1.0, powers_of_two
    for on_and_off in [(0, 2), (0, 4), (0, 6)]:
        assert share(*on_and_off) > 0.9, on_and_off
    assert share(*range(9)) < 0.9 or max_num_seqs < 8


def test_every_batch_has_a_full_graph_for_the_draft_lengths_of_gpus() -> None:
    for drafters in (["eagle3"], ["ngram"], ["eagle3", "ngram"]):
        spec = complete_strategy({"kind": "adaptive"}, drafters, on_gpu=True)
        gpu = GraphPlan.for_arms([(256, build_strategy(spec).arms())], 256)
        assert full_share(gpu) == 1.0
        assert len(graphs_of(gpu)) <= 152
    spec = complete_strategy({"kind": "adaptive"}, ["eagle3"])
    cpu = GraphPlan.for_arms([(256, build_strategy(spec).arms())], 256)
    assert full_share(cpu) < 0.7
    assert len(graphs_of(cpu)) == 209


def test_sizes_of_plain_decoding() -> None:
    plan = GraphPlan.for_arms([(48, eagle(0))], 48, mixed_tokens=0)
    assert plan.sizes == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
    assert graph_for(graphs_of(plan), 33, OFF) == Graph(40, 1)
    assert plan.compilation_config()["cudagraph_capture_sizes"] == list(plan.sizes)
    fixed = GraphPlan.for_arms([(8, eagle(4))], 8, mixed_tokens=0)
    assert fixed.sizes == (5, 8, 10, 15, 20, 25, 30, 35, 40)


def test_the_older_runner_has_full_graphs_only_without_drafts() -> None:
    assert full_share(GraphPlan.for_arms([(16, eagle(0, 1))], 16), "v1") == 0.0
    assert full_share(GraphPlan.for_arms([(16, eagle(0))], 16), "v1") == 1.0


def test_the_schedule_names_every_draft_length() -> None:
    plan = GraphPlan.for_arms([(4, eagle(6)), (64, eagle(0, 2))], 64)
    assert plan.draft_schedule() == [[1, 1, 0], [2, 2, 2], [3, 1_000_000, 6]]
    crowded = GraphPlan.for_arms([(2, eagle(0, 2, 6))], 2)
    assert crowded.draft_schedule() == [[1, 1, 2], [2, 1_000_000, 6]]
    assert graph_for(graphs_of(crowded), 1, OFF) in {Graph(size) for size in crowded.sizes}


def test_choices_of_strategies() -> None:
    schedule = [[4, 4], [16, 2]]
    table = build_strategy({"kind": "by_batch_size", "drafter": "eagle3", "schedule": schedule})
    assert choices_of(table, 64) == [(4, eagle(4)), (16, eagle(2)), (64, eagle(0))]
    assert choices_of(table, 10) == [(4, eagle(4)), (10, eagle(2))]
    arms = build_strategy({"kind": "random", "arms": [["off", 0], ["eagle3", 3]]})
    assert choices_of(arms, 64) == [(64, eagle(0, 3))]
    bandit = build_strategy({"kind": "beg_mab", "arms": [["eagle3", k] for k in (1, 7)]})
    assert choices_of(bandit, 64) == [(4, eagle(7)), (32, eagle(1)), (64, eagle(0))]


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [(8, eagle(0))],
        [(64, eagle(1)), (8, eagle(0))],
        [(0, eagle(0)), (64, eagle(0))],
        [(8, frozenset()), (64, eagle(0))],
    ],
)
def test_choices_reach_every_slot_and_each_bucket_has_an_arm(choices: Choices) -> None:
    with pytest.raises(ValueError, match="choices"):
        GraphPlan.for_arms(choices, 64)
