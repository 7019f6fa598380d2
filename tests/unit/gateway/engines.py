"""Engines whose answers are texts, and what a gateway is made of, for the tests of this directory."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from yarl import URL

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.server import GatewayServer, ServerSettings
from nemo_rl.interfaces import Generation
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams
from tests.fakes.generation import FakeGeneration
from tests.templates import byte_tokenizer

DEADLINE_S = 120.0  # for what must happen at all
ADDRESS = URL("/v1/models/policy:generateContent")  # read only by an API whose paths name the model

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a sum",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@functools.cache
def tokenizer_of(name: str):
    return byte_tokenizer(name)


@functools.cache
def encoder_of(name: str) -> ChatEncoder:
    return ChatEncoder(tokenizer_of(name))


def codec_of(name: str) -> Codec:
    return Codec(encoder_of(name), tool_parser_name="hermes", reasoning_parser_name="think")


def tokens_of(name: str, text: str, *, stopped: bool = True) -> tuple[int, ...]:
    """What a policy would have sampled to say this text."""
    stop = encoder_of(name).stop_token_ids[-1:] if stopped else ()
    return (*tokenizer_of(name).encode(text, add_special_tokens=False), *stop)


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def text_of(name: str, token_ids: Sequence[int]) -> str:
    return str(tokenizer_of(name).decode(list(token_ids), skip_special_tokens=False))


def completion_of(token_ids: Sequence[int], *, versions: tuple[int, int] = (0, 0)) -> Completion:
    return Completion("r", tuple(token_ids), tuple(-0.5 - i for i in range(len(token_ids))), "stop", versions)


class SpeakingGeneration(FakeGeneration):
    """Answers each request with `say(request, its prompt's text)`; None fails the request, an exception is raised."""

    def __init__(
        self,
        name: str,
        say: Callable[[GenerationRequest, str], str | None],
        *,
        before: Callable[[GenerationRequest], Awaitable[None]] | None = None,
        between_tokens: Callable[[GenerationRequest], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self.num_cancelled = 0
        self._name = name
        self._say = say
        self._before = before
        self._between_tokens = between_tokens  # awaited after each token of a stream

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        for request in requests:
            self.requests.append(request)
            try:
                if self._before is not None:
                    await self._before(request)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            answer = self._answer_to(request)
            if isinstance(answer, Completion) and request.on_tokens is not None:
                for i in range(len(answer.token_ids)):
                    request.on_tokens(i, answer.token_ids[i : i + 1])
                    if self._between_tokens is not None:
                        await self._between_tokens(request)
            yield answer

    def _answer_to(self, request: GenerationRequest) -> Completion | FailedRequest:
        text = self._say(request, text_of(self._name, request.token_ids))
        if text is None:
            return FailedRequest(request.request_id, "it was made to fail")
        ids = tokens_of(self._name, text)[: request.sampling.max_new_tokens]
        ended = "stop" if ids[-1] in request.sampling.stop_token_ids else "length"
        return Completion(request.request_id, ids, tuple(-0.25 for _ in ids), ended, (3, 4))


def rules(name: str = "chatml", *, max_new_tokens: int = 256, **changes: Any) -> CompletionRules:
    sampling = SamplingParams(max_new_tokens, temperature=0.7, stop_token_ids=encoder_of(name).stop_token_ids)
    usual = CompletionRules("policy", 4096, sampling, seed=7, max_concurrent_calls=64, timeout_s=DEADLINE_S)
    return replace(usual, **changes)


async def started(
    generation: Generation,
    name: str = "chatml",
    settings: ServerSettings | None = None,
    **changes: Any,
) -> GatewayServer:
    return await GatewayServer.start(generation, codec_of(name), rules(name, **changes), settings)
