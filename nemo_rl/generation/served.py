"""A model served by OpenAI-compatible servers: `/v1/completions` with token ids, or `/v1/chat/completions`.

Completions take and give token ids if the server can (vLLM): then a turn's tokens are exactly those that were
sampled. Chat completions take messages; the server renders them, and only the text of an answer is known.
"""

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from nemo_rl.data.messages import to_openai_message
from nemo_rl.distributed.endpoint import ContextLengthExceeded, Endpoint, EndpointError
from nemo_rl.errors import GenerationError
from nemo_rl.generation.requests import as_completed, structured_outputs
from nemo_rl.interfaces import Generation
from nemo_rl.types import UNKNOWN_TOKEN, Completion, FailedRequest, GenerationRequest
from nemo_rl.weight_manifests import Weights

Api: TypeAlias = Literal["completions", "chat"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_SEED = 2**63 - 1  # servers keep seeds in an int64
CHARACTERS_PER_TOKEN = 4  # estimate for `tokens_per_minute` if only the text of a prompt is known
FINISH_REASONS = ("stop", "length")

BuildBody: TypeAlias = Callable[[GenerationRequest], dict[str, Any]]
ParseResponse: TypeAlias = Callable[[GenerationRequest, Mapping[str, Any]], Completion]


class MalformedResponse(GenerationError):
    """A server's answer without the requested content."""


class ServedGeneration(Generation):
    """An engine without control of memory and weights, which are the server's own.

    A request that the server refuses, or does not answer after all retries of the endpoint, is a FailedRequest.
    """

    def __init__(self, endpoint: Endpoint, *, model: str, api: Api, limit_key: str = "max_tokens") -> None:
        """Take ownership of `endpoint`; `limit_key` is the server's name for the token limit of a chat answer."""
        self._endpoint = endpoint
        self._path = COMPLETIONS if api == "completions" else CHAT
        self._parse_response: ParseResponse = token_completion if api == "completions" else chat_completion
        self._build_body: BuildBody = (
            (lambda request: completion_body(request, model))
            if api == "completions"
            else (lambda request: chat_body(request, model, limit_key))
        )

    @property
    def is_async(self) -> bool:
        return True

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        return as_completed(requests, self._answer)

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        if request.images:
            return FailedRequest(
                request.request_id, f"{len(request.images)} images for a server that is sent token ids"
            )
        body = self._build_body(request)
        estimated = len(request.token_ids) + sum(len(m.content) for m in request.messages) // CHARACTERS_PER_TOKEN
        try:
            answer = await self._endpoint.post(self._path, body, num_tokens=estimated, caller_has_deadline=True)
            completion = self._parse_response(request, answer)
        except (EndpointError, MalformedResponse) as error:
            is_too_long = isinstance(error, ContextLengthExceeded)
            return FailedRequest(request.request_id, str(error), is_too_long=is_too_long)
        self._endpoint.correct_token_estimate(_total_tokens(answer, estimated), estimated=estimated)
        return completion

    async def pause(self, *, keep_cache: bool = False) -> None:
        """Do nothing: weights never change."""

    async def resume(self) -> None: ...

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        raise GenerationError("the weights of a server at an address are its own")

    async def close(self) -> None:
        await self._endpoint.close()


def completion_body(request: GenerationRequest, model: str) -> dict[str, Any]:
    """Return a `/v1/completions` body as vLLM extends it: prompt and answer as ids, only our own stop tokens."""
    sampling = request.sampling
    return {
        **_sampling_body(request, model),
        "prompt": list(request.token_ids),
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
    }


def chat_body(request: GenerationRequest, model: str, limit_key: str) -> dict[str, Any]:
    """Return a `/v1/chat/completions` body, with nothing beyond OpenAI's own parameters unless it is set."""
    sampling = request.sampling
    return {
        **_sampling_body(request, model),
        "messages": [to_openai_message(message) for message in request.messages],
        limit_key: sampling.max_new_tokens,
        **({"tools": list(request.tools)} if request.tools else {}),
        **({"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}),
    }


def _sampling_body(request: GenerationRequest, model: str) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.seed & MAX_SEED,
        **({"top_k": sampling.top_k} if sampling.top_k > 0 else {}),
        **({"stop": list(sampling.stop_strings)} if sampling.stop_strings else {}),
        **({"structured_outputs": structured_outputs(sampling.guide)} if sampling.guide else {}),
    }


def token_completion(request: GenerationRequest, answer: Mapping[str, Any]) -> Completion:
    """Return the sampled ids with the server's log-probs, which vLLM computes from the unscaled logits."""
    choice = _choice(answer)
    token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(token_ids, list):
        raise MalformedResponse("the server gave no token_ids: server.api=chat is for servers without return_token_ids")
    if not isinstance(logprobs, list) or len(logprobs) != len(token_ids):
        raise MalformedResponse(f"the server gave {len(token_ids)} tokens without a log-prob each")
    return Completion(
        request.request_id,
        tuple(token_ids),
        tuple(math.nan if logprob is None else float(logprob) for logprob in logprobs),
        choice["finish_reason"],
    )


def chat_completion(request: GenerationRequest, answer: Mapping[str, Any]) -> Completion:
    """Return the text of an answer, with as many unknown tokens as the server counted."""
    choice = _choice(answer)
    message = choice.get("message") or {}
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        text += _render_tool_call(call)
    count = (answer.get("usage") or {}).get("completion_tokens")
    count = min(count, request.sampling.max_new_tokens) if isinstance(count, int) and count >= 0 else 0
    return Completion(
        request.request_id,
        (UNKNOWN_TOKEN,) * count,
        (math.nan,) * count,
        choice["finish_reason"],
        text=text,
    )


def _choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first choice, whose finish reason must be a known one."""
    try:
        choice = dict(answer["choices"][0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MalformedResponse(f"the server gave no choice: {str(answer)[:200]}") from error
    if choice.get("finish_reason") == "tool_calls":
        choice["finish_reason"] = "stop"
    if choice.get("finish_reason") not in FINISH_REASONS:
        raise MalformedResponse(f"the server ended it with {choice.get('finish_reason')!r}")
    return choice


def _render_tool_call(call: Mapping[str, Any]) -> str:
    """Render a call that the server took out of the text as models write it and environments read it (hermes)."""
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        arguments = function.get("arguments")
    return f"<tool_call>\n{json.dumps({'name': function.get('name'), 'arguments': arguments})}\n</tool_call>"


def _total_tokens(answer: Mapping[str, Any], estimated: int) -> int:
    total = (answer.get("usage") or {}).get("total_tokens")
    return total if isinstance(total, int) else estimated
