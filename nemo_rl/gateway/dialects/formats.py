"""Formats of responses: those of all APIs, read to the constraint that an engine holds a response to."""

import json
from typing import Any, Literal

from pydantic import Field

from nemo_rl.gateway.dialects.tools import read_openapi_schema
from nemo_rl.gateway.schema import Body, CamelBody, RequestError, make_missing_error
from nemo_rl.types import Guide, GuideKind


class JsonSchema(Body):
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The text that a response must be: chat completions nest the schema, the other APIs do not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def guide(self, field: str, *, nested: bool = False) -> Guide | None:
        """Return the constraint that `field` of the request asks for; raises RequestError without a schema."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Guide("json_object")
        schema = self.schema_
        if nested:
            schema = None if self.json_schema is None else self.json_schema.schema_
        if schema is None:
            raise make_missing_error(f"{field}.{'json_schema' if nested else 'schema'}")
        return Guide("json_schema", json.dumps(schema))


class JsonFormat(ResponseFormat):
    type: Literal["json_schema"]


class OutputConfig(Body):
    format: JsonFormat | None = None
    effort: str | None = None


class FormattedRequest(Body):
    """The fields of Messages that ask for a format: the second is its name in the beta of structured outputs."""

    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None

    def guide(self) -> tuple[Guide | None, str]:
        """Return the constraint, if any, and the field that asks for it; raises RequestError for two."""
        if self.output_config is None or self.output_config.format is None:
            guide = None if self.output_format is None else self.output_format.guide("output_format")
            return guide, "output_format"
        if self.output_format is not None:
            text = "output_format: excludes output_config.format"
            raise RequestError(400, text, param="output_format")
        return self.output_config.format.guide("output_config.format"), "output_config.format"


class TypedResponse(CamelBody):
    """The text that a response of Gemini's API must be."""

    response_mime_type: Literal["text/plain", "application/json"] = "text/plain"
    response_schema: dict[str, Any] | None = None  # of OpenAPI
    response_json_schema: dict[str, Any] | None = None

    def guide(self, where: str) -> Guide | None:
        """Return the constraint that the fields of `where` ask for; raises RequestError for a schema of other text."""
        schema = self.response_json_schema or read_openapi_schema(self.response_schema, f"{where}.responseSchema")
        if self.response_mime_type == "application/json":
            return Guide("json_object") if schema is None else Guide("json_schema", json.dumps(schema))
        if schema is not None:
            field = f"{where}.responseMimeType"
            raise RequestError(400, f"{field}: a response with a schema is application/json", param=field)
        return None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of its kinds."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    def guide(self) -> Guide:
        """Return the constraint; raises RequestError unless there is exactly one."""
        schema = json.dumps(self.json_) if isinstance(self.json_, dict) else self.json_
        texts: dict[GuideKind, str | None] = {"json_schema": schema, "regex": self.regex, "grammar": self.grammar}
        guides = [Guide(kind, text) for kind, text in texts.items() if text is not None]
        guides += [Guide("json_object")] if self.json_object else []
        if len(guides) != 1 or self.model_extra:
            message = "structured_outputs takes exactly one of json, json_object, regex and grammar"
            raise RequestError(400, message, param="structured_outputs")
        return guides[0]


def choose_guide(by_format: Guide | None, structured: StructuredOutputs | None, field: str) -> Guide | None:
    """Return the only constraint of a request, if any; raises RequestError for two."""
    if structured is None:
        return by_format
    if by_format is not None:
        raise RequestError(400, f"{field} and structured_outputs exclude each other", param=field)
    return structured.guide()
