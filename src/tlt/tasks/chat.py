"""Text to tokens, as a model's own chat template puts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Chat:
    """The tokenizer of a model folder, speaking in questions and answers."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def prompt(self, question: str) -> tuple[int, ...]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return self._encode(text)

    def answered(self, question: str, solution: str) -> tuple[tuple[int, ...], int]:
        """Prompt and solution with the token that ends it; how many of them are the prompt."""
        prompt = self.prompt(question)
        return prompt + self._encode(solution) + (self.tokenizer.eos_token_id,), len(prompt)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
