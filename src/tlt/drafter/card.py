"""The model card of an exported drafter, written from its provenance.

The card states only what a run has recorded, and says "not measured" for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def card(provenance: Mapping[str, Any]) -> str:
    """Return the README.md of a drafter folder."""
    drafter, target = provenance["drafter"], provenance["target"]["path"]
    parts = [
        _front_matter(drafter["format"], target),
        f"# An EAGLE-3 drafter of {target}\n",
        f"This model drafts tokens for `{target}`, which verifies them: samples keep their "
        f"distribution and come faster. It drafts from {drafter['draft_vocab_size']:,} tokens. "
        "Trained with [TLT](https://arxiv.org/abs/2511.16665).\n",
        _usage(drafter, target),
        _measured(provenance.get("measured") or {}),
        _training(provenance),
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(form: str, target: str) -> str:
    lines = ["---"]
    if target.count("/") == 1 and not target.startswith((".", "/", "~")):
        lines.append(f"base_model: {target}")  # the Hub refuses anything but an id
    lines += ["library_name: vllm", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {tag}" for tag in ("speculative-decoding", "eagle3")]
    lines += ["- speculators"] if form == "speculators" else []
    return "\n".join([*lines, "---", ""])


def _usage(drafter: Mapping[str, Any], target: str) -> str:
    if drafter["format"] == "speculators":
        command = "vllm serve FOLDER_OR_ID_OF_THIS_DRAFTER"
    else:
        command = (
            f"vllm serve {target} --speculative-config \\\n"
            '    \'{"method": "eagle3", "model": "FOLDER_OR_ID_OF_THIS_DRAFTER", '
            f'"num_speculative_tokens": {drafter["num_draft_tokens"]}}}\''
        )
    return f"## Use\n```bash\n{command}\n```\n"


def _measured(measured: Mapping[str, Any]) -> str:
    title = "## Measured acceptance"
    after = (measured.get("acceptance") or {}).get("after")
    if after:
        return f"{title}\n{_table(measured, after)}"
    if length := measured.get("held_out_length"):
        return (
            f"{title}\nExpected acceptance length on held-out samples of the policy, after RL "
            f"step {measured.get('rl_step')}: {length:.2f} tokens per draft, the policy's own "
            "included.\n"
        )
    return f"{title}\nNobody has measured this drafter yet.\n"


def _table(measured: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the acceptance that engines measured, by temperature and draft position."""
    num_drafts = measured.get("num_draft_tokens") or max(
        len(row["by_position"]) for row in after.values()
    )
    prompts = measured.get("num_held_out_prompts")
    on = f"on {prompts} prompts that it never saw" if prompts else "on prompts that it never saw"
    heads = ["temperature", "drafts", "tokens per draft"]
    heads += [f"accepted up to {place}" for place in range(1, num_drafts + 1)]
    rows = [
        [temperature, f"{row['num_drafts']:,}", f"{row['length']:.2f}"]
        + [f"{share:.0%}" for share in row["by_position"]]
        for temperature, row in after.items()
    ]
    lines = [heads, ["---"] * len(heads), *rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return (
        f"In vLLM, {on}, with drafts of {num_drafts} tokens. Tokens per draft include the model's "
        f"own.\n\n{table}\n"
    )


def _training(provenance: Mapping[str, Any]) -> str:
    data = (provenance.get("measured") or {}).get("data")
    facts = []
    if steps := (provenance.get("training") or {}).get("steps"):
        facts.append(f"- {steps:,} optimizer steps")
    if isinstance(data, Mapping):
        if prompts := data.get("num_prompts"):
            tokens = data.get("num_response_tokens")
            facts.append(
                f"- {prompts:,} responses of the model itself"
                + (f", {tokens:,} tokens" if tokens else "")
                + (f", at temperature {data['temperature']:g}" if "temperature" in data else "")
            )
        if (coverage := data.get("draft_vocabulary_coverage")) is not None:
            facts.append(f"- its draft vocabulary covers {coverage:.1%} of these tokens")
    facts.append(f"- sha256 of `model.safetensors`: `{provenance['drafter']['sha256']}`")
    return "## Training\n" + "\n".join(facts) + "\n"
