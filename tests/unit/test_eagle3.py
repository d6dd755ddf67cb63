"""The draft model by itself; its agreement with vLLM is tested on real engines."""

import pytest

torch = pytest.importorskip("torch")

from tlt.drafter.checkpoint import drafter_weights, load_drafter, save_drafter  # noqa: E402
from tlt.drafter.eagle3.config import Eagle3Config, default_aux_layers  # noqa: E402
from tlt.drafter.eagle3.loss import unrolled_loss  # noqa: E402
from tlt.drafter.eagle3.model import Eagle3Drafter  # noqa: E402
from tlt.drafter.warmup import draft_vocabulary  # noqa: E402

CONFIG = Eagle3Config(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=20,
    aux_layer_ids=(1, 2, 3),
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
)


def drafter() -> Eagle3Drafter:
    torch.manual_seed(0)
    model = Eagle3Drafter(CONFIG)
    model.set_draft_vocabulary(torch.arange(0, 40, 2))
    return model


def inputs(length: int):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(1, length, 96, generator=generator)
    embeds = torch.randn(1, length, 32, generator=generator)
    mask = torch.ones(length, length, dtype=torch.bool).tril().unsqueeze(0)
    return aux, embeds, mask, torch.arange(length).unsqueeze(0)


@pytest.mark.parametrize("num_layers", range(3, 40))
def test_aux_layers_are_three_different_ones(num_layers: int) -> None:
    layers = default_aux_layers(num_layers)
    assert len(set(layers)) == 3
    assert list(layers) == sorted(layers)
    assert 0 <= layers[0] <= layers[-1] < num_layers


def test_vllms_defaults_where_they_make_sense() -> None:
    assert default_aux_layers(30) == (2, 15, 27)


def test_unrolling_equals_drafting_one_chain_by_hand() -> None:
    """Pass j of the chain at s, computed alone: pass 0 over 0..s, then one token at a time."""
    model, (aux, embeds, mask, position) = drafter(), inputs(9)
    unrolled = model.unroll(aux, embeds, mask, position, 3)
    s = 5
    # Truncating everything after the chain's inputs must not change the chain.
    short = [t[:, : s + 1] if t.ndim == 3 else t for t in (aux,)]
    longer = model.unroll(
        torch.cat([short[0], torch.randn(1, 3, 96)], 1), embeds, mask, position, 3
    )
    for step in range(3):
        torch.testing.assert_close(unrolled[step][0, s], longer[step][0, s])


def test_no_peeking_into_the_future() -> None:
    model, (aux, embeds, mask, position) = drafter(), inputs(8)
    reference = model.unroll(aux, embeds, mask, position, 2)
    changed = embeds.clone()
    changed[:, 6:] += 1.0
    other = model.unroll(aux, changed, mask, position, 2)
    torch.testing.assert_close(reference[0][:, :6], other[0][:, :6])
    torch.testing.assert_close(reference[1][:, :5], other[1][:, :5])
    assert not torch.allclose(reference[1][:, 5], other[1][:, 5])


def test_loss_is_lowest_at_the_targets_own_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(1, 6, 20, generator=generator)
    vocabulary = torch.arange(0, 40, 2)
    argmax = vocabulary[target.argmax(-1)]
    mask = torch.ones(1, 6, dtype=torch.bool)
    perfect = [torch.cat([target[:, k:], torch.zeros(1, k, 20)], 1) for k in (1, 2)]
    best = unrolled_loss(perfect, target, argmax, vocabulary, mask)
    worse = unrolled_loss([p + torch.randn(p.shape) for p in perfect], target, argmax,
                          vocabulary, mask)  # fmt: skip
    assert best.agreement == [1.0, 1.0]
    assert best.loss < worse.loss


def test_folder_round_trip(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = drafter()
    save_drafter(model, tmp_path, torch.float32)
    loaded = load_drafter(tmp_path)
    assert loaded.config == CONFIG
    assert loaded.draft_token_ids().tolist() == list(range(0, 40, 2))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert "d2t" in drafter_weights(model, torch.float32)


def test_draft_vocabulary_is_what_responses_use() -> None:
    samples = [([9, 9, 9, 3, 3, 5], 2), ([7, 5, 5, 5], 1)]
    assert draft_vocabulary(samples, 12, 3).tolist() == [3, 5, 9]
    assert draft_vocabulary(samples, 12, 5).tolist() == [0, 1, 3, 5, 9]
