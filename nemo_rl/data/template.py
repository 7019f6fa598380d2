"""A chat template: messages in, text out, and one error for whatever its Jinja code refuses."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from nemo_rl.data.openai_shape import to_openai_message
from nemo_rl.types import Message


class ChatTemplateError(Exception):
    """The template did not render these messages; the text says why."""


class ChatTemplate:
    """The tokenizer's own template, or `text`, with the variables that a recipe gives it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str | None, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._variables = dict(variables)

    @property
    def name(self) -> str:
        """For errors: whose template it is, or how its text begins."""
        return f"template of {self._tokenizer.name_or_path}" if self._text is None else self._text[:60]

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """The conversation's text. Most templates want a call's arguments as an object, some as text."""
        try:
            return self._render(messages, tools, add_generation_prompt, arguments_as_text=False)
        except ChatTemplateError:
            if not any(message.tool_calls for message in messages):
                raise
            return self._render(messages, tools, add_generation_prompt, arguments_as_text=True)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        *,
        arguments_as_text: bool,
    ) -> str:
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        conversation = [_to_template_message(message, names, arguments_as_text) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._text,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        return str(text)


def _to_template_message(message: Message, names: Mapping[str, str], arguments_as_text: bool) -> dict[str, Any]:
    """The message as templates expect it; a tool's answer is told the name of its call."""
    fields = to_openai_message(message)
    if not arguments_as_text:
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = _parse_arguments(call["function"]["arguments"])
    if message.tool_call_id is not None and message.tool_call_id in names:
        fields["name"] = names[message.tool_call_id]
    return fields


def _parse_arguments(text: str) -> Any:
    """The object that the text describes; a model's broken JSON stays text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
