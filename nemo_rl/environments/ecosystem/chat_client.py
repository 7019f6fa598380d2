"""A client of the gateway for one rollout, and the tool loop of environments that own an agent's loop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from nemo_rl.data.messages import to_openai_message
from nemo_rl.tracing import trace_headers
from nemo_rl.types import Prompt

MAX_TRIES = 4  # per call: the engine may fail, or be busy
BACKOFF_S = 0.5  # before the second try; doubles
MODEL = "policy"  # the gateway accepts any name


class ChatCallError(Exception):
    """The gateway refused a call, or failed it MAX_TRIES times."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's answer to one call."""

    message: Mapping[str, Any]  # in OpenAI's format, as later calls send it back
    is_truncated: bool  # cut off by the token limit

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls") or ()


class ChatClient:
    """A client of one session: `async with ChatClient(base_url, api_key, timeout_s=60) as policy: ...`."""

    def __init__(self, base_url: str, api_key: str, *, timeout_s: float) -> None:
        self._url = f"{base_url}/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._http is not None
        await self._http.close()

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Reply | None:
        """Return the policy's answer; None if the conversation leaves no room for one.

        Raises ChatCallError if the gateway refuses the request, or fails it MAX_TRIES times.
        """
        body: dict[str, Any] = {"model": MODEL, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        for attempt in range(MAX_TRIES):
            status, answer = await self._post(body)
            if status == 200:
                choice = answer["choices"][0]
                return Reply(_without_nulls(choice["message"]), choice["finish_reason"] == "length")
            error = answer.get("error") or {}
            if error.get("code") == "context_length_exceeded":
                return None
            is_last = attempt + 1 == MAX_TRIES
            if is_last or (status < 500 and status != 429):
                raise ChatCallError(f"status {status}: {error.get('message', answer)}")
            await asyncio.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        assert self._http is not None, "used outside of its `async with`"
        try:
            async with self._http.post(self._url, json=body, headers=trace_headers()) as response:
                return response.status, await response.json()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            if isinstance(error, TimeoutError):
                raise
            return 503, {"error": {"message": f"{type(error).__name__}: {error}"}}  # worth another try


async def converse_with_tools(
    policy: ChatClient,
    prompt: Prompt,
    tools: Sequence[Mapping[str, Any]],
    call_tool: Callable[[Mapping[str, Any]], Awaitable[str | list[dict[str, Any]]]],
    *,
    max_turns: int,
) -> str | None:
    """Let the policy answer and call tools, for at most `max_turns` responses; return the text of the last one.

    `call_tool` returns the result of a call's `function`, a text or parts in OpenAI's format. None if the context had
    no room for a response.
    """
    messages = prompt_messages(prompt)
    reply: Reply | None = None
    for _ in range(max_turns):
        reply = await policy.complete(messages, tools=tools)
        if reply is None or reply.is_truncated or not reply.tool_calls:
            break
        messages.append(dict(reply.message))
        for call in reply.tool_calls:
            content = await call_tool(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return None if reply is None else reply.text


def prompt_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Return a prompt's messages in OpenAI's format, as an agent's first call sends them."""
    return [{"role": message.role, "content": to_openai_message(message)["content"]} for message in prompt.messages]


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}
