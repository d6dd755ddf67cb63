"""How far a drafter is from its policy, and what each way to draft could get from it.

    python benchmarks/distance.py [--problems 256]

The policy of `tlt models words` answers word problems at three temperatures, and the drafter of
benchmarks/emulated.py drafts for these samples. For each place in a draft, means over all places
where a draft may begin, given that the tokens before it were accepted:

- the entropy of the policy p, and the total variation of p and the drafter q,
- how often a draft equals the policy's draw, if the drafter draws with a share of the noise: by the
  formula for two draws with the same Gumbel noise (`share 1`), and counted (`counted`, all of it),
- `likeliest`: the same if it drafts its likeliest token,
- `ratio`: how often vLLM's own rule accepts a token drawn from q, which is 1 - total variation.

Tokens are drawn in two stages as engines do, first a block of 64 tokens and then the token, so two
draws agree if they agree in both. Expected tokens per draft multiply the means of the places.

Writes benchmarks/results/distance.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import ROOT, parse_options, save
from emulated import DRAFTER, make_models
from tlt.drafter.checkpoint import load_drafter
from tlt.drafter.passes import DraftPasses, Row
from tlt.states.captured import Captured, capture
from tlt.tasks.chat import Chat
from tlt.tasks.gym import problems
from tlt.vllm.keyed import BLOCK

MODEL = ROOT / "models" / "words"
TEMPERATURES = (0.6, 0.8, 1.0)
SHARES = (0.3, 0.5, 0.7, 0.85, 1.0)
"""Shares of the noise that the drafter draws with. Less noise beside the same logits is the same
noise beside larger ones."""
PLACES = 7
MAX_TOKENS = 192
BATCH = 32
"""Responses that the policy generates at once."""
AT_ONCE = 512
"""Positions whose distributions are in memory at a time."""


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """Return the chance [..., V] that two draws with the same Gumbel noise both are each token.

    That chance is 1 / sum over j of max(p_j / p_i, q_j / q_i). The maximum is the first ratio where
    p_j / q_j is at least p_i / q_i, so sums over sorted tokens give all of them. Neither p nor q
    need add up to 1.
    """
    order = (p.clamp_min(1e-30) / q.clamp_min(1e-30)).argsort(-1)
    ps, qs = p.gather(-1, order), q.gather(-1, order)
    above = ps.flip(-1).cumsum(-1).flip(-1)
    below = qs.cumsum(-1) - qs
    chance = 1 / (above / ps.clamp_min(1e-30) + below / qs.clamp_min(1e-30))
    chance = torch.where((ps > 1e-30) & (qs > 1e-30), chance, 0.0)
    return torch.zeros_like(p).scatter(-1, order, chance)


def in_blocks(p: Tensor) -> Tensor:
    """Return probabilities [n, V] by blocks [n, B, 64]."""
    return torch.nn.functional.pad(p, (0, -p.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def two_stages(p: Tensor, q: Tensor) -> Tensor:
    """Return the chance [n] that two draws in two stages with the same noise agree."""
    p_blocks, q_blocks = in_blocks(p), in_blocks(q)
    blocks = agreement(p_blocks.sum(-1), q_blocks.sum(-1))
    return (blocks * agreement(p_blocks, q_blocks).sum(-1)).sum(-1)


def draw(p: Tensor, noise: tuple[Tensor, Tensor]) -> Tensor:
    """Return a token for each row, drawn in two stages with this noise."""
    of_blocks, of_tokens = noise
    p_blocks = in_blocks(p)
    block = (p_blocks.sum(-1).log() + of_blocks).argmax(-1)
    rows = torch.arange(len(p))
    token = (p_blocks[rows, block].log() + of_tokens[rows, block]).argmax(-1)
    return block * BLOCK + token


def gumbel(*shape: int) -> Tensor:
    return -torch.empty(shape, dtype=torch.float64).exponential_().log().float()


def policy_and_ends() -> tuple[Any, Tensor, Tensor]:
    """Return the policy, its head and its embedding."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    head = policy.get_output_embeddings().weight.detach()
    return policy, head, policy.get_input_embeddings().weight.detach()


