"""A malformed or unsupported request to Gemini's API gets Google's error, with the field named."""

from typing import Any

import pytest

from nemo_rl.gateway.dialects.gemini import Gemini
from nemo_rl.gateway.request_errors import RequestError
from tests.unit.gateway.engines import ADDRESS
from tests.unit.gateway.test_malformed import HI, NOT_OBJECTS, REFUSED_BY_ALL, refused

ASKED = {"role": "user", "parts": [{"text": "hi"}]}
DECLARED = {"tools": [{"functionDeclarations": [{"name": "f"}]}]}


def contents(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"contents": [{"role": role, "parts": list(parts)}, ASKED]}


def declared(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"functionDeclarations": [fields]}]}


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


def chosen(**fields: Any) -> dict[str, Any]:
    return {**DECLARED, "toolConfig": {"functionCallingConfig": fields}}


FIRST = "contents.0.parts.0"
GEMINI: list[tuple[str, dict[str, Any]]] = [
    *REFUSED_BY_ALL,
    ("contents", {"contents": None}),
    ("contents", {"contents": []}),
    ("contents", {"contents": "hi"}),
    ("contents", {"contents": {"parts": []}}),
    ("contents.0", {"contents": ["hi"]}),
    ("contents.0.role", {"contents": [{"role": "assistant", "parts": []}]}),
    ("contents.0.role", {"contents": [{"role": 1, "parts": []}]}),
    ("contents.0.parts", {"contents": [{"parts": "hi"}]}),
    ("contents", {"contents": [ASKED, {"role": "model", "parts": [{"text": "It is"}]}]}),
    (FIRST, contents("hi")),
    (f"{FIRST}.text", contents({})),
    (f"{FIRST}.text", contents({"text": 3})),
    (f"{FIRST}.thought", contents({"text": "a", "thought": "yes"})),
    (f"{FIRST}.thought", contents({"text": "a", "thought": True})),
    (f"{FIRST}.thoughtSignature", contents({"text": "a", "thoughtSignature": 3}, role="model")),
    (
        f"{FIRST}.thoughtSignature",
        contents({"text": "a", "thought": True, "thoughtSignature": "forged"}, role="model"),
    ),
    (f"{FIRST}.inlineData", contents({"inlineData": {"mimeType": "image/png", "data": ""}})),
    (f"{FIRST}.inlineData", contents({"inline_data": {"mime_type": "image/png", "data": ""}})),
    (f"{FIRST}.fileData", contents({"fileData": {"fileUri": "x"}})),
    ("contents.0.parts.1.fileData", contents({"text": "a"}, {"text": "b", "fileData": {"fileUri": "x"}})),
    (f"{FIRST}.executableCode", contents({"executableCode": {"code": "1"}}, role="model")),
    (f"{FIRST}.functionCall", contents({"functionCall": {"name": "f"}})),
    (f"{FIRST}.functionCall.name", contents({"functionCall": {}}, role="model")),
    (f"{FIRST}.functionCall.name", contents({"functionCall": {"name": ""}}, role="model")),
    (f"{FIRST}.functionCall.args", contents({"functionCall": {"name": "f", "args": "{}"}}, role="model")),
    (f"{FIRST}.functionCall.id", contents({"functionCall": {"name": "f", "id": 3}}, role="model")),
    (f"{FIRST}.text", contents({"functionCall": {"name": "f"}, "text": "a"}, role="model")),
    (f"{FIRST}.functionResponse", contents({"functionResponse": {"name": "f", "response": {}}}, role="model")),
    (f"{FIRST}.functionResponse.name", contents({"functionResponse": {"response": {}}})),
    (f"{FIRST}.functionResponse.response", contents({"functionResponse": {"name": "f"}})),
    (f"{FIRST}.functionResponse.response", contents({"functionResponse": {"name": "f", "response": "7"}})),
    (f"{FIRST}.functionResponse.parts", contents({"functionResponse": {"name": "f", "response": {}, "parts": [{}]}})),
    ("systemInstruction", {"systemInstruction": "be brief"}),
    ("systemInstruction.parts.0.inlineData", {"systemInstruction": {"parts": [{"inlineData": {}}]}}),
    ("tools", {"tools": {"functionDeclarations": []}}),
    ("tools.0", {"tools": ["f"]}),
    ("tools.0.functionDeclarations", {"tools": [{"functionDeclarations": {"name": "f"}}]}),
    ("tools.0.functionDeclarations.0.name", declared()),
    ("tools.0.functionDeclarations.0.name", declared(name="")),
    ("tools.0.functionDeclarations.0.parameters", declared(name="f", parameters="{}")),
    ("tools.0.functionDeclarations.0.parametersJsonSchema", declared(name="f", parametersJsonSchema=[])),
    ("tools.0.functionDeclarations.0.parameters", declared(name="f", parameters={"properties": {"a": 3}})),
    ("tools.0.functionDeclarations.0.parameters", declared(name="f", parameters={"$defs": {}})),
    ("tools.0.googleSearch", {"tools": [{"googleSearch": {}}]}),
    ("tools.0.codeExecution", {"tools": [{"codeExecution": {}}]}),
    ("tools", {"tools": [{"functionDeclarations": [{"name": "f"}] * 501}] * 2}),
    ("tools.1.urlContext", {"tools": [*DECLARED["tools"], {"urlContext": {}}]}),
    ("toolConfig.functionCallingConfig.mode", chosen(mode="any")),
    ("toolConfig.functionCallingConfig.mode", chosen(mode="REQUIRED")),
    ("toolConfig.functionCallingConfig.allowedFunctionNames", chosen(mode="ANY", allowedFunctionNames=["g"])),
    ("toolConfig.functionCallingConfig.allowedFunctionNames", chosen(mode="AUTO", allowedFunctionNames=["f"])),
    ("toolConfig.functionCallingConfig.allowedFunctionNames", chosen(mode="ANY", allowedFunctionNames="f")),
    ("generationConfig", {"generationConfig": "x"}),
    ("generationConfig.maxOutputTokens", config(maxOutputTokens=0)),
    ("generationConfig.max_output_tokens", config(max_output_tokens="10")),
    ("generationConfig.stopSequences", config(stopSequences="a")),
    ("generationConfig.stopSequences.0", config(stopSequences=[""])),
    ("generationConfig.candidateCount", config(candidateCount=2)),
    ("generationConfig.logprobs", config(responseLogprobs=True, logprobs=3)),
    ("generationConfig.responseLogprobs", config(responseLogprobs=1)),
    ("generationConfig.responseMimeType", config(responseMimeType="text/x.enum")),
    ("generationConfig.responseMimeType", config(responseJsonSchema={"type": "object"})),
    ("generationConfig.responseMimeType", config(responseSchema={"type": "STRING"}, responseMimeType="text/plain")),
    ("generationConfig.responseSchema", config(responseSchema="object")),
    ("generationConfig.responseSchema", config(responseSchema={"items": {"$ref": "#/$defs/A"}})),
    ("generationConfig.responseSchema", config(responseSchema={"anyOf": [{"ref": "A"}]})),
    ("generationConfig.responseSchema", config(responseSchema={"prefixItems": [{"defs": {}}]})),
    ("generationConfig.responseModalities", config(responseModalities=["AUDIO"])),
    ("generationConfig.responseFormat", config(responseFormat=[{"text": {}}])),
    ("generationConfig.speechConfig", config(speechConfig={"voiceConfig": {}})),
    ("generationConfig.image_config", config(image_config={"aspectRatio": "1:1"})),
    ("generationConfig.logit_bias", config(logit_bias={"1": 5})),
    ("generationConfig.guided_regex", config(guided_regex="a")),
    ("generationConfig.thinkingConfig.includeThoughts", config(thinkingConfig={"includeThoughts": "yes"})),
    ("cachedContent", {"cachedContent": "cachedContents/1"}),
    ("messages", {"messages": [HI]}),
    ("tool_choice", {"tool_choice": "none"}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("max_tokens", {"max_tokens": 8}),
    ("stop", {"stop": "a"}),
]


def test_a_wrong_field_is_a_violation_in_googles_envelope():
    for error, body in refused(Gemini(), {"contents": [ASKED]}, GEMINI):
        assert (body["error"]["code"], body["error"]["status"]) == (400, "INVALID_ARGUMENT")
        assert body["error"]["details"][0]["fieldViolations"][0]["field"] == error.param


@pytest.mark.parametrize("body", NOT_OBJECTS)
def test_a_body_that_is_no_object_is_an_invalid_argument(body):
    with pytest.raises(RequestError) as error:
        Gemini().parse(body, ADDRESS)
    assert Gemini().render_error(error.value)["error"]["status"] == "INVALID_ARGUMENT"
