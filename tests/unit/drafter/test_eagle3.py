"""The draft model by itself; its agreement with vLLM is tested on real engines."""

import math

import pytest

pytest.importorskip("torch")

import torch
from drafter_fixtures import CONFIG, captured, drafter

from tlt.drafter import vocabulary
from tlt.drafter.agreement import DRAFT_NOISE, LIKELIEST, joint_log_chances
from tlt.drafter.eagle3.config import Eagle3Config, default_aux_layers
from tlt.drafter.eagle3.model import Eagle3Drafter, unrolled_loss
from tlt.drafter.evaluation import Acceptance, AcceptanceMeter, Drafted, PolicyOutput
from tlt.drafter.passes import Row
from tlt.states.captured import Captured


def test_aux_layers_are_three_different_ones_and_vllms_in_deep_models() -> None:
    for num_layers in range(3, 40):
        layers = default_aux_layers(num_layers)
        assert len(set(layers)) == 3
        assert [0, *sorted(layers), num_layers - 1] == sorted([0, *layers, num_layers - 1])
    assert default_aux_layers(30) == (2, 15, 27)


def test_config_of_a_qwen_target_takes_its_head_size() -> None:
    from transformers import Qwen3Config

    rope = {"rope_type": "default", "rope_theta": 1e6}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    target = Qwen3Config(hidden_size=64, num_hidden_layers=8, rope_parameters=rope, **sizes)
    config = Eagle3Config.for_target(target, 100)
    assert (config.head_dim, config.rope_theta) == (32, 1e6)
    assert Eagle3Config.from_hf(config.to_hf("bfloat16")) == config


# --- unrolling ------------------------------------------------------------------------------------


def by_hand(
    model: Eagle3Drafter, sample: Captured, embeds: torch.Tensor, start: int, steps: int
) -> list[torch.Tensor]:
    """Compute one chain pass by pass, with a key-value cache, as an engine does."""
    layer = model.midlayer
    aux = sample.aux_TA[: start + 1]
    hidden = model.fc(aux)
    position = torch.arange(start + 1)
    x = torch.cat([layer.input_layernorm(embeds[: start + 1]), layer.hidden_norm(hidden)], -1)
    keys, values = layer.self_attn.keys_values(x, position)
    hidden, x, position = hidden[-1:], x[-1:], position[-1:]
    outputs = []
    for step in range(steps):
        if step:
            x = torch.cat(
                [layer.input_layernorm(embeds[start + step][None]), layer.hidden_norm(hidden)], -1
            )
            key, value = layer.self_attn.keys_values(x, position)
            keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        query = layer.self_attn.queries(x, position)
        weights = (query @ keys.transpose(-1, -2) / math.sqrt(CONFIG.head_dim)).softmax(-1)
        attended = layer.self_attn.o_proj((weights @ values).transpose(0, 1).flatten(1))
        hidden = hidden + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        outputs.append(model.norm(hidden)[0])
        position = position + 1
    return outputs


