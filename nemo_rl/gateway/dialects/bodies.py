"""Parts of requests that several APIs share: validation, refused fields, texts, turns, tools and arguments.

Types are checked strictly. Unknown fields are kept, so that a log line can name them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_snake

from nemo_rl.data.images import IMAGE_TYPES
from nemo_rl.data.messages import TEXT_TYPES
from nemo_rl.gateway.images import TEXT_ONLY, RequestImages
from nemo_rl.gateway.request_errors import RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import (
    ContentPart,
    Guide,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolResult,
)

MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
RAW_ARGUMENTS = "raw_arguments"  # key for arguments that are not a JSON object, in APIs that insist on one
SIGNATURE_BYTES = 32
# Fields that need another policy, another way to sample or another reading of the conversation. A request with one is
# refused by every API that does not declare the field.
REFUSED_FIELDS = frozenset(
    {"audio", "background", "container", "conversation", "mcp_servers", "prediction", "prompt", "web_search_options"}
    | {"function_call", "functions", "logit_bias", "prompt_logprobs", "best_of", "echo"}
    # vLLM's
    | {"allowed_token_ids", "bad_words", "ignore_eos", "logits_processors", "min_tokens", "stop_token_ids"}
    | {"chat_template", "chat_template_kwargs", "continue_final_message", "documents", "truncate_prompt_tokens"}
    | {"structural_tag", "structured_outputs", "use_beam_search"}
    # names that one API has for a field of another
    | {"input", "instructions", "messages", "system", "text", "response_format", "output_config", "output_format"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "previous_response_id"}
    | {"contents", "generation_config", "system_instruction", "tool_choice", "tool_config"}
    # Google's
    | {"cached_content", "continuation_token", "image_config", "model_selection_config", "routing_config"}
    | {"speech_config"}
)
NEUTRAL: Mapping[str, object] = {"best_of": 1, "min_tokens": 0, "n": 1, "add_generation_prompt": True}  # change nothing
GUIDED = "guided_"  # prefix of vLLM's older options for guided decoding


class Body(BaseModel):
    """A JSON object, strictly typed: neither a number for a string nor a string for a number."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Return the validated body; raises RequestError that names the first wrong field."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            param = ".".join(str(part) for part in first["loc"]) or None
            raise RequestError(400, f"{param or 'body'}: {first['msg']}", param=param) from error

    def extra_fields(self) -> dict[str, Any]:
        """Return the fields that the schema lacks, without those whose value changes nothing."""
        extra = (self.model_extra or {}).items()
        return {
            name: value
            for name, value in extra
            if value is not False and value not in (None, [], {}) and not (name in NEUTRAL and value == NEUTRAL[name])
        }

    def reject_fields(self, *, format_field: str, prefix: str = "") -> None:
        """Raise RequestError for the first field that cannot be honoured and must not be ignored.

        `format_field`: this API's name for the format of a response. `prefix`: path of this body in the request, with
        a dot.
        """
        extra = self.extra_fields()
        for key in sorted(extra):
            name = f"{prefix}{key}"
            if key.startswith(GUIDED):
                fields = format_field
                if "structured_outputs" in type(self).model_fields:
                    fields += " or structured_outputs"
                raise make_unsupported_error(name, f"{name}: not supported; use {fields}")
            if to_snake(key) in REFUSED_FIELDS:
                raise make_unsupported_error(name, f"{name}: not supported by this server in this API")
        if "n" in extra:
            raise make_unsupported_error("n", "n must be 1; send the request n times")
        if (self.model_extra or {}).get("add_generation_prompt") is False:
            text = "add_generation_prompt: a response is always a turn of its own"
            raise make_unsupported_error("add_generation_prompt", text)


class ContentBlock(Body):
    """A part of a content: text, or an image in the shape of OpenAI's two APIs or of Anthropic's."""

    type: str
    text: str | None = None
    image_url: str | dict[str, Any] | None = None  # OpenAI's; chat completions nest the URL
    source: dict[str, Any] | None = None  # Anthropic's

    def read_content(self, where: str, images: RequestImages) -> ContentPart:
        """Return the text or image; raises RequestError for a block of another type, and for an image not allowed."""
        if self.type in IMAGE_TYPES and images.are_allowed:
            return self._read_image(where, images)
        if self.type not in TEXT_TYPES:
            reads = "text and images are" if images.are_allowed else "only text is"
            text = f"{where}.type: content of type {self.type!r} is not supported; {reads} read here"
            raise make_unsupported_error(f"{where}.type", text)
        if self.text is None:
            raise make_missing_error(f"{where}.text")
        return TextPart(self.text)

    def _read_image(self, where: str, images: RequestImages) -> ImagePart:
        if self.type == "image":
            source, where = self.source or {}, f"{where}.source"
            if source.get("type") != "base64":
                text = f"{where}.type: {source.get('type')!r:.80} is not supported; base64 is, nothing is fetched"
                raise make_unsupported_error(f"{where}.type", text)
            kind, data = (_required_text(source, name, where) for name in ("media_type", "data"))
            return images.read_base64(kind, data, f"{where}.data")
        if isinstance(self.image_url, dict):
            return images.read(_required_text(self.image_url, "url", f"{where}.image_url"), f"{where}.image_url.url")
        if self.image_url is None:
            raise make_missing_error(f"{where}.image_url")
        return images.read(self.image_url, f"{where}.image_url")


