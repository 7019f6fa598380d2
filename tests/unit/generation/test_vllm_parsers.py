"""vLLM's parsers by name: real classes of its registry on a real tokenizer."""

import json
import os
import subprocess
import sys

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.gateway.codec import Codec, ReadingRules
from nemo_rl.gateway.markup import find_reasoning_parser, find_tool_parser
from nemo_rl.types import Guide
from tests.unit.gateway.engines import TOOL, encoder_of, tokens_of

# Names whose parsers read plain text, and how their models write the same call.
CALLS = {
    "pythonic": "[add(a=3, b=4)]",
    "granite": '<tool_call>[{"name": "add", "arguments": {"a": 3, "b": 4}}]',
    "llama4_pythonic": "<|python_start|>[add(a=3, b=4)]<|python_end|>",
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 3, "b": 4}}]',
}


def test_names_are_those_of_vllms_registry_and_known_without_importing_it() -> None:
    code = (
        "import sys\n"
        "from nemo_rl.generation.vllm.parsers import vllm_parser_names as names\n"
        "tools, reasoning = names('tool'), names('reasoning')\n"
        "assert 'vllm' not in sys.modules\n"
        "from nemo_rl.generation.vllm.process_environment import importing_vllm\n"
        "with importing_vllm('cpu'):\n"
        "    from vllm.reasoning import ReasoningParserManager as R\n"
        "    from vllm.tool_parsers import ToolParserManager as T\n"
        "assert list(tools) == sorted(T.list_registered()), tools\n"
        "assert list(reasoning) == sorted(R.list_registered()), reasoning\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env={**os.environ})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_parsed_as_its_model_writes_it(name: str) -> None:
    codec = Codec(encoder_of("chatml"), tool_parser_name=name)
    read = codec.read(tokens_of("chatml", CALLS[name]), ReadingRules("1", tools=(TOOL,)))
    (call,) = read.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 3, "b": 4})
    assert read.message.content.strip() == ""


def test_text_without_a_call_stays_text() -> None:
    codec = Codec(encoder_of("chatml"), tool_parser_name="pythonic")
    for text in ("3 + 4 = 7", "[add(a=3,", "[1, 2]", ""):
        read = codec.read(tokens_of("chatml", text), ReadingRules("1", tools=(TOOL,)))
        assert (read.message.content, read.message.tool_calls) == (text, ())


def test_thinking_is_parsed_by_name() -> None:
    parse = find_reasoning_parser("granite", encoder_of("chatml"))
    assert parse is not None
    thought, rest = parse("Here is my thought process: three and four Here is my response: 7")
    assert thought is not None
    assert (thought.strip(), rest.strip()) == ("three and four", "7")


@pytest.mark.parametrize(
    ("name", "takes_text", "takes_calls"),
    [("granite", False, False), ("qwen3", True, False), ("deepseek_r1", True, True), (None, False, False)],
)
def test_which_guided_responses_a_parser_takes_for_thinking(
    name: str | None, takes_text: bool, takes_calls: bool
) -> None:
    codec = Codec(encoder_of("qwen3"), tool_parser_name="hermes", reasoning_parser_name=name)
    call = codec.call_guide((TOOL,), ("add",), is_required=True)
    assert call is not None
    assert [codec.takes_for_thinking(guide) for guide in (Guide("json_object"), call)] == [takes_text, takes_calls]


def test_an_unknown_name_lists_vllms_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'kimi_k2'"):
        find_tool_parser("kimi_k22", encoder_of("chatml"))


def test_a_parser_whose_tokens_the_tokenizer_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gateway.tool_parser = 'jamba'.*could not locate"):
        find_tool_parser("jamba", encoder_of("chatml"))
