"""Tool calls in a model's texts, read by vLLM's parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tlt.errors import ConfigError


def vllm_reader(name: str, model: str) -> Callable[[str], list[tuple[str, dict[str, Any]]]]:
    """Return a function from a text to its tool calls, by the parser of this name."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        made = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ConfigError(f"tools.parser = {name!r} is not one of vLLM's: {known}") from error
    parser = made(AutoTokenizer.from_pretrained(model, trust_remote_code=False))
    request = ChatCompletionRequest(messages=[], model=model)

    def read(text: str) -> list[tuple[str, dict[str, Any]]]:
        found = parser.extract_tool_calls(text, request)
        mark = getattr(parser, "tool_call_start_token", None)
        if not found.tools_called and mark and mark in text:
            raise ValueError("this tool call cannot be read")
        return [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls]

    return read