def _required_text(fields: Mapping[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if value is None:
        raise make_missing_error(f"{where}.{name}")
    if not isinstance(value, str):
        raise RequestError(400, f"{where}.{name}: must be a text", param=f"{where}.{name}")
    return value


Content = str | list[ContentBlock]


def read_content(
    content: str | Sequence[ContentBlock] | None,
    where: str,
    images: RequestImages = TEXT_ONLY,
    *,
    separator: str = "\n",
) -> tuple[ContentPart, ...]:
    """Return a content's images and, between them, its joined texts; raises RequestError at the path `where`."""
    if content is None or isinstance(content, str):
        return (TextPart(content),) if content else ()
    read = merge_texts((block.read_content(f"{where}.{i}", images) for i, block in enumerate(content)), separator)
    return tuple(part for part in read if isinstance(part, TextPart | ImagePart))


def merge_texts(parts: Iterable[Part], separator: str = "") -> tuple[Part, ...]:
    """Merge adjacent texts, with `separator` between them, and adjacent thinking."""
    merged: list[Part] = []
    for kind, run in groupby(parts, type):
        if kind is TextPart:
            merged.append(TextPart(separator.join(part.text for part in run if isinstance(part, TextPart))))
        elif kind is ThinkingPart:
            merged.append(ThinkingPart("".join(part.text for part in run if isinstance(part, ThinkingPart))))
        else:
            merged += run
    return tuple(merged)


class Turns:
    """Collects the messages of a conversation from a request's turns, blocks or items."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._open_parts: list[Part] | None = None  # parts of the open assistant message, if any

    def add(self, role: Role, parts: Sequence[Part], *, begins: bool = False) -> None:
        """Add a turn.

        Consecutive assistant turns are merged, unless `begins`. In other turns each tool result is a message of its
        own, and so is the text before and after them.
        """
        if role == "assistant":
            if begins or self._open_parts is None:
                self._close_message()
                self._open_parts = []
            self._open_parts += parts
            return
        self._close_message()
        runs = [(key, tuple(run)) for key, run in groupby(parts, lambda part: isinstance(part, ToolResult))]
        for are_results, run in runs or [(False, ())]:
            self._messages += [Message("tool", (part,)) for part in run] if are_results else [Message(role, run)]

    def messages(self) -> tuple[Message, ...]:
        self._close_message()
        return tuple(self._messages)

    def messages_to_answer(self, field: str) -> tuple[Message, ...]:
        """Return the messages of `field`; raises RequestError if the assistant's is the last."""
        if self._open_parts is not None:
            raise make_unsupported_error(field, f"{field}: the last is the assistant's; prefill is not supported")
        return self.messages()

    def _close_message(self) -> None:
        if self._open_parts is not None:
            self._messages.append(Message("assistant", merge_texts(self._open_parts)))
            self._open_parts = None


def make_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a function as templates render it; `parameters` is a JSON schema."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {"type": "object"}}}


def names_of(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of tools as templates render them."""
    return tuple(tool["function"]["name"] for tool in tools)


def check_chosen(names: Sequence[object], tools: Sequence[Mapping[str, Any]], field: str) -> None:
    """Raise RequestError for a chosen tool that the request does not declare."""
    known = set(names_of(tools))
    unknown = [name for name in names if not isinstance(name, str) or name not in known]
    if unknown:
        raise RequestError(400, f"{field}: {unknown[0]!r} is not one of the request's tools", param=field)


def make_tool_type_error(kind: str | None, where: str) -> RequestError:
    """Return the error for a tool that is not a function of the client."""
    return make_unsupported_error(f"{where}.type", f"{where}.type: tools of type {kind!r} are not supported")


def make_format_guide(kind: str, schema: dict[str, Any] | None, schema_field: str) -> Guide | None:
    """Return the constraint of a response format: `text`, `json_object` or `json_schema`.

    Raises RequestError, naming `schema_field`, for a json_schema without its schema.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide("json_object")
    if schema is None:
        raise make_missing_error(schema_field)
    return Guide("json_schema", json.dumps(schema))


def arguments_text(arguments: Mapping[str, Any] | None) -> str:
    """Return the arguments of a call as a policy writes them."""
    if arguments is not None and arguments.keys() == {RAW_ARGUMENTS}:
        return str(arguments[RAW_ARGUMENTS])
    return json.dumps(arguments or {}, ensure_ascii=False)


def arguments_object(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments as an object; malformed ones stand under `RAW_ARGUMENTS`."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: call.arguments}


def sign(thinking: str) -> str:
    """Return the signature of thinking, so that modified thinking is detected when sent back.

    Clients may decode it from base64 in either of its alphabets: hexadecimal digits belong to both.
    """
    digest = blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=SIGNATURE_BYTES, person=b"nemo-rl")
    return digest.hexdigest()


def check_signature(signature: str | None, thinking: str, where: str) -> None:
    """Raise RequestError if the signature at the path `where` is not that of the thinking."""
    if signature != sign(thinking):
        raise RequestError(400, f"{where}: not that of this thinking", param=where)
