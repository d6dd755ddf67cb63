"""Training on the hidden states of a real (tiny) policy, without an engine."""

from pathlib import Path

import pytest
from learning import PROMPT_TOKENS, tiny_samples, train_tiny

from tlt.drafter.evaluation import evaluate_samples


def test_the_expected_length_is_the_mean_length_of_accepted_drafts(tiny: Path) -> None:
    """The expected length equals the plain count of drafts in a row that equal the text.

    Drafts are drawn with noise with which the policy draws the text.
    """
    import torch

    from tlt.drafter.agreement import DRAFT_NOISE
    from tlt.drafter.passes import Row

    trainer = train_tiny(tiny, tiny_samples(tiny, 128), num_steps=60)
    held_out = tiny_samples(tiny, 16, seed=1)
    # A shift of the states by one would show here.
    assert evaluate_samples(trainer.passes, held_out, [0.0]).length(0.0) > 1.5
    at_one = held_out[: len(held_out) // 2]  # the half sampled at temperature 1
    expected = evaluate_samples(trainer.passes, at_one, [1.0]).length(1.0)
    accepted = chains = 0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for sample in at_one:
            row = Row([sample])
            starts = row.chains.starts
            whole = starts + 1 + trainer.settings.num_draft_tokens < len(sample)
            run = torch.ones_like(starts, dtype=torch.bool)
            final_CH = row.final_TH[starts + 1]
            log_p_CV = trainer.passes.project(final_CH, trainer.passes.head_VH).log_softmax(-1)
            # Noise given that the text's token wins: its sum with log p is the largest one.
            spent_CV = torch.empty_like(log_p_CV).exponential_(generator=generator)
            best_C1 = torch.empty(len(starts), 1).exponential_(generator=generator)
            noise_CV = -(best_C1 + spent_CV / log_p_CV.exp()).log() - log_p_CV
            text_C1 = row.token_ids_T[starts + 2][:, None]
            noise_CV.scatter_(1, text_C1, -best_C1.log() - log_p_CV.gather(1, text_C1))
            for step, hidden in enumerate(trainer.passes.unroll(row)):
                place = torch.searchsorted(starts, starts + step).clamp(max=len(starts) - 1)
                logits = trainer.drafter.lm_head(hidden) / DRAFT_NOISE
                drafts = (logits + noise_CV[place]).argmax(-1)
                run &= drafts == row.token_ids_T[(starts + 2 + step).clamp(max=len(sample) - 1)]
                accepted += int((run & whole).sum())
            chains += int(whole.sum())
    assert len(at_one[0]) == PROMPT_TOKENS + 120
    assert expected == pytest.approx(1 + accepted / chains, abs=0.15)
