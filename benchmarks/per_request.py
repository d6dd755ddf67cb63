"""One draft length for the batch, or one per request by the drafter's own confidence: replayed.

    python benchmarks/per_request.py [--problems 64]

The drafter of benchmarks/emulated.py drafts 7 tokens at every place of held-out samples of the
policy of `tlt models words`, with noise with which the policy draws the text, so that it is known
how many tokens of each draft are accepted. Batches are places drawn at random. With one length per
request, a request drafts on while the product of the drafter's probabilities stays above a bound,
and the batch drafts as long as one request does. Seconds come from the model of an engine step:
fitted to recorded steps on these cores, and that of an H100. Each rule gets its best length or
bound for the batch, with hindsight.

Writes benchmarks/results/per_request.json.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, ROOT, parse_options, save
from distance import MODEL, gumbel, samples
from emulated import DRAFTER
from tlt.contracts import Arm
from tlt.drafter.agreement import DRAFT_NOISE
from tlt.drafter.checkpoint import load_drafter
from tlt.drafter.passes import DraftPasses, Row
from tlt.timing.model import EngineModel, Observation, fit
from tlt.timing.profiles import MODELS, h100

LENGTH = 7
BATCHES = (1, 4, 16, 64)
BOUNDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)
DRAWN = 4000
"""Batches that are drawn."""
CONTEXT = 200


@torch.no_grad()
def drafts(passes: DraftPasses, held_out: Any) -> tuple[Tensor, Tensor]:
    """Return the accepted tokens [n] of drafts, and the product of probabilities [n, LENGTH]."""
    accepted, confidence = [], []
    vocabulary = passes.drafter.draft_token_ids()
    for sample in held_out:
        row = Row([sample])
        starts = row.chains.starts
        log_p = passes.project(row.final_TH[starts + 1].float(), passes.head_VH).log_softmax(-1)
        # Noise given that the text's token wins, as in tests/integration/test_drafter_training.py.
        text = row.token_ids_T[starts + 2][:, None]
        best = gumbel(len(starts), 1)
        noise = -((-best).exp() + (-gumbel(*log_p.shape)).exp() / log_p.exp()).log() - log_p
        noise.scatter_(1, text, best - log_p.gather(1, text))
        runs = torch.zeros(len(starts))
        going = torch.ones(len(starts), dtype=torch.bool)
        sure, survived = torch.ones(len(starts)), []
        for place, hidden in enumerate(passes.unroll(row)):
            learned = row.learned(place)
            going &= learned
            at = torch.searchsorted(starts, starts + place).clamp(max=len(starts) - 1)
            log_q = (passes.drafter.lm_head(hidden) / DRAFT_NOISE).log_softmax(-1)
            drawn = (log_q + noise[at][:, vocabulary]).argmax(-1)
            sure = sure * log_q.exp().gather(1, drawn[:, None])[:, 0]
            survived.append(sure)
            token = row.token_ids_T[(starts + 2 + place).clamp(max=len(row.token_ids_T) - 1)]
            going &= vocabulary[drawn] == token
            runs += going
        whole = row.learned(LENGTH - 1)
        accepted.append(runs[whole])
        confidence.append(torch.stack(survived, -1)[whole])
    return torch.cat(accepted), torch.cat(confidence)


def speed(model: EngineModel, accepted: Tensor, lengths: Tensor) -> float:
    """Return tokens per second of batches [m, B] that verify so many draft tokens each."""
    batch = accepted.shape[1]
    tokens = (1 + torch.minimum(accepted, lengths)).sum()
    verified, passes = lengths.sum(1), lengths.amax(1)
    rows = batch + verified
    seconds = (
        model.step
        + model.row * rows
        + model.dense_row * (rows - model.free_rows).clamp_min(0)
        + model.context * batch * CONTEXT
        + (passes > 0) * model.drafting
        + passes * model.draft_pass
        + verified * model.draft_row
    )
    return float(tokens / seconds.sum())


def recorded() -> EngineModel:
    """Return the model fitted to recorded engine steps of SmolLM2 on these cores."""
    steps = json.loads((RESULTS / "strategy" / "live" / "rollout.json").read_text())["steps"]
    return fit(
        Observation(Arm(of["drafter"], of["num_draft_tokens"]), batch, CONTEXT, seconds)
        for of in steps["arms"]
        for batch, seconds in of["seconds"]
    )


def main() -> None:
    from transformers import AutoModelForCausalLM

    options = parse_options(__doc__, problems=64)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    head = policy.get_output_embeddings().weight.detach()
    embedding = policy.get_input_embeddings().weight.detach()
    drafter = load_drafter(ROOT / DRAFTER).float()
    passes = DraftPasses(drafter, head, embedding, LENGTH, bfloat16=False)
    accepted, sure = drafts(passes, samples(policy, 1.0, options.problems, "distance"))
    rows = []
    machines = {"these cores": recorded(), "H100, 7B": h100(*MODELS["qwen2.5-7b"], 1)}
    for machine, model in machines.items():
        for batch in BATCHES:
            places = torch.randint(len(accepted), (DRAWN, batch))
            mine = accepted[places]
            one = {k: speed(model, mine, torch.full_like(mine, k)) for k in range(LENGTH + 1)}
            own = {b: speed(model, mine, (sure[places] > b).float().sum(-1)) for b in BOUNDS}
            length, bound = max(one, key=one.__getitem__), max(own, key=own.__getitem__)
            rows.append({"machine": machine, "batch": batch, "length": length, "bound": bound})
            rows[-1] |= {"of_no_drafts": one[length] / one[0], "gain": own[bound] / one[length]}
            print(rows[-1], flush=True)
    save("per_request", {"drafts": len(accepted), "rows": rows})


if __name__ == "__main__":
    main()
