"""What an environment said in a response is context: it carries no loss, and no place in a mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tlt.contracts import Sample, SampleRequest, SamplingSpec, Scored, Turns  # noqa: E402
from tlt.learner.advantage import grpo  # noqa: E402
from tlt.learner.batch import Groups, TrainSample  # noqa: E402
from tlt.learner.packed_attention import use_packed_attention  # noqa: E402
from tlt.learner.policy import PackedPolicy, PackedRow  # noqa: E402
from tlt.learner.sft import row_loss  # noqa: E402
from tlt.models import tiny  # noqa: E402

CPU = torch.device("cpu")


def sample(size: int, observed: tuple[tuple[int, int], ...], prompt: int = 4) -> TrainSample:
    ids = tuple(range(50, 50 + size))
    logprobs = tuple(-0.01 * place for place in range(size))
    return TrainSample("s", 0, tuple(range(10, 10 + prompt)), ids, logprobs, 0.5, observed)


@st.composite
def masked(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the size of a response, and parts in it that an environment said."""
    size, at, parts = draw(st.integers(1, 40)), 0, []
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(at, size))
        at = draw(st.integers(begin, size))
        parts.append((begin, at))
    return size, tuple(parts)


@given(masked())
def test_drawn_places_are_all_others(made: tuple[int, tuple[tuple[int, int], ...]]) -> None:
    size, parts = made
    one = sample(size, parts)
    drawn = list(one.drawn())
    assert drawn == [p for p in range(size) if not any(a <= p < b for a, b in parts)]
    assert len(drawn) == size - Turns(parts).num_observed
    assert len(one) == size + 4, "all of it is computed"


def test_groups_hand_the_observed_parts_on() -> None:
    request = SampleRequest("1/0/0", (1, 2), SamplingSpec(max_tokens=9))
    whole = Sample("1/0/0", (3,) * 6, (-0.5,) * 6, "stop", "engine-0", 0, 0.0, 0.0, 0.0)
    scored = Scored(0, 0, request, whole, "", 1.0, None, Turns(((2, 5),), 2))
    assert scored.num_drawn == 3
    assert replace(scored, turns=Turns()).num_drawn == 6
    (out,) = Groups(1, grpo).add(scored)
    assert out.observed == ((2, 5),)
    assert list(out.drawn()) == [0, 1, 5]


def test_a_packed_row_has_targets_at_drawn_tokens_only() -> None:
    """Two samples share their prompt; the second begins with what the environment said."""
    first, second = sample(6, ((2, 4),)), sample(4, ((0, 2),))
    row = PackedRow.pack([first, second], [0.25, 0.5], CPU)
    assert row.ids_T.tolist() == [10, 11, 12, 13, *range(50, 56), *range(50, 54)]
    # Place 0 is predicted by the prompt's last token, a later one by the token before it, also
    # where that was observed.
    assert row.source_P.tolist() == [3, 4, 7, 8, 11, 12]
    assert row.target_P.tolist() == [50, 51, 54, 55, 52, 53]
    assert row.engine_logprob_P.tolist() == pytest.approx([0, -0.01, -0.04, -0.05, -0.02, -0.03])
    assert row.weight_P.tolist() == [0.25] * 4 + [0.5] * 2
    assert row.advantage_P.tolist() == [0.5] * 6
    assert row.lengths == (10, 8)
    assert row.position_T.tolist() == [*range(10), *range(4, 8)]


def test_a_row_of_observed_tokens_alone_teaches_nothing() -> None:
    row = PackedRow.pack([sample(5, ((0, 5),))], [1.0], CPU)
    assert len(row.target_P) == 0
    assert len(row.ids_T) == 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("policy"), hidden_size=64, num_layers=3)


def load(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def test_masked_rows_have_the_logprobs_and_gradients_of_samples_alone(model: Path) -> None:
    made = [sample(9, ((3, 6),)), sample(7, ((1, 2), (4, 5))), sample(5, (), prompt=6)]
    plain, packed = load(model), PackedPolicy(load(model), 1.0)
    expected = []
    for each in made:
        ids = torch.tensor([each.prompt_ids + each.response_ids])
        logprobs = plain(ids).logits[0].log_softmax(-1)
        at = len(each.prompt_ids) - 1
        expected += [logprobs[at + p, each.response_ids[p]] for p in each.drawn()]
    found = packed(PackedRow.pack(made, [1.0] * 3, CPU)).logprob_P
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)
    torch.stack(expected).sum().backward()
    found.sum().backward()
    for one, other in zip(plain.parameters(), packed.policy.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-3)


def test_the_supervised_loss_is_that_of_the_policys_parts(model: Path) -> None:
    samples = [
        (list(range(20, 40)), [(4, 8), (12, 20)]),
        (list(range(60, 75)), [(5, 15)]),
    ]
    plain, packed = load(model), load(model)
    losses, hits = [], []
    with torch.no_grad():
        for tokens, parts in samples:
            logits = plain(torch.tensor([tokens])).logits[0]
            for place in (p for begin, end in parts for p in range(begin, end)):
                losses.append(-logits[place - 1].log_softmax(-1)[tokens[place]])
                hits.append(float(logits[place - 1].argmax() == tokens[place]))
        use_packed_attention(packed)
        loss, accuracy = row_loss(packed, samples, "float32")
    assert len(losses) == 4 + 8 + 10
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)
    assert accuracy == pytest.approx(sum(hits) / len(hits))
