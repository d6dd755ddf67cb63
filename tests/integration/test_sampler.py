"""The lean rejection sampler against vLLM's own, on logits made up here; no engine needed."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

VOCAB = 12


def build(drafts: list[list[int]], at: float, logprobs: int = 0, **changes: Any) -> tuple[Any, Any]:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    rows = torch.arange(sum(len(d) + 1 for d in drafts))
    ends = torch.tensor([len(d) + 1 for d in drafts]).cumsum(0)
    is_bonus = torch.zeros(len(rows), dtype=torch.bool)
    is_bonus[ends - 1] = True
    metadata.bonus_logits_indices = rows[is_bonus]
    metadata.target_logits_indices = rows[~is_bonus]
    metadata.cu_num_sampled_tokens = ends.to(torch.int32)
    greedy = at == 0
    settings = {
        "temperature": None if greedy else torch.full((len(drafts),), at),
        "all_greedy": greedy,
        "all_random": not greedy,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": logprobs,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.empty(0),
        "presence_penalties": torch.empty(0),
        "repetition_penalties": torch.empty(0),
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return metadata, SamplingMetadata(**(settings | changes))


def sampler() -> Any:
    from vllm.v1.sample.sampler import Sampler

    from tlt.rollout.vllm.sampler import LeanRejectionSampler

    return LeanRejectionSampler(Sampler())


def test_greedy_tokens_logprobs_and_ranks_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    drafts = [torch.randint(0, 3, (n,), generator=generator).tolist() for n in [3, 0, 1, 4] * 20]
    metadata, sampling = build(drafts, at=0)
    logits = torch.randn(sum(len(d) + 1 for d in drafts), VOCAB, generator=generator)
    logits[:, :3] += 2.0
    out = sampler()(metadata, None, logits.clone(), sampling)
    logprobs = out.logprobs_tensors.logprobs.view(len(drafts), -1)
    ranks = out.logprobs_tensors.selected_token_ranks.view(len(drafts), -1)
    row = num_accepted = 0
    for request, draft in enumerate(drafts):
        best = logits[row : row + len(draft) + 1].argmax(-1).tolist()
        count = 0
        while count < len(draft) and draft[count] == best[count]:
            count += 1
        num_accepted += count
        emitted = best[: count + 1]
        assert out.sampled_token_ids[request].tolist() == emitted + [-1] * (4 - count)
        expected = logits[row : row + count + 1].log_softmax(-1)[range(count + 1), emitted]
        torch.testing.assert_close(logprobs[request, : count + 1], expected)
        assert ranks[request, : count + 1].tolist() == [1] * (count + 1)
        row += len(draft) + 1
    assert num_accepted > 20


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_sequences_follow_the_target(temperature: float) -> None:
    """Test every position of 60,000 requests with two drafts each, by chi-squared."""
    from scipy.stats import chisquare

    lean = sampler()
    num, vocab = 60_000, 4
    generator = torch.Generator().manual_seed(1)
    rows_3V = torch.randn(3, vocab, generator=generator)
    drafts = torch.randint(0, vocab, (num, 2), generator=generator).tolist()
    metadata, sampling = build(drafts, temperature)
    torch.manual_seed(2)
    out = lean(metadata, None, rows_3V.repeat(num, 1), sampling)
    tokens = out.sampled_token_ids
    probs_3V = (rows_3V / temperature).softmax(-1)
    # The rows of a request do not depend on its tokens here, so each position is independent.
    for position in range(3):
        reached = tokens[:, position] >= 0
        counts = torch.bincount(tokens[reached, position].long(), minlength=vocab)
        expected = probs_3V[position] * reached.sum()
        assert (
            chisquare(counts.numpy(), expected.double().numpy() * 1.0, sum_check=False).pvalue
            > 1e-4
        )
    logprobs = out.logprobs_tensors.logprobs.view(num, 3)
    raw = rows_3V.log_softmax(-1)
    assert (logprobs[:, 0] - raw[0][tokens[:, 0].long()]).abs().max() < 1e-5


def test_drafts_are_accepted_as_often_as_the_target_would_say_them() -> None:
    lean = sampler()
    num = 40_000
    probs = torch.tensor([0.6, 0.3, 0.1])
    metadata, sampling = build([[1]] * num, at=1.0)
    torch.manual_seed(0)
    out = lean(metadata, None, probs.log().repeat(2 * num, 1), sampling).sampled_token_ids
    accepted = (out[:, 1] >= 0).float().mean().item()
    assert accepted == pytest.approx(0.3, abs=0.01)


def test_each_request_has_its_own_temperature_whatever_the_others_draft() -> None:
    """Uneven drafts: the shape in which vLLM's CPU build mixes the settings up."""
    lean = sampler()
    rounds, vocab = 20_000, 3
    row = torch.tensor([1.5, 0.5, 0.0])
    temperatures = torch.tensor([0.5, 1.0, 2.0]).repeat(rounds)
    metadata, sampling = build([[0, 0], [1], []] * rounds, 1.0, temperature=temperatures)
    torch.manual_seed(3)
    out = lean(metadata, None, row.repeat(6 * rounds, 1), sampling)
    first = out.sampled_token_ids[:, 0].view(rounds, 3).long()
    for request, temperature in enumerate((0.5, 1.0, 2.0)):
        share = torch.bincount(first[:, request], minlength=vocab) / rounds
        assert (share - (row / temperature).softmax(-1)).abs().max() < 0.015
    # Log-probabilities are the policy's own, before the temperature, at every position.
    tokens = out.sampled_token_ids.flatten().long()
    emitted = tokens >= 0
    expected = row.log_softmax(-1)[tokens.clamp(min=0)]
    got = out.logprobs_tensors.logprobs[:, 0]
    assert (got - expected)[emitted].abs().max() < 1e-5


def test_a_missing_draft_is_never_accepted_and_excludes_nothing() -> None:
    lean = sampler()
    num = 20_000
    probs = torch.tensor([0.2, 0.3, 0.5])
    metadata, sampling = build([[-1]] * num, at=1.0)
    torch.manual_seed(4)
    out = lean(metadata, None, probs.log().repeat(2 * num, 1), sampling).sampled_token_ids
    assert (out[:, 1] == -1).all()
    share = torch.bincount(out[:, 0].long(), minlength=3) / num
    assert (share - probs).abs().max() < 0.015


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": torch.tensor([0.9])},
        {"top_k": torch.tensor([3])},
        {"generators": {0: torch.Generator()}},
        {"no_penalties": False},
        {"max_num_logprobs": 5},
        {"bad_words_token_ids": {0: [[1]]}},
        {"allowed_token_ids_mask": torch.zeros(1, VOCAB, dtype=torch.bool)},
        {"all_random": False},
    ],
)
def test_anything_else_goes_to_vllm(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = "vllm.v1.sample.rejection_sampler.RejectionSampler.forward"
    monkeypatch.setattr(forward, lambda self, *inputs: "vLLM")
    lean, logits = sampler(), torch.zeros(2, VOCAB)
    metadata, plain = build([[1]], at=1.0)
    _, special = build([[1]], at=1.0, **changes)
    assert lean(metadata, None, logits, plain) != "vLLM"
    assert lean(metadata, None, logits, special) == "vLLM"
