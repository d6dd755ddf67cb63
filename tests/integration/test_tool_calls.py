"""Tool calls in the texts of models, read by vLLM's own parsers."""

from pathlib import Path

import pytest

from tlt.agents.environment import tagged_calls
from tlt.agents.host import reader
from tlt.errors import ConfigError
from tool_acts import call

pytestmark = [pytest.mark.vllm, pytest.mark.gate]


def test_vllms_parser_reads_the_same_calls_as_ours(tiny: Path) -> None:
    from tlt.vllm.tool_calls import vllm_reader

    read = vllm_reader("hermes", str(tiny))
    for text in (
        "The answer is 4.",
        call("count"),
        f"Let me see. {call('count', what='b')}\n{call('wait', seconds=2.5)}",
    ):
        assert read(text) == tagged_calls(text), text
    with pytest.raises(ValueError, match="tool call cannot be read"):
        read("<tool_call>no JSON</tool_call>")


def test_a_call_in_another_form_is_read_by_its_own_parser(tiny: Path) -> None:
    read = reader("pythonic", str(tiny))
    assert read("[multiply(a=6, b=7)]") == [("multiply", {"a": 6, "b": 7})]
    assert read("42") == []


def test_a_parser_that_vllm_does_not_have_is_refused(tiny: Path) -> None:
    why = r"tools\.parser = 'no-such' is not one of vLLM's: .*hermes"
    with pytest.raises(ConfigError, match=why):
        reader("no-such", str(tiny))