def samples(policy: Any, temperature: float, count: int, purpose: str) -> list[Captured]:
    """Return the policy's samples at a temperature with their hidden states."""
    from tlt.drafter.eagle3.config import default_aux_layers

    chat = Chat(str(MODEL))
    layers = default_aux_layers(policy.config.num_hidden_layers)
    torch.manual_seed(0)
    asked = problems("word_problems", count, 0, purpose)
    prompts = [list(chat.prompt(problem.question)) for problem in asked]
    found = []
    for first in range(0, count, BATCH):
        batch = prompts[first : first + BATCH]
        width = max(map(len, batch))
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        texts = policy.generate(
            padded,
            attention_mask=mask,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=chat.tokenizer.eos_token_id,
            pad_token_id=0,
        )
        for prompt, text in zip(batch, texts[:, width:].tolist(), strict=True):
            end = chat.tokenizer.eos_token_id
            size = text.index(end) + 1 if end in text else len(text)
            sample = [*prompt, *text[:size]]
            found.append(capture(policy, sample, len(prompt), layers, torch.float32))
    return found


def measured(p: Tensor, drafted: Tensor, counts: bool) -> dict[str, Tensor]:
    """Return every measure at each position [n], from the drafter's logits at temperature."""
    q = drafted.softmax(-1)
    variation = (p - q).abs().sum(-1) / 2
    found = {
        "entropy": -(p * p.clamp_min(1e-30).log()).sum(-1),
        "variation": variation,
        **{f"share {s:g}": two_stages(p, (drafted / s).softmax(-1)) for s in SHARES},
        "likeliest": p[torch.arange(len(p)), q.argmax(-1)],
        "ratio": 1 - variation,
    }
    if counts:
        noise = gumbel(*in_blocks(p).shape[:2]), gumbel(*in_blocks(p).shape)
        found["counted"] = (draw(q, noise) == draw(p, noise)).float()
    return found


@torch.no_grad()
def at_temperature(
    passes: DraftPasses, temperature: float, held_out: Sequence[Captured], counted: bool = False
) -> dict[str, Any]:
    """Return the means of all measures by place in the draft; `counted` counts agreements, too."""
    vocabulary = passes.drafter.draft_token_ids()
    sums: list[dict[str, float]] = [{} for _ in range(PLACES)]
    counts = [0] * PLACES
    for sample in held_out:
        if not sample.num_chains:
            continue
        row = Row([sample])
        starts = row.chains.starts
        logits = passes.project(row.final_TH[starts + 1].float(), passes.head_VH) / temperature
        for place, hidden in enumerate(passes.unroll(row)):
            learned = row.learned(place)
            target = torch.searchsorted(starts, starts[learned] + place)
            drafted = torch.full((len(target), logits.shape[1]), -torch.inf)
            drafted[:, vocabulary] = passes.drafter.lm_head(hidden[learned]) / temperature
            parts = zip(logits[target].split(AT_ONCE), drafted.split(AT_ONCE), strict=True)
            for p_of, q_of in parts:
                for name, values in measured(p_of.softmax(-1), q_of, counted).items():
                    sums[place][name] = sums[place].get(name, 0.0) + values.double().sum().item()
                counts[place] += len(p_of)
    places = [
        {name: total / max(1, counts[place]) for name, total in sums[place].items()}
        for place in range(PLACES)
    ]
    ways = [way for way in places[0] if way not in ("entropy", "variation")]
    return {
        "drafts": counts[0],
        "places": places,
        "tokens_per_draft": {
            str(length): {way: expected([of[way] for of in places[:length]]) for way in ways}
            for length in (3, 7)
        },
    }


def expected(rates: list[float]) -> float:
    """Return the tokens per draft whose places are accepted at these rates."""
    return 1 + sum(accumulate(rates, mul))


def main() -> None:
    options = parse_options(__doc__, problems=256)
    make_models()
    policy, head, embedding = policy_and_ends()
    drafter = load_drafter(Path(ROOT / DRAFTER)).float()
    passes = DraftPasses(drafter, head, embedding, PLACES, bfloat16=False)
    found = {}
    for temperature in TEMPERATURES:
        held_out = samples(policy, temperature, options.problems, "distance")
        of = found[f"{temperature:g}"] = at_temperature(passes, temperature, held_out, counted=True)
        print(temperature, of["drafts"], of["places"][0], of["tokens_per_draft"], flush=True)
    save("distance", {"problems": options.problems, "temperatures": found})


if __name__ == "__main__":
    main()
