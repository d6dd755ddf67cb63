"""The supervised start, on a model of a few thousand weights."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tlt.hardware import compute_dtype  # noqa: E402
from tlt.learner.packed_attention import use_packed_attention  # noqa: E402
from tlt.learner.sft import SftSettings, SftStep, supervised_start  # noqa: E402

SETTINGS = SftSettings(
    num_steps=500, row_tokens=64, lr=1e-4, budget_s=inf, seed=0, dtype=compute_dtype()
)


def policy(kind: str = "Llama") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_a_packed_row_equals_each_sample_alone(kind: str) -> None:
    model = policy(kind)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(0, 40, (n,), generator=generator) for n in (7, 3, 12)]
    with torch.no_grad():
        alone = torch.cat([model.model(s[None]).last_hidden_state[0] for s in samples])
        use_packed_attention(model)
        packed = model.model(
            torch.cat(samples)[None],
            position_ids=torch.cat([torch.arange(len(s)) for s in samples])[None],
            segment_lengths=[7, 3, 12],
            use_cache=False,
        ).last_hidden_state[0]
    assert (packed - alone).abs().max() < 1e-5


def test_it_learns_the_solutions_and_not_the_prompts() -> None:
    """Responses count upwards from the prompt's last token; prompts are noise."""
    generator = torch.Generator().manual_seed(2)
    samples = []
    for length in torch.randint(4, 12, (200,), generator=generator).tolist():
        prompt = torch.randint(0, 20, (4,), generator=generator).tolist()
        samples.append((prompt + [prompt[-1] + 1 + i for i in range(length)], [(4, 4 + length)]))
    steps: list[SftStep] = []
    settings = replace(SETTINGS, num_steps=60, row_tokens=256, lr=1e-2)
    supervised_start(policy(), samples, settings, steps.append)
    assert steps[0].accuracy < 0.2
    assert steps[-1].accuracy > 0.9
    assert len(steps) == 60


def test_it_keeps_to_its_time() -> None:
    now = iter(range(1000))
    steps: list[SftStep] = []
    supervised_start(
        policy(),
        [(list(range(10)), [(2, 10)])],
        replace(SETTINGS, budget_s=30.0),
        steps.append,
        clock=lambda: float(next(now)),
    )
    assert 5 < len(steps) < 30
    assert steps[-1].progress < 1
