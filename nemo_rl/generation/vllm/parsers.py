"""vLLM's parsers of tool calls and of thinking, by the names of its registry, for the gateway's answers.

The names are read from vLLM's source, since importing it takes seconds; the classes are imported if one is used. A
parser object is made for each response, because some keep state; all run in the event loop's thread.
"""

import ast
import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from transformers import PreTrainedTokenizerBase

from nemo_rl.errors import ConfigError

Kind: TypeAlias = Literal["tool", "reasoning"]
Tools: TypeAlias = Sequence[Mapping[str, Any]]  # OpenAI schemas
TABLES: Mapping[Kind, tuple[str, str]] = {  # vLLM's file, and the name of its table
    "tool": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}

logger = logging.getLogger(__name__)


@functools.cache
def vllm_parser_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of vLLM's registry, sorted; empty if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return ()
    file, table = TABLES[kind]
    path = Path(spec.origin).parent / file
    if not path.is_file():
        return ()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            assert isinstance(node, ast.Assign)
            assert isinstance(node.value, ast.Dict)
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return tuple(sorted(str(key) for key in keys))
    return ()


def make_vllm_tool_parser(
    key: str, name: str, tokenizer: PreTrainedTokenizerBase
) -> Callable[[str, Tools], tuple[str, list[tuple[str, str]]]]:
    """Return a function from a response's text, special tokens kept, to the text left and its (name, arguments) calls.

    Text that the parser fails on is left as it is. Raises ConfigError for `key` if the parser cannot be made, e.g. for
    a tokenizer without the tokens that it looks for.
    """
    cls, make_request, tokenizer = _load(key, name, "tool", tokenizer)

    def parse(text: str, tools: Tools) -> tuple[str, list[tuple[str, str]]]:
        try:
            request = make_request(tools)
            found = cls(tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception as error:  # third-party code on text of a model  # noqa: BLE001
            logger.debug("vLLM's tool parser %s failed: %s", name, error)
            return text, []
        if not found.tools_called:
            return text, []
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse


def make_vllm_reasoning_parser(
    key: str, name: str, tokenizer: PreTrainedTokenizerBase
) -> Callable[[str], tuple[str | None, str]]:
    """Return a function from a response's text, special tokens kept, to its thinking and the rest.

    Raises ConfigError as `make_vllm_tool_parser` does.
    """
    cls, make_request, tokenizer = _load(key, name, "reasoning", tokenizer)

    def parse(text: str) -> tuple[str | None, str]:
        try:
            reasoning, content = cls(tokenizer).extract_reasoning(text, make_request(()))
        except Exception as error:  # third-party code on text of a model  # noqa: BLE001
            logger.debug("vLLM's reasoning parser %s failed: %s", name, error)
            return None, text
        return reasoning, content or ""

    return parse


def _load(key: str, name: str, kind: Kind, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Any, Any]:
    """Import a parser's class; return it, a function from tools to vLLM's request, and the tokenizer as vLLM has it."""
    from nemo_rl.generation.vllm.process_environment import importing_vllm

    with importing_vllm("cpu"):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        managers = {"tool": ToolParserManager.get_tool_parser, "reasoning": ReasoningParserManager.get_reasoning_parser}
        cached = get_cached_tokenizer(tokenizer)  # type: ignore[arg-type] - whose vocabulary is read once
        try:
            cls = managers[kind](name)
            cls(cached)
        except Exception as error:
            problem = f"vLLM's {kind} parser cannot be used with this tokenizer: {error}"
            raise ConfigError(key, name, problem) from error

    def make_request(tools: Tools) -> Any:
        request = {"model": "policy", "messages": [{"role": "user", "content": ""}], "tools": [*tools] or None}
        return ChatCompletionRequest.model_validate(request)

    return cls, make_request, cached
