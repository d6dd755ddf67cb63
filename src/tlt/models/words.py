"""Make a small real policy for the task `word_problems`: a Llama with a token for each word.

`make` writes the policy that this package holds in bfloat16. It copies names, keeps the count in
most short stories, and ends its responses by itself. `untrained` writes the policy's random start.
These commands train the random start again on the same data, for as many optimizer steps. The
package's policy had its learning rate restarted after 1200 of them, so its weights differ:

    tlt models words --untrained --out models/words-start
    tlt models sft --model models/words-start --out models/words --task word_problems \\
        --sizes 1.5,6,16 --parameter check_share=0.2 --num-problems 20000 --row-tokens 1024 \\
        --lr 3e-3 --steps 2700
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tlt.models.tiny import SPECIAL_TOKENS, with_chat

HELD = Path(__file__).parent / "words_data"
"""Folder of the trained policy in the package."""
NUM_TEXTS = 10_000
"""Number of stories to train the tokenizer on."""
MOST_TOKENS = 1536
"""Limit of the vocabulary. All words of the stories need less."""
INIT_STD = 0.08
"""Standard deviation of the random weights. With the usual 0.02, copying takes longer to learn."""


def make(out: Path) -> Path:
    """Write the trained policy to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for file in HELD.iterdir():
        shutil.copyfile(file, out / file.name)
    return out


def untrained(out: Path, texts: Iterable[str], seed: int = 0) -> Path:
    """Write the policy with random weights, and a tokenizer trained on `texts`, to `out`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    own = tokenizer(texts)
    vocabulary = own.get_vocab()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        pad_token_id=vocabulary["<|pad|>"],
        eos_token_id=vocabulary["<|end|>"],
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(out)
    own.save_pretrained(out)
    return out


def tokenizer(texts: Iterable[str]) -> Any:
    """Return a byte-level BPE tokenizer in which each word of `texts` is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MOST_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return with_chat(backend)
