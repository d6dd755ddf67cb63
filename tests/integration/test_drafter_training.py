"""Training on the hidden states of a real (tiny) policy, without an engine."""

from dataclasses import replace
from pathlib import Path

import pytest
from learning import PROMPT_TOKENS, tiny_samples, train_tiny

from tlt.drafter.evaluation import evaluate_samples
from tlt.states.captured import Captured


@pytest.fixture(scope="module")
def samples(tiny: Path) -> list[Captured]:
    return tiny_samples(tiny, 128)


@pytest.fixture(scope="module")
def held_out(tiny: Path) -> list[Captured]:
    return tiny_samples(tiny, 16, seed=1)


def shifted(sample: Captured) -> Captured:
    """Return the sample with the hidden states of the token before: an off-by-one mistake."""
    return replace(
        sample,
        aux_TA=sample.aux_TA.roll(1, 0),
        final_TH=sample.final_TH.roll(1, 0),
    )


def test_a_shift_of_the_states_by_one_is_seen_in_the_metric(
    tiny: Path, samples: list[Captured], held_out: list[Captured]
) -> None:
    aligned = train_tiny(tiny, samples, num_steps=60)
    wrong = train_tiny(tiny, [shifted(s) for s in samples], num_steps=60)
    good = evaluate_samples(aligned.passes, held_out, [0.0]).length(0.0)
    assert good > 1.5
    assert evaluate_samples(wrong.passes, held_out, [0.0]).length(0.0) - 1 < 0.5 * (good - 1)
    # And a good drafter fed with shifted states shows it at once.
    fed = evaluate_samples(aligned.passes, [shifted(s) for s in held_out], [0.0]).length(0.0)
    assert fed - 1 < 0.5 * (good - 1)


def test_the_expected_length_is_the_mean_length_of_accepted_drafts(
    tiny: Path, samples: list[Captured], held_out: list[Captured]
) -> None:
    """The expected length equals the plain count of drafts in a row that equal the text."""
    import torch

    from tlt.drafter.passes import Row

    trainer = train_tiny(tiny, samples, num_steps=60)
    at_one = held_out[: len(held_out) // 2]  # the half sampled at temperature 1
    expected = evaluate_samples(trainer.passes, at_one, [1.0]).length(1.0)
    accepted = chains = 0
    with torch.no_grad():
        for sample in at_one:
            row = Row([sample])
            starts = row.chains.starts
            whole = starts + 1 + trainer.settings.num_draft_tokens < len(sample)
            run = torch.ones_like(starts, dtype=torch.bool)
            for step, hidden in enumerate(trainer.passes.unroll(row)):
                drafts = trainer.drafter.lm_head(hidden).argmax(-1)
                run &= drafts == row.token_ids_T[(starts + 2 + step).clamp(max=len(sample) - 1)]
                accepted += int((run & whole).sum())
            chains += int(whole.sum())
    assert len(at_one[0]) == PROMPT_TOKENS + 120
    assert expected == pytest.approx(1 + accepted / chains, abs=0.15)
