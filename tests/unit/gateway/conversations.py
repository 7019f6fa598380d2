"""Scripted conversations over every dialect, with the official clients of all but Gemini.

A script is a list of words. `u:CODE` appends a user's message, and CODE says what the engine will answer: t thinking,
x text, c a tool call, h text that never ends. `a` asks, `r:CODE` answers the calls of the last response; the others
are the methods of `Agent`.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from aiohttp import ClientResponse, ClientSession
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, LengthFinishReasonError

from nemo_rl.gateway.server import GatewayServer
from nemo_rl.types import Completion, FailedRequest, GenerationRequest
from tests.unit.gateway.engines import DEADLINE_S, TOOL, SpeakingGeneration, text_of

NAME = "qwen3"
PARTS = {"t": "<think>plan it</think>\n\n", "x": "Some täxt 漢. ", "h": "An endless story goes on and on"}
MODES = ("chat", "chat stream", "messages", "messages stream", "responses", "responses stream", "previous")
MODES += ("references", "references stream")  # of Responses: a response's items are sent back by their ids
if find_spec("nemo_rl.gateway.dialects.gemini"):
    # the stream's calls and results are sent back without ids, in the pieces of the stream
    MODES += ("gemini", "gemini stream")


def speak(request: GenerationRequest, prompt: str) -> str:
    """What the last code of the prompt asks for."""
    code = prompt.rpartition("DO:")[2].partition("<")[0].split()[0]
    calls = (f'<tool_call>\n{{"name": "add", "arguments": {{"a": {i}}}}}\n</tool_call>' for i in range(9))
    return "".join(PARTS[letter] if letter in PARTS else next(calls) for letter in code).rstrip()


class ScriptedEngine(SpeakingGeneration):
    """Says what the prompt asks for, with log-probs that follow the seed; stories hang in streams until cancelled."""

    def __init__(self) -> None:
        super().__init__(NAME, speak, between_tokens=self._pass_on)
        self._told = Counter[str]()  # tokens by request

    def _answer_to(self, request: GenerationRequest) -> Completion | FailedRequest:
        answer = super()._answer_to(request)
        assert isinstance(answer, Completion)
        draws = random.Random(request.seed)
        return replace(answer, logprobs=tuple(-draws.random() for _ in answer.token_ids))

    async def _pass_on(self, request: GenerationRequest) -> None:
        try:
            await asyncio.sleep(0)
            self._told[request.request_id] += 1
            if speak(request, self.prompt_of(request)) == PARTS["h"] and self._told[request.request_id] == 16:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def prompt_of(self, request: GenerationRequest) -> str:
        return text_of(self._name, request.token_ids)


@dataclass
class Agent:
    """An agent that plays a script in one dialect; `turns` is its history in the dialect's own shape."""

    server: GatewayServer
    engine: ScriptedEngine
    clients: "Clients"
    mode: str
    session_id: str
    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=lambda: [TOOL])
    turns: list[Any] = field(default_factory=list)  # (role, native): a user's text, a response, results by call id
    answered: list[tuple[str, int]] = field(default_factory=list)  # (response id, turns up to it)

    @property
    def streams(self) -> bool:
        return self.mode.endswith(("stream", "previous"))

    async def play(self, script: str) -> None:
        for word in script.split():
            name, _, code = word.partition(":")
            method = {"u": self.user, "a": self.ask, "r": self.results}.get(name) or getattr(self, name)
            result = method(code) if code else method()
            if result is not None:
                await result

    def user(self, code: str) -> None:
        self.turns.append(("user", f"DO:{code} please"))

    def results(self, code: str) -> None:
        ids = call_ids(self.turns[-1][1])
        assert ids, "no call to answer"
        self.turns.append(("tool", [(call_id, f"{i} DO:{code} it") for i, call_id in enumerate(ids)]))

    def sys(self) -> None:
        self.system = "Be brief."

    def edit(self) -> None:
        """Rewrite the first message."""
        self.turns[0] = ("user", "edited: " + self.turns[0][1])
        self.answered.clear()

    def swap(self, code: str) -> None:
        """Rewrite the last message, a user's."""
        self.turns[-1] = ("user", f"DO:{code} instead")

    def compact(self, code: str) -> None:
        self.turns = [("user", f"summary; DO:{code} now")]
        self.answered.clear()

    def retools(self) -> None:
        self.tools = [{**TOOL, "function": {**TOOL["function"], "name": "sum"}}]  # type: ignore[dict-item]

    def notools(self) -> None:
        self.tools = []

    def notext(self) -> None:
        self._keep(lambda kind: kind != "text")

    def nothink(self) -> None:
        self._keep(lambda kind: kind != "thinking")

    def _keep(self, keeps: Any) -> None:
        """Drop parts of the last response, as a client does that does not send them back."""
        _, said = self.turns[-1]
        if isinstance(said, dict):
            kinds = {"content": "text", "reasoning_content": "thinking"}
            kept = {key: value for key, value in said.items() if keeps(kinds.get(key, key))}
            self.turns[-1] = ("assistant", kept)
        elif self.mode.startswith("gemini"):
            kept = [part for each in said for part in each["parts"] if keeps(gemini_kind(part))]
            self.turns[-1] = ("assistant", [{"role": "model", "parts": kept}])
        else:
            kinds = {"message": "text", "reasoning": "thinking"}
            self.turns[-1] = ("assistant", [b for b in said if keeps(kinds.get(b["type"], b["type"]))])
        self.answered.clear()

    async def retry(self) -> None:
        """Ask the same again and keep the second answer."""
        self.turns.pop()
        if self.answered:
            self.answered.pop()
        await self.ask()

    async def sub(self, code: str) -> None:
        """Let a sub-agent ask in the same session."""
        other = Agent(self.server, self.engine, self.clients, self.mode, self.session_id, tools=self.tools)
        await other.play(f"u:{code} a")

    async def short(self) -> None:
        await self.ask(max_tokens=4)

    async def cancel(self) -> None:
        """Break off a stream after its first text."""
        before = self.engine.num_cancelled
        api, fields = self._request(None)
        stream = await api.create(**fields, stream=True)
        async for event in stream:
            if "'A'" in repr(event):  # the delta of the first token
                break
        await stream.close()
        while self.engine.num_cancelled == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def ask(self, max_tokens: int | None = None) -> None:
        api, fields = self._request(max_tokens)
        if not self.streams:
            done = await api.create(**fields)
        elif self.mode.startswith("chat"):
            done = await accumulated(api, fields)
        elif self.mode.startswith("messages"):
            async with api.stream(**fields) as stream:
                done = await stream.get_final_message()
        elif self.mode.startswith("gemini"):
            done = [event async for event in await api.create(**fields, stream=True)]
        else:  # the client's own accumulator knows no response that was cut
            events: list[Any] = [event async for event in await api.create(**fields, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            done = events[-1].response
        self.turns.append(("assistant", native(done)))
        self.answered.append((getattr(done, "id", ""), len(self.turns)))

    def _request(self, max_tokens: int | None) -> tuple[Any, dict[str, Any]]:
        """Return the API and the fields of the next request."""
        url = self.server.session_url(self.session_id)
        if self.mode.startswith("gemini"):
            return self.clients.gemini(url), self._gemini_request(max_tokens)
        openai, anthropic = self.clients.of(url)
        fields: dict[str, Any] = {"model": "m", **({"tools": self._native_tools()} if self.tools else {})}
        if self.mode.startswith("chat"):
            system = [{"role": "system", "content": self.system}] if self.system else []
            limit = {"max_tokens": max_tokens} if max_tokens else {}
            return openai.chat.completions, {**fields, **limit, "messages": [*system, *self._flat(chat_turn)]}
        if self.mode.startswith("messages"):
            system = {"system": [{"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}}]}
            fields |= system if self.system else {}
            return anthropic.messages, {
                **fields,
                "messages": self._flat(messages_turn),
                "max_tokens": max_tokens or 4096,
            }
        start = 0
        if self.mode == "previous" and self.answered:
            fields["previous_response_id"], start = self.answered[-1]
        fields |= {"instructions": self.system} if self.system else {}
        fields |= {"max_output_tokens": max_tokens} if max_tokens else {}
        render = reference_turn if self.mode.startswith("references") else responses_turn
        return openai.responses, {**fields, "input": self._flat(render, start)}

    def _gemini_request(self, max_tokens: int | None) -> dict[str, Any]:
        system = {"systemInstruction": {"parts": [{"text": self.system}]}} if self.system else {}
        names = {"parameters": "parametersJsonSchema"}
        declared = [{names.get(key, key): value for key, value in tool["function"].items()} for tool in self.tools]
        config = {"maxOutputTokens": max_tokens, "thinkingConfig": {"includeThoughts": self.streams}}
        tools = {"tools": [{"functionDeclarations": declared}]} if declared else {}
        return {**system, **tools, "contents": self._flat(gemini_turn), "generationConfig": config}

    def _flat(self, render: Any, start: int = 0) -> list[Any]:
        return [item for turn in self.turns[start:] for item in render(*turn)]

    def _native_tools(self) -> list[Any]:
        if self.mode.startswith("chat"):
            return self.tools
        functions = [tool["function"] for tool in self.tools]
        if self.mode.startswith("messages"):
            names = {"parameters": "input_schema"}
            return [{names.get(key, key): value for key, value in each.items()} for each in functions]
        return [{"type": "function", **each} for each in functions]


class Clients:
    """The official clients, one of each for all sessions of a test: making one costs more than many calls."""

    def __init__(self) -> None:
        common: Any = {"base_url": "http://unused", "api_key": "unused", "max_retries": 0, "timeout": DEADLINE_S}
        self._openai = AsyncOpenAI(**common)
        self._anthropic = AsyncAnthropic(**common)
        self._http: ClientSession | None = None

    def of(self, base_url: str) -> tuple[AsyncOpenAI, AsyncAnthropic]:
        return (
            self._openai.with_options(base_url=base_url),
            self._anthropic.with_options(base_url=base_url.removesuffix("/v1")),
        )

    def gemini(self, base_url: str) -> "GeminiApi":
        self._http = self._http or ClientSession()
        return GeminiApi(self._http, base_url)

    async def close(self) -> None:
        await self._openai.close()
        await self._anthropic.close()
        if self._http is not None:
            await self._http.close()


@dataclass
class GeminiApi:
    """Gemini's API in plain HTTP, whose history is in the API's own shape; test_gemini.py has the official client."""

    http: ClientSession
    base_url: str

    async def create(self, *, stream: bool = False, **body: Any) -> Any:
        url = f"{self.base_url}/v1beta/models/m:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}"
        response = await self.http.post(url, json=body)
        if stream and response.status == 200:
            return GeminiEvents(response)
        answer = await response.json()
        assert response.status == 200, answer
        return [answer]


@dataclass
class GeminiEvents:
    response: ClientResponse

    async def __aiter__(self) -> Any:
        async for line in self.response.content:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    async def close(self) -> None:
        self.response.close()


async def accumulated(completions: Any, fields: dict[str, Any]) -> Any:
    """The completion that the client's accumulator makes of a stream; it raises one that was cut."""
    async with completions.stream(**fields) as stream:
        try:
            return await stream.get_final_completion()
        except LengthFinishReasonError as error:
            return error.completion


def native(done: Any) -> Any:
    """What a client keeps of a response: a message, content blocks, output items, or contents of a stream's pieces."""
    if isinstance(done, list):
        contents = [event["candidates"][0]["content"] for event in done]
        for part in (part for content in contents for part in content["parts"] if len(done) > 1):
            part.get("functionCall", {}).pop("id", None)
        return contents
    if hasattr(done, "choices"):
        said = done.choices[0].message.model_dump(exclude_none=True)
        said.pop("parsed", None)
        for call in said.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
        return said
    parts = done.content if hasattr(done, "content") else done.output
    return [part.model_dump(exclude_none=True, exclude={"parsed_arguments", "parsed_output"}) for part in parts]


def call_ids(said: Any) -> list[str]:
    if isinstance(said, dict):
        return [call["id"] for call in said.get("tool_calls", ())]
    if said and "parts" in said[0]:
        parts = [part for content in said for part in content["parts"]]
        return [part["functionCall"].get("id", "") for part in parts if "functionCall" in part]
    return [part.get("call_id") or part["id"] for part in said if part["type"] in ("tool_use", "function_call")]


def gemini_kind(part: dict[str, Any]) -> str:
    return "call" if "functionCall" in part else "thinking" if part.get("thought") else "text"


def gemini_turn(role: str, turn: Any) -> list[Any]:
    if role == "assistant":
        return turn
    if role == "tool":
        results = [{**({"id": i} if i else {}), "name": "add", "response": {"output": text}} for i, text in turn]
        return [{"role": "user", "parts": [{"functionResponse": result} for result in results]}]
    return [{"role": role, "parts": [{"text": turn}]}]


def chat_turn(role: str, turn: Any) -> list[Any]:
    if role == "tool":
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in turn]
    return [turn if role == "assistant" else {"role": role, "content": turn}]


def messages_turn(role: str, turn: Any) -> list[Any]:
    if role == "tool":
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in turn]
        return [{"role": "user", "content": blocks}]
    return [{"role": role, "content": turn or [{"type": "text", "text": ""}]}]


def responses_turn(role: str, turn: Any) -> list[Any]:
    if role == "tool":
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in turn]
    return turn if role == "assistant" else [{"role": role, "content": turn}]


def reference_turn(role: str, turn: Any) -> list[Any]:
    if role != "assistant":
        return responses_turn(role, turn)
    return [{"type": "item_reference", "id": item["id"]} for item in turn]
