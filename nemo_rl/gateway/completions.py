"""One chat completion from a validated request to an answer: encode, sample, parse, commit. Knows no HTTP."""

import asyncio
import itertools
import logging
import math
from array import array
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.echoes import EchoedCallStore
from nemo_rl.gateway.registry import LiveSession
from nemo_rl.gateway.responses import Answer
from nemo_rl.gateway.schema import CallError, ChatRequest, ContextLengthError, EngineError, RequestError
from nemo_rl.gateway.sessions import CallFailure, Echo, PendingCall, UnknownEcho
from nemo_rl.generation.requests import generate_by_deadline
from nemo_rl.interfaces import Generation
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, Message, SamplingParams

MAX_CHARACTERS_PER_TOKEN = 32  # a conversation with more per token of context cannot fit and is not encoded
MAX_LOGGED_FIELDS = 100  # distinct names of ignored fields; more would be a client's noise

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompletionRules:
    """Settings that all calls of a server share."""

    model_name: str
    max_model_len: int  # tokens of prompt and response together
    sampling: SamplingParams  # the run's; a client may only shorten a response or add stop strings
    seed: int  # of the run
    max_concurrent_calls: int
    timeout_s: float  # of one generation


class CompletionHandler:
    """Answers chat requests with one engine. Raises RequestError for any request that it cannot answer."""

    def __init__(self, generation: Generation, codec: Codec, rules: CompletionRules) -> None:
        self.num_running = 0
        self._generation = generation
        self._codec = codec
        self._rules = rules
        self._call_counter = itertools.count()
        self._logged_fields: set[str] = set()

    async def complete_in_session(self, request: ChatRequest, live: LiveSession, *, is_named: bool = False) -> Answer:
        """Answer a session's call and commit it; a call that fails or is cancelled leaves no trace in the session.

        `is_named`: the request names the session itself, on plain /v1, where echoed tokens identify the chain and
        answers carry their token ids.
        """
        try:
            return await self._complete_and_commit(request, live, is_named=is_named)
        except CallError as error:
            live.session.last_failure = CallFailure(error.kind, str(error))
            raise

    async def _complete_and_commit(self, request: ChatRequest, live: LiveSession, *, is_named: bool) -> Answer:
        messages = self._messages(request)
        echo, num_known = _last_echo(request, messages) if is_named else (None, 0)
        call = self._encode_call(lambda: _begin_in_session(live, messages, request.tool_schemas(), echo, num_known))
        sample_index = live.acquire_sample_index(call)
        try:
            seed = _derive_seed(live.seed, array("q", call.prompt_token_ids).tobytes(), sample_index)
            sampling = self._sampling(request, call, live.sampling or self._rules.sampling)
            generation_request = _make_generation_request(call, sampling, seed, self._rules, live)
            with_token_ids = is_named or bool(request.return_token_ids)
            answer = await self._answer_unless_closed(request, generation_request, live, with_token_ids=with_token_ids)
            live.session.commit(call, answer.completion, answer.response.message, completion_id=answer.completion_id)
        except BaseException:
            live.release_sample_index(call, sample_index)
            raise
        return answer

    async def complete_without_session(self, request: ChatRequest, calls: EchoedCallStore) -> Answer:
        """Answer a call whose chain is identified by the tokens on its last assistant message."""
        messages = self._messages(request)
        echo, num_known = _last_echo(request, messages)
        call = self._encode_call(lambda: calls.begin(messages, request.tool_schemas(), echo=echo, num_known=num_known))
        seed = _derive_seed(self._rules.seed, b"without session", next(self._call_counter))
        sampling = self._sampling(request, call, self._rules.sampling)
        answer = await self._answer(
            request, _make_generation_request(call, sampling, seed, self._rules), with_token_ids=True
        )
        calls.commit(call, answer.completion, answer.response.message)
        return answer

    def next_session_seed(self) -> int:
        """Return a seed for a session that was opened without one."""
        return _derive_seed(self._rules.seed, b"session", next(self._call_counter))

    def _messages(self, request: ChatRequest) -> tuple[Message, ...]:
        request.reject_unsupported()
        self._log_ignored_fields(request.ignored_fields)
        messages = tuple(message.message() for message in request.messages)
        limit = self._rules.max_model_len * MAX_CHARACTERS_PER_TOKEN
        if sum(len(message.content) for message in messages) > limit:
            raise ContextLengthError("more than", self._rules.max_model_len)
        return messages

    def _encode_call(self, encode: Callable[[], PendingCall]) -> PendingCall:
        """Return the encoded call. An error of the template or tokenizer about the messages is the client's mistake."""
        try:
            return encode()
        except UnknownEcho as error:
            raise RequestError(409, str(error), param="messages", code="unknown_tokens") from error
        except Exception as error:
            text = " ".join(str(error).split())[:500]
            raise RequestError(400, f"the conversation cannot be encoded: {text}", param="messages") from error

    async def _answer_unless_closed(
        self, request: ChatRequest, generation_request: GenerationRequest, live: LiveSession, *, with_token_ids: bool
    ) -> Answer:
        task = asyncio.create_task(self._answer(request, generation_request, with_token_ids=with_token_ids))
        live.running.add(task)
        closed = RequestError(409, "the session was closed during this call", code="session_closed")
        try:
            answered = await task
        except asyncio.CancelledError:
            if live.is_closed:
                raise closed from None
            raise
        finally:
            live.running.discard(task)
        if live.is_closed:
            raise closed
        return answered

    async def _answer(
        self, request: ChatRequest, generation_request: GenerationRequest, *, with_token_ids: bool
    ) -> Answer:
        completion = await self._generate(generation_request)
        response = self._codec.read(
            completion.token_ids,
            call_id_seed=str(generation_request.seed),
            stop_strings=generation_request.sampling.stop_strings,
            with_tools=bool(request.tools) and request.tool_choice != "none",
        )
        return Answer(
            completion_id=f"chatcmpl-{generation_request.request_id}",
            model=self._rules.model_name,
            prompt_token_ids=generation_request.token_ids,
            completion=completion,
            response=response,
            with_token_ids=with_token_ids,
            with_logprobs=request.wants_logprobs if with_token_ids else bool(request.logprobs),
        )

    def _sampling(self, request: ChatRequest, call: PendingCall, sampling: SamplingParams) -> SamplingParams:
        room = self._rules.max_model_len - len(call.prompt_token_ids)
        if room <= 0:
            raise ContextLengthError(f"{len(call.prompt_token_ids)} tokens in", self._rules.max_model_len)
        limit = min(room, sampling.max_new_tokens, request.token_limit or room)
        stop_strings = tuple(dict.fromkeys((*sampling.stop_strings, *request.stop_strings)))
        return replace(sampling, max_new_tokens=limit, stop_strings=stop_strings)

    async def _generate(self, generation_request: GenerationRequest) -> Completion:
        """Return what the engine samples; cancelling it cancels the request in the engine."""
        if self.num_running >= self._rules.max_concurrent_calls:
            raise RequestError(429, f"{self.num_running} calls are running", code="over_capacity")
        self.num_running += 1
        try:
            result = await self._first_result(generation_request)
        except Exception as error:  # an engine that raises has failed the request
            logger.exception("engine raised an exception for request %s", generation_request.request_id)
            raise EngineError(f"the engine failed: {type(error).__name__}") from error
        finally:
            self.num_running -= 1
        if isinstance(result, FailedRequest):
            code = "timeout" if result.timed_out else "engine_failed"
            raise EngineError(f"the engine failed: {result.cause}", code=code)
        if (
            len(result.token_ids) != len(result.logprobs)
            or len(result.token_ids) > generation_request.sampling.max_new_tokens
        ):
            counts = f"{len(result.token_ids)} tokens with {len(result.logprobs)} log-probs"
            raise EngineError(f"the engine returned {counts}")
        if not all(map(math.isfinite, result.logprobs)):
            raise EngineError("the engine returned log-probs that are not finite")
        return result

    async def _first_result(self, generation_request: GenerationRequest) -> Completion | FailedRequest:
        async with aclosing(generate_by_deadline(self._generation, [generation_request])) as results:
            async for result in results:
                return result
        return FailedRequest(generation_request.request_id, "it returned no result")

    def _log_ignored_fields(self, names: Iterable[str]) -> None:
        unlogged = sorted({name[:40] for name in names} - self._logged_fields)
        if unlogged and len(self._logged_fields) < MAX_LOGGED_FIELDS:
            self._logged_fields.update(unlogged)
            logger.info("ignoring clients' fields %s: the run decides how tokens are sampled", unlogged)


def _last_echo(request: ChatRequest, messages: tuple[Message, ...]) -> tuple[Echo | None, int]:
    """Return the tokens that the last assistant message echoes, and the number of messages up to and including it."""
    num_known = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
    return (request.messages[num_known - 1].echo() if num_known else None), num_known


def _begin_in_session(
    live: LiveSession,
    messages: tuple[Message, ...],
    tools: tuple[dict[str, Any], ...],
    echo: Echo | None,
    num_known: int,
) -> PendingCall:
    if echo is None:
        return live.session.begin(messages, tools)
    return live.session.begin_from_echo(messages, tools, echo=echo, num_known=num_known)


def _make_generation_request(
    call: PendingCall, sampling: SamplingParams, seed: int, rules: CompletionRules, live: LiveSession | None = None
) -> GenerationRequest:
    request_id = uuid4().hex
    session_id = live.session_id if live is not None else request_id
    return GenerationRequest(request_id, call.prompt_token_ids, sampling, seed, session_id, timeout_s=rules.timeout_s)


def _derive_seed(seed: int, identity: bytes, sample_index: int) -> int:
    """Return a stable 63-bit hash, equal in every process and on every machine."""
    text = f"{seed}\x1f{sample_index}\x1f".encode() + identity
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1
