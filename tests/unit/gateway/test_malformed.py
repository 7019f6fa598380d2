"""A malformed or unsupported request gets its dialect's own error, with the field named."""

from typing import Any

import pytest

from nemo_rl.gateway.calls import Dialect
from nemo_rl.gateway.dialects.chat_completions import ChatCompletions
from nemo_rl.gateway.dialects.gemini import Gemini
from nemo_rl.gateway.dialects.messages import Messages
from nemo_rl.gateway.dialects.responses import Responses
from nemo_rl.gateway.schema import RequestError
from tests.unit.gateway.engines import json_bytes

HI: dict[str, Any] = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
OUTPUT = {"type": "json_schema", "schema": {}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def after_hi(*messages: Any) -> list[Any]:
    return [HI, *messages]


def tool_calls(*calls: Any) -> dict[str, Any]:
    return {"messages": after_hi({"role": "assistant", "tool_calls": list(calls)}, HI)}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, HI]}


def items(*each: Any) -> dict[str, Any]:
    return {"input": list(each)}


COMMON: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": 3}),
    ("stream", {"stream": "yes"}),
    ("stream", {"stream": 1}),
    ("tools", {"tools": "f"}),
    ("tools", {"tools": {"name": "f"}}),
    ("tools.0", {"tools": [3]}),
]
REFUSED_BY_ALL: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: "[0-9]+"}) for name in ("guided_regex", "guided_choice", "guided_grammar", "guided_json")),
    ("guided_decoding_backend", {"guided_decoding_backend": "outlines"}),
    ("logit_bias", {"logit_bias": {"1": 5}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("continue_final_message", {"continue_final_message": True}),
    ("add_generation_prompt", {"add_generation_prompt": False}),
    ("bad_words", {"bad_words": ["a"]}),
    ("min_tokens", {"min_tokens": 3}),
    ("ignore_eos", {"ignore_eos": True}),
    ("n", {"n": 2}),
]
CHAT: list[tuple[str, dict[str, Any]]] = [
    *COMMON,
    *REFUSED_BY_ALL,
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": {}}),
    ("messages.0", {"messages": ["hi"]}),
    ("messages.0.role", {"messages": [{"content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": "function", "content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": 1, "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": {"text": "x"}}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": [{"text": "x"}]}]}),
    ("messages.0.name", {"messages": [{"role": "user", "content": "x", "name": 3}]}),
    ("messages.0.name", {"messages": [{"role": "user", "content": "x", "name": {"a": 1}}]}),
    ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    ("messages.0.content.0.text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages.1.tool_calls", {"messages": after_hi({"role": "assistant", "tool_calls": {}})}),
    ("messages.1.tool_calls.0.function", tool_calls({"id": "a"})),
    ("messages.1.tool_calls.0.function.name", tool_calls({"function": {}})),
    ("messages.1.tool_calls.0.function.arguments", tool_calls({"function": {"name": "f", "arguments": 3}})),
    ("messages.1.tool_calls.0.type", tool_calls({"type": "custom", "function": {"name": "f"}})),
    ("messages.1.tool_calls.0.id", tool_calls({"id": 3, "function": {"name": "f"}})),
    ("messages.1.tool_call_id", {"messages": after_hi({"role": "tool", "content": "7", "tool_call_id": 3})}),
    ("messages.1.function_call", {"messages": after_hi({"role": "assistant", "function_call": {"name": "f"}})}),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    ("tools.0.type", {"tools": [{"type": "custom", "function": {"name": "f"}}]}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": "any"}),
    ("tool_choice", {"tool_choice": FUNCTION}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "custom"}}),
    ("tool_choice", {"tool_choice": 3}),
    ("n", {"n": 2}),
    ("n", {"n": "1"}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop", {"stop": 3}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "10"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 3}),
    ("stream_options", {"stream_options": "usage"}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": "json"}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema", "schema": {}}}),
    ("modalities", {"modalities": ["audio"]}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("messages.1.reasoning_content", {"messages": after_hi({"role": "assistant", "reasoning_content": 3})}),
    ("system", {"system": "be brief"}),
    ("instructions", {"instructions": "be brief"}),
    ("text", {"text": {"format": {"type": "json_object"}}}),
    ("output_config", {"output_config": {"format": OUTPUT}}),
]
CLEAR = {"type": "clear_thinking_20251015"}
CALLED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
MESSAGES: list[tuple[str, dict[str, Any]]] = [
    *COMMON,
    *REFUSED_BY_ALL,
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages.0", {"messages": ["hi"]}),
    ("messages.0.role", {"messages": [{"content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": "developer", "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": None}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages.0.content", turn({"text": "x"})),
    ("messages.0.content", turn({"type": 3})),
    ("messages.0.content.0.text", turn({"type": "text"})),
    ("messages.0.content.0.type", turn({"type": "image", "source": {}})),
    ("messages.0.content.0.type", turn({"type": "document", "source": {}})),
    ("messages.0.content.1.type", turn({"type": "text", "text": "a"}, {"type": "image", "source": {}})),
    ("messages.0.content.0.tool_use_id", turn({"type": "tool_result", "content": "7"})),
    ("messages.0.content", turn({"type": "tool_result", "tool_use_id": 3, "content": "7"})),
    ("messages.0.content", turn({"type": "tool_result", "tool_use_id": "a", "content": 7})),
    (
        "messages.0.content.0.content.0.type",
        turn({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}),
    ),
    ("messages.0.content.0.id", turn({**CALLED, "id": None}, role="assistant")),
    ("messages.0.content.0.name", turn({**CALLED, "name": None}, role="assistant")),
    ("messages.0.content.0.input", turn({**CALLED, "input": None}, role="assistant")),
    ("messages.0.content", turn({**CALLED, "input": "{}"}, role="assistant")),
    ("messages.0.content.0.type", turn({"type": "server_tool_use", "id": "a"}, role="assistant")),
    ("messages.0.content.0.signature", turn({"type": "thinking", "thinking": "a"}, role="assistant")),
    (
        "messages.0.content.0.signature",
        turn({"type": "thinking", "thinking": "a", "signature": "forged"}, role="assistant"),
    ),
    ("messages", {"messages": [HI, {"role": "assistant", "content": "It is"}]}),
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "10"}),
    ("model", {"model": None}),
    ("system", {"system": 3}),
    ("system", {"system": [3]}),
    ("system.0.type", {"system": [{"type": "image", "source": {}}]}),
    ("tools.0.name", {"tools": [{"input_schema": {}}]}),
    ("tools.0.name", {"tools": [{"name": ""}]}),
    ("tools.0.input_schema", {"tools": [{"name": "f", "input_schema": "{}"}]}),
    ("tools.0.type", {"tools": [{"name": "bash", "type": "bash_20250124"}]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice.name", {"tool_choice": {"type": "tool", "name": "f"}}),
    ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
    ("output_config.format.type", {"output_config": {"format": {"type": "json_object"}}}),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ("output_config", {"output_config": "json"}),
    ("output_format.schema", {"output_format": {"type": "json_schema", "schema": None}}),
    ("output_format", {"output_format": OUTPUT, "output_config": {"format": OUTPUT}}),
    ("tool_choice.type", {"tool_choice": {"type": "required"}}),
    ("tool_choice.type", {"tools": [{"name": "f"}], "tool_choice": {"name": "f"}}),
    ("tool_choice.type", {"tool_choice": {}}),
    ("stop_sequences", {"stop_sequences": "a"}),
    ("stop_sequences.0", {"stop_sequences": [""]}),
    ("mcp_servers", {"mcp_servers": [{"url": "http://x"}]}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("max_completion_tokens", {"max_completion_tokens": 8}),
    ("stop", {"stop": "a"}),
    ("container", {"container": "c"}),
    ("context_management.edits.0", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    ("context_management.edits.0", {"context_management": {"edits": [{**CLEAR, "keep": {"value": 1}}]}}),
    ("context_management.edits.1", {"context_management": {"edits": [{**CLEAR, "keep": "all"}, CLEAR]}}),
]
NAMESPACE = {"type": "namespace", "name": "n"}
B_C, C = ({"type": "function", "name": name} for name in ("b.c", "c"))
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
RESPONSES: list[tuple[str, dict[str, Any]]] = [
    *COMMON,
    *REFUSED_BY_ALL,
    ("input", {"input": None}),
    ("input", {"input": []}),
    ("input", {"input": 3}),
    ("input", {"input": {"role": "user"}}),
    ("input", items(3)),
    ("input.0.role", items({"content": "x"})),
    ("input", items({"role": "tool", "content": "x"})),
    ("input", items({"role": "user", "content": 3})),
    ("input.0.content", items({"role": "user"})),
    ("input.0.content.0.type", items({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]})),
    ("input.0.content.0.type", items({"role": "user", "content": [{"type": "input_file"}]})),
    ("input.0.content.1.type", items({"role": "user", "content": [{"type": "text", "text": ""}, {"type": "x"}]})),
    ("input.0.content.0.text", items({"role": "user", "content": [{"type": "input_text"}]})),
    ("input.0.content.0.type", items({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})),
    ("input", items({"role": "user", "content": [{"text": "x"}]})),
    ("input.0.type", items({"type": "item_reference", "id": "x"})),
    ("input.0.type", items({"type": "web_search_call", "id": "x"})),
    ("input.1.type", items(HI, {"type": "computer_call", "call_id": "x"})),
    ("input.0.call_id", items({**CALL, "call_id": None})),
    ("input.0.name", items({**CALL, "name": None})),
    ("input.0.arguments", items({**CALL, "arguments": None})),
    ("input", items({**CALL, "arguments": {}})),
    ("input.1.output", items(CALL, {"type": "function_call_output", "call_id": "a"})),
    ("input.1.call_id", items(CALL, {"type": "function_call_output", "output": "7"})),
    ("input", items(CALL, {"type": "function_call_output", "call_id": "a", "output": 7})),
    (
        "input.1.output.0.type",
        items(CALL, {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}),
    ),
    ("instructions", {"instructions": 3}),
    ("instructions", {"instructions": ["be brief"]}),
    ("previous_response_id", {"previous_response_id": 3}),
    ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ("tools.0.type", {"tools": [{"name": "f"}]}),
    ("tools.0.name", {"tools": [{"type": "function"}]}),
    ("tools.0.name", {"tools": [{"type": "namespace", "tools": []}]}),
    ("tools.0.tools.0.type", {"tools": [{**NAMESPACE, "tools": [{"type": "custom", "name": "f"}]}]}),
    ("tools.0.tools.0.type", {"tools": [{**NAMESPACE, "tools": [NAMESPACE]}]}),
    ("tools.0.name", {"tools": [{"type": "function", "name": 3}]}),
    ("tools.0.parameters", {"tools": [{"type": "function", "name": "f", "parameters": "{}"}]}),
    ("tool_choice", {"tool_choice": "any"}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "f"}}),
    ("tool_choice", {"tool_choice": {"type": "web_search"}}),
    ("tool_choice.mode", {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"function": "f"}]}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": ["f"]}]}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}] * 1001}}),
    ("tool_choice.tools", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("tool_choice", {"tool_choice": 3}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": "10"}),
    ("truncation", {"truncation": "none"}),
    ("truncation", {"truncation": True}),
    ("tools.1.tools.0.name", {"tools": [{**NAMESPACE, "tools": [B_C]}, {**NAMESPACE, "name": "n.b", "tools": [C]}]}),
    ("tools.1.tools.0.name", {"tools": [{**C, "name": "n.c"}, {**NAMESPACE, "tools": [C]}]}),
    ("tools.1.name", {"tools": [{**NAMESPACE, "tools": [C]}, {**C, "name": "n.c"}]}),
    ("text", {"text": "json"}),
    ("text.format.type", {"text": {"format": {}}}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "s"}}}),
    ("text.format", {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    ("background", {"background": True}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("max_tokens", {"max_tokens": 8}),
    ("stop", {"stop": "a"}),
    ("input", items({"type": "reasoning", "summary": "x"})),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "p"}}),
]
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
DIALECTS: dict[str, tuple[Dialect, dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "chat": (ChatCompletions(), {"messages": [HI], "model": "m"}, CHAT),
    "messages": (Messages(), {"messages": [HI], "model": "m", "max_tokens": 8}, MESSAGES),
    "responses": (Responses(), {"input": "hi", "model": "m"}, RESPONSES),
    "gemini": (Gemini(), {"contents": [ASKED]}, GEMINI),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_wrong_field_is_named_in_the_dialects_own_envelope(name):
    dialect, good, cases = DIALECTS[name]
    dialect.parse(json_bytes(good))
    assert len(cases) >= 40
    for param, fields in cases:
        changed = {key: value for key, value in {**good, **fields}.items() if value is not None or key not in good}
        with pytest.raises(RequestError) as error:
            dialect.parse(json_bytes(changed))
        assert (error.value.status, (error.value.param or "").startswith(param)) == (400, True), (fields, error.value)
        body = dialect.render_error(error.value)
        assert body["error"]["message"]
        if name == "gemini":
            assert (body["error"]["code"], body["error"]["status"]) == (400, "INVALID_ARGUMENT")
            assert body["error"]["details"][0]["fieldViolations"][0]["field"] == error.value.param
            continue
        assert body["error"]["type"] == "invalid_request_error"
        if name == "messages":
            assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
            assert body["error"]["message"].startswith(error.value.param or "")
        else:
            assert body["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nul", b"\xff", b'"hi"', b"{} {}"])
def test_a_body_that_is_no_object_is_an_error_of_the_dialect(name, body):
    dialect, _, _ = DIALECTS[name]
    with pytest.raises(RequestError) as error:
        dialect.parse(body)
    envelope = dialect.render_error(error.value)["error"]
    assert envelope.get("type", envelope.get("status")) in ("invalid_request_error", "INVALID_ARGUMENT")
