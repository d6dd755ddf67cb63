"""A packed row gives every sample the same result as a forward pass of that sample alone."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tlt.learner import policy as policy_module  # noqa: E402
from tlt.learner.batch import TrainSample  # noqa: E402
from tlt.learner.policy import PackedPolicy, PackedRow  # noqa: E402
from tlt.models import tiny  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy")
    return tiny.make(out, hidden_size=64, num_layers=6)


def load(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 250, (count,), generator=generator).tolist())

    made = []
    for group, (prompt, responses) in enumerate([(7, (5, 1, 12)), (3, (9,)), (11, (2, 20))]):
        prompt_ids = ids(prompt)
        made += [
            TrainSample(f"{group}/{k}", group, prompt_ids, ids(n), (-1.0,) * n, 0.5 * k)
            for k, n in enumerate(responses)
        ]
    return made


def alone(policy: Any, sample: TrainSample, temperature: float) -> Any:
    """Return the reference: log-probabilities from one forward pass of the whole sample."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = policy(ids).logits[0] / temperature
    first = len(sample.prompt_ids)
    chosen = torch.tensor(sample.response_ids)
    return logits[first - 1 : -1].log_softmax(-1).gather(1, chosen[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradients_equal_those_of_samples_alone(
    model: Path, temperature: float
) -> None:
    plain, shared = load(model), PackedPolicy(load(model), temperature)
    expected = torch.cat([alone(plain, s, temperature) for s in samples()])
    row = PackedRow.pack(samples(), [1.0] * 6, CPU)
    assert len(row.ids_T) == 7 + 18 + 3 + 9 + 11 + 22  # every prompt once
    output = shared(row)
    torch.testing.assert_close(output.logprob_P, expected, atol=1e-5, rtol=1e-4)
    (expected * row.advantage_P).sum().backward()
    (output.logprob_P * row.advantage_P).sum().backward()
    for (name, one), other in zip(
        plain.named_parameters(), shared.policy.parameters(), strict=True
    ):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_states_are_those_of_samples_alone(model: Path) -> None:
    layers = (1, 3, 4)
    plain, shared = load(model), PackedPolicy(load(model), 1.0, layers)
    row = PackedRow.pack(samples(), [1.0] * 6, CPU)
    output = shared(row, with_states=True)
    assert row.unshare_E is not None
    assert output.aux_TA is not None
    assert output.final_TH is not None
    aux = output.aux_TA[row.unshare_E].float().split(list(row.lengths))
    final = output.final_TH[row.unshare_E].float().split(list(row.lengths))
    for sample, own_aux, own_final in zip(samples(), aux, final, strict=True):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        states = plain.model(ids, output_hidden_states=True)
        expected = torch.cat([states.hidden_states[i][0] for i in layers], -1)
        torch.testing.assert_close(own_aux, expected, atol=2e-2, rtol=2e-2)  # kept in bfloat16
        torch.testing.assert_close(own_final, states.last_hidden_state[0], atol=2e-2, rtol=2e-2)


def test_logits_in_chunks_are_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = PackedPolicy(load(model), 1.0)
    row = PackedRow.pack(samples(), [1.0] * 6, CPU)
    whole = shared(row).logprob_P
    monkeypatch.setattr(policy_module, "HEAD_CHUNK_TOKENS", 7)
    torch.testing.assert_close(shared(row).logprob_P, whole, atol=1e-6, rtol=1e-5)


def test_an_empty_row_teaches_nothing_but_reaches_every_parameter(model: Path) -> None:
    shared = PackedPolicy(load(model), 1.0)
    output = shared(PackedRow.pack([], [], CPU))
    assert len(output.logprob_P) == 0
    output.logprob_P.sum().backward()
    for name, parameter in shared.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