def test_unrolling_equals_drafting_each_chain_alone() -> None:
    model, sample = drafter(), captured(9, num_prompt=3)
    embeds = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    row = Row([sample])
    unrolled = model.unroll(sample.aux_TA, embeds, row.position_T, row.chains, 3)
    assert row.chains.starts.tolist() == [1, 2, 3, 4, 5, 6]
    for chain, start in enumerate(row.chains.starts.tolist()):
        alone = by_hand(model, sample, embeds, start, min(3, 9 - start))
        for step, expected in enumerate(alone):
            torch.testing.assert_close(unrolled[step][chain], expected)


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[7, 3, 12, 5], [40, 4, 4], [300, 20, 290]])
def test_packed_equals_unpacked(lengths: list[int]) -> None:
    model = drafter()
    samples = [captured(n, num_prompt=1 + n // 4, seed=n) for n in lengths]
    samples.insert(1, captured(6, num_prompt=6))  # without chains
    embedding = torch.randn(CONFIG.vocab_size, 32, generator=torch.Generator().manual_seed(2))

    def outputs(group: list[Captured]) -> list[torch.Tensor]:
        row = Row(group)
        embeds = embedding[row.token_ids_T.roll(-1)]
        result = model.unroll(row.aux_TA, embeds, row.position_T, row.chains, 4)
        return [out[row.learned(step)] for step, out in enumerate(result)]

    packed = outputs(samples)
    alone = [outputs([sample]) for sample in samples if sample.num_chains]
    for step in range(4):
        expected = torch.cat([one[step] for one in alone])
        assert (packed[step] - expected).abs().max() < 1e-5


def test_chains_start_where_the_token_after_next_is_learned() -> None:
    row = Row([captured(6, num_prompt=3), captured(5, num_prompt=1)])
    assert row.chains.starts.tolist() == [1, 2, 3, 6, 7, 8]
    assert row.chains.ends.tolist() == [6, 6, 6, 11, 11, 11]
    assert row.learned(0).all()
    assert row.learned(1).tolist() == [True, True, False, True, True, False]
    window = Row([captured(20, num_prompt=4).window(10, 16)])
    assert window.position_T.tolist() == list(range(10, 16))


# --- loss and metrics -----------------------------------------------------------------------------


def test_loss_is_lowest_at_the_targets_own_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(6, 20, generator=generator) for _ in range(2)]
    probs = [x.softmax(-1) for x in logits]
    best = unrolled_loss(logits, probs)
    entropy = [-(p * p.log()).sum(-1).mean() for p in probs]
    torch.testing.assert_close(best, (entropy[0] + 0.8 * entropy[1]) / 1.8)
    assert best < unrolled_loss([x + torch.randn(x.shape) for x in logits], probs)


def test_expected_acceptance_length() -> None:
    acceptance = Acceptance(agreement=(), rates={1.0: (0.5, 0.5), 0.0: (1.0, 1.0, 1.0, 1.0)})
    assert acceptance.length(1.0) == pytest.approx(1 + 0.5 + 0.25)
    assert acceptance.length(0.0) == 5


def test_the_meter_averages_chances_of_equal_draws() -> None:
    """A drafter with the policy's logits is always right, once its noise is the policy's."""
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]))
    meter = AcceptanceMeter(2, [0.0, 1.0])
    policy = PolicyOutput.of(logits, [0.0, 1.0])
    best, text = logits.argmax(-1), torch.tensor([0, 2])
    same = Drafted(DRAFT_NOISE * logits, best, torch.arange(3))
    reached = meter.add(0, same, policy, text, {t: torch.ones(2) for t in (0.0, 1.0)})
    torch.testing.assert_close(reached, {0.0: torch.tensor([1.0, 0]), 1.0: torch.ones(2)})
    lacking = Drafted(torch.zeros(2, 1), torch.tensor([2, 2]), torch.tensor([-1, -1, 0]))
    reached = meter.add(1, lacking, policy, text, reached)
    result = meter.result()
    assert result.agreement == (1.0, 0.0)
    assert result.rates[0.0] == (1.0, 0.0)
    assert result.rates[1.0] == pytest.approx((1.0, (0.1 + 0.3) / 2))
    torch.testing.assert_close(reached[1.0], torch.tensor([0.0, 1]))


@pytest.mark.parametrize("scale", [0.3, 1.5])
def test_the_chance_of_equal_draws_is_what_counting_finds(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = (3 * torch.randn(200, generator=generator)).log_softmax(-1)
    log_q = (log_p + scale * torch.randn(200, generator=generator)).log_softmax(-1)
    log_q[3] = -torch.inf  # a token that the drafter lacks
    noise = -torch.empty(20_000, 200).exponential_(generator=generator).log()
    drawn, drafted = (log_p + noise).argmax(-1), (log_q + noise).argmax(-1)
    top_p, likeliest = log_p.topk(LIKELIEST)
    joint = joint_log_chances(top_p, log_q[likeliest]).exp()
    assert joint.sum().item() == pytest.approx((drawn == drafted).float().mean().item(), abs=0.015)
    counted = ((drawn == drafted) & (drawn == likeliest[0])).float().mean().item()
    assert joint[0].item() == pytest.approx(counted, abs=0.015)


# --- folders and vocabulary -----------------------------------------------------------------------


def test_draft_vocabulary_is_what_responses_use() -> None:
    counts = vocabulary.count_tokens([torch.tensor([9, 3, 3, 5]), torch.tensor([5, 9, 9])], 12)
    assert vocabulary.choose(counts, 3).tolist() == [3, 5, 9]
    assert vocabulary.choose(counts, 5).tolist() == [0, 1, 3, 5, 9]
    assert vocabulary.coverage(counts, torch.tensor([3, 5])) == pytest.approx(4 / 7)


def test_vocabulary_changes_only_when_that_covers_more() -> None:
    def better(counts: list[float], present: list[int]) -> list[int] | None:
        found = vocabulary.drifted(torch.tensor(counts), torch.tensor(present))
        return None if found is None else found.tolist()

    assert better([0.0, 100, 100, 1, 0], [1, 2]) is None
    assert better([0.0, 100, 100, 1, 0], [1, 3]) == [1, 2]
    assert better([0.0, 1000, 1, 2], [1, 2]) is None
    # Tokens that no sample shows stay before tokens that were never in the vocabulary.
    assert better([0.0, 0, 0, 5, 0, 1, 0], [4, 6]) == [3, 5]
    assert better([0.0, 0, 0, 5, 0, 0, 0], [4, 6]) == [3, 4]
