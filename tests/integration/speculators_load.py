"""The `speculators` library loads an export, and drafts the same tokens as our module.

    make check-speculators

It runs in an environment of its own that has the library, and needs no engine and no GPU.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from learning import export_form
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import AutoModelForCausalLM

from tlt.drafter.checkpoint import load_drafter, save_drafter
from tlt.drafter.eagle3.config import Llama3Rope
from tlt.drafter.eagle3.model import Chains
from tlt.drafter.trainer import fresh_drafter
from tlt.models import tiny

NUM_TOKENS, NUM_DRAFTS = 40, 3
PLAIN = {"fc_norm": False, "norm_output": False}
ROPE = Llama3Rope(8.0, 1.0, 4.0, 16)
FORMS: dict[str, dict[str, Any]] = {
    "new": {},
    "plain": PLAIN,
    "gpt-oss": PLAIN | {"norm_before_residual": True, "norm_before_fc": True},
    "llama 3": PLAIN | {"norm_before_residual": True, "rope_scaling": ROPE},
    "qwen3": PLAIN | {"norm_before_residual": True, "qk_norm": True},
}


def main() -> None:
    """Export a drafter of every form, load it in the library, and compare weights and drafts."""
    with tempfile.TemporaryDirectory() as made:
        model = tiny.make(Path(made) / "tiny")
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        head = policy.get_output_embeddings().weight.detach()
        fresh = fresh_drafter(policy.config, head, torch.arange(0, 200, 2))
        plain = save_drafter(fresh, Path(made) / "plain", torch.float32)
        for name, changes in FORMS.items():
            folder = export_form(plain, model, Path(made) / name, changes)
            same, total = compare(policy, folder)
            print(f"{name}: {same} of {total} drafts are the same")  # noqa: T201
            assert same == total


@torch.no_grad()  # type: ignore[untyped-decorator]
def compare(policy: Any, folder: Path) -> tuple[int, int]:
    """Return how many drafts of the library and of our module are equal, and their number."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # needs no accelerator
    theirs = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    # An export has no embedding. The library takes NaN for "not loaded yet", but with transformers
    # 5.19 such a tensor holds whatever was in memory.
    torch.nn.init.constant_(theirs.embed_tokens.weight, torch.nan)
    theirs.load_verifier_weights()
    state = theirs.state_dict()
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(state[name], tensor), f"{name} differs in the library"

    ours = load_drafter(folder)
    tokens = torch.randint(4, policy.config.vocab_size, (NUM_TOKENS,))
    hidden = policy.model(tokens[None], output_hidden_states=True).hidden_states
    aux_TA = torch.cat([hidden[i][0] for i in ours.config.aux_layer_ids], -1)[:-1]
    last = NUM_TOKENS - 1
    embeds_TH = policy.get_input_embeddings()(tokens[1:])
    chains = Chains(torch.arange(last), [last])
    outputs = ours.unroll(aux_TA, embeds_TH, torch.arange(last), chains, NUM_DRAFTS)
    drafted = theirs(
        hidden_states=aux_TA[None],
        input_ids=tokens[None, 1:],
        document_ids=torch.zeros(1, last, dtype=torch.long),
        ttt_steps=NUM_DRAFTS,
    )
    same = total = 0
    for step, (output_CH, their_ids) in enumerate(zip(outputs, drafted, strict=True)):
        whole = last - step  # later chains run past the end of the text
        equal = ours.lm_head(output_CH).argmax(-1)[:whole] == their_ids[0, :whole]
        same, total = same + int(equal.sum()), total + whole
    return same, total


if __name__ == "__main__":
    main()
