"""A packed row gives every sample the same result as a forward pass of that sample alone."""

import inspect
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.nn.attention import varlen  # noqa: E402

from tlt.learner import packed_attention  # noqa: E402
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


def test_states_of_a_repeated_forward_pass_are_not_kept(model: Path) -> None:
    """The backward pass of a checkpointed layer runs its forward pass again."""
    policy = load(model)
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    shared = PackedPolicy(policy, 1.0, (1, 3, 4)).train()
    output = shared(PackedRow.pack(samples(), [1.0] * 6, CPU), with_states=True)
    output.logprob_P.sum().backward()
    assert output.aux_TA is not None
    assert not shared._seen


def test_logits_in_chunks_are_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = PackedPolicy(load(model), 1.0)
    row = PackedRow.pack(samples(), [1.0] * 6, CPU)
    whole = shared(row).logprob_P
    monkeypatch.setattr(policy_module, "HEAD_CHUNK_TOKENS", 7)
    torch.testing.assert_close(shared(row).logprob_P, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_is_that_of_the_distributions_sampled_from(
    model: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of any size, and without a trace in the gradients."""
    plain, expected = load(model), 0.0
    for sample in samples():
        logits = plain(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0]
        of_responses = logits[len(sample.prompt_ids) - 1 : -1] / temperature
        expected += torch.distributions.Categorical(logits=of_responses).entropy().sum().item()
    shared = PackedPolicy(load(model), temperature)
    row = PackedRow.pack(samples(), [1.0] * 6, CPU)
    assert shared(row).entropy_sum == 0.0
    assert shared(row, with_entropy=True).entropy_sum == pytest.approx(expected, rel=1e-4)
    monkeypatch.setattr(policy_module, "HEAD_CHUNK_TOKENS", 7)
    monkeypatch.setattr(policy_module, "ENTROPY_TOKENS", 3)
    output = shared(row, with_entropy=True)
    assert output.entropy_sum == pytest.approx(expected, rel=1e-4)
    output.logprob_P.sum().backward()  # the chunks are computed again
    assert shared(PackedRow.pack([], [], CPU), with_entropy=True).entropy_sum == 0.0


def test_an_empty_row_teaches_nothing_but_reaches_every_parameter(model: Path) -> None:
    shared = PackedPolicy(load(model), 1.0)
    output = shared(PackedRow.pack([], [], CPU))
    assert len(output.logprob_P) == 0
    output.logprob_P.sum().backward()
    for name, parameter in shared.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def by_samples(
    query_TND: Any, key_TKD: Any, value_TKD: Any, *args: Any, scale: float, **options: Any
) -> Any:
    """Compute what `varlen_attn` computes, sample by sample, and check how it was called."""
    call = inspect.signature(varlen.varlen_attn).bind(
        query_TND, key_TKD, value_TKD, *args, scale=scale, **options
    )
    given = call.arguments
    assert given["window_size"] == (-1, 0), "causal"
    assert given["enable_gqa"]
    ends = given["cu_seq_q"]
    assert ends is given["cu_seq_k"]
    assert ends.dtype == torch.int32
    assert ends[-1] == len(query_TND) == len(key_TKD)
    lengths = ends.diff().tolist()
    assert given["max_q"] == given["max_k"] == max(lengths)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in one),
            is_causal=True, scale=scale, enable_gqa=True,
        )[0].transpose(0, 1)
        for one in zip(*(t.split(lengths) for t in (query_TND, key_TKD, value_TKD)), strict=True)
    ]  # fmt: skip
    return torch.cat(parts)


def test_the_kernel_is_called_with_every_sample_whole(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "varlen_attn", by_samples)
    loop, kernel = PackedPolicy(load(model), 1.0), PackedPolicy(load(model), 1.0, (), True)
    for chosen in (samples(), samples()[3:4], []):  # shared prompts, one sample, an empty row
        row = PackedRow.pack(chosen, [1.0] * len(chosen), CPU)
        results = []
        for policy in (loop, kernel):
            policy.zero_grad()
            logprob_P = policy(row).logprob_P
            logprob_P.sum().backward()
            results.append([logprob_P.detach(), *(p.grad for p in policy.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-3)


def test_the_kernel_is_for_half_precision_on_gpus() -> None:
    gpu = torch.device("cuda")
    assert packed_attention.has_kernel(gpu, torch.bfloat16)
    assert not packed_attention.has_kernel(gpu, torch.float32)
    assert not packed_attention.has_kernel(CPU, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_on_a_gpu_computes_what_the_loop_computes(model: Path) -> None:
    gpu = torch.device("cuda")
    row = PackedRow.pack(samples(), [1.0] * 6, gpu)
    found = []
    for kernel in (False, True):
        policy = PackedPolicy(load(model).to(gpu, torch.bfloat16), 1.0, (), kernel)
        found.append(policy(row).logprob_P.float())
    torch.testing.assert_close(found[1], found[0], atol=0.1, rtol=0.05)
