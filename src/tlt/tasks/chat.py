"""Turn text into tokens by a model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tlt.errors import ConfigError
from tlt.tasks.gym import Message
from tlt.user_code import time_limit

PROMPT_S = 10.0
"""Seconds in which a chat template must make a prompt."""
WITHOUT_SYSTEM = (
    "leave out task.system_prompt and write it into task.instruction, or give messages that this "
    'template takes, e.g. [{"role": "user", "content": "2 + 2?"}]'
)
"""Advice to users of a template that does not take all messages."""
TOOLS = """You may call these tools:
{tools}
A call is a line such as <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>; then end \
your turn, and you get the answer."""
"""The description of tools that a model reads if its chat template has none."""
MAX_TOKEN_CHARS = 32
"""Characters of a text for each token that it may have, before it is encoded."""
TURN, ANSWER = "TURN-OF-THE-POLICY", "ANSWER-OF-A-TOOL"
"""Texts to find again in a template's output."""


class Chat:
    """The tokenizer of a model folder, for questions and answers."""

    def __init__(self, model: str, key: str = "--model") -> None:
        from transformers import AutoTokenizer

        if not (Path(model) / "config.json").exists():
            raise ConfigError(
                f"{key} {model} is not a model folder: config.json is missing; make one with "
                "`tlt models smollm2`"
            )
        try:
            # Without an explicit no, code in the folder would be asked for at the terminal.
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        except Exception as error:  # the library raises anything on a damaged file
            raise ConfigError(
                f"{key} {model} has no tokenizer that loads ({_said(error)}); save one there with "
                "`save_pretrained`"
            ) from error
        self._where = f"{key} {model}"
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"{key} {model}: its tokenizer has no chat template; use a chat model, or set "
                "`chat_template` in tokenizer_config.json"
            )

    def prompt(
        self,
        question: str,
        history: Sequence[Message] = (),
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Return the prompt of a question and the messages before it, up to the response.

        `tools` are JSON schemas of functions that the policy may call.
        """
        too_slow = (
            f"{self._where}: its chat template takes more than {PROMPT_S:g} s for one question; "
            "restore the published chat_template"
        )
        with time_limit(PROMPT_S, too_slow):
            tokens = self._prompt(question, history, tools)
        if not tokens:
            raise ConfigError(
                f"{self._where}: its chat template makes an empty prompt; restore the published "
                "chat_template"
            )
        return tokens

    def _prompt(
        self, question: str, history: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[int, ...]:
        messages = [*history, {"role": "user", "content": question}]
        try:
            text = self._rendered(messages, tools)
            if tools and text == self._rendered(messages):
                text = self._rendered(_with_tools(messages, tools))
            tokens = self._encode(text)
        except Exception as error:  # a template is a program, and the library checks few settings
            if history:
                roles = ", ".join(message["role"] for message in messages)
                raise ConfigError(
                    f"{self._where}: its chat template fails on messages of {roles} "
                    f"({_said(error)}); {WITHOUT_SYSTEM}"
                ) from error
            raise ConfigError(
                f"{self._where}: its chat template or tokenizer fails on a question "
                f"({_said(error)}); restore the published chat_template and "
                "tokenizer_config.json"
            ) from error
        if any(m["role"] == "system" and m["content"].strip() not in text for m in history):
            raise ConfigError(
                f"{self._where}: its chat template leaves out the system message; {WITHOUT_SYSTEM}"
            )
        return tokens

    def _rendered(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        chosen = {"tools": list(tools)} if tools else {}
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **chosen
        )
        return text

    def after_turn(self, said: Sequence[str], last_token: int, limit: int) -> tuple[int, ...]:
        """Return the tokens from the end of a turn, over what tools said, up to the next turn.

        `last_token` ended the turn. Each answer is cut to `limit` tokens.
        """
        texts = [self._cut(text, limit) for text in said]
        try:
            rest = self._after_turn(texts, self._knows_tools)
        except Exception as error:  # a template is a program
            raise ConfigError(
                f"{self._where}: its chat template fails on messages of user, assistant and tool "
                f"({_said(error)}); restore the published chat_template"
            ) from error
        return self._encode(rest.removeprefix(self.tokenizer.decode([last_token])))

    @cached_property
    def _knows_tools(self) -> bool:
        """Whether the template shows messages of tools. Some leave them out, others refuse them."""
        with suppress(Exception):
            return ANSWER in self._after_turn([ANSWER], as_tools=True)
        return False

    def _after_turn(self, texts: Sequence[str], as_tools: bool) -> str:
        """Return the template's text after a turn: messages of tools, or one of the user."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
        if as_tools:
            messages += [{"role": "tool", "content": text} for text in texts]
        else:
            messages += [{"role": "user", "content": "\n".join(texts)}]
        return self._rendered(messages).split(TURN, 1)[1]

    def _cut(self, text: str, limit: int) -> str:
        """Return a text of at most `limit` tokens that ends no turn."""
        room = MAX_TOKEN_CHARS * limit  # a text of megabytes takes seconds to encode
        short = text[:room]
        for special in self._specials:
            short = short.replace(special, f"{special[0]} {special[1:]}")
        tokens = self._encode(short)
        if len(tokens) <= limit:
            return short if len(text) <= room else f"{short}..."
        return f"{self.tokenizer.decode(tokens[:limit])}..."

    @cached_property
    def _specials(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        found = {str(token.content) for token in added if token.special}
        return sorted(found | set(self.tokenizer.all_special_tokens), key=len, reverse=True)

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn that has ended, with special tokens except the last one."""
        return str(self.tokenizer.decode(list(token_ids[:-1]), skip_special_tokens=False))

    def answered(self, question: str, solution: str) -> tuple[tuple[int, ...], int]:
        """Return prompt, solution and end token, and how many of these tokens are the prompt."""
        prompt = self.prompt(question)
        return prompt + self.turn(solution), len(prompt)

    def turn(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a turn of the policy, with its end token."""
        return (*self._encode(text), self.tokenizer.eos_token_id)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _said(error: Exception) -> str:
    """Return an error in one line of a few hundred characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _with_tools(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages with the tools in the system message, for templates without any."""
    described = "\n".join(json.dumps(tool["function"]) for tool in tools)
    text = TOOLS.format(tools=described)
    if messages[0]["role"] == "system":
        first = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
