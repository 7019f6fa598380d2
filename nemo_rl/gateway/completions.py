"""One model call from a validated request to an answer: encode, sample, parse, commit. Knows no HTTP."""

import asyncio
import itertools
import logging
import math
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal
from uuid import uuid4

from nemo_rl.errors import escape
from nemo_rl.gateway.calls import CallAnswer, CallRequest, Forcing, Sink, StreamStart
from nemo_rl.gateway.codec import Codec, ParsedResponse, ReadingRules
from nemo_rl.gateway.echoes import EchoedCallStore
from nemo_rl.gateway.live_sessions import LiveSession
from nemo_rl.gateway.request_errors import (
    CallError,
    ContextLengthError,
    EngineError,
    RequestError,
    make_unsupported_error,
)
from nemo_rl.gateway.sessions import CallFailure, PendingCall, Session, UnknownEcho
from nemo_rl.gateway.streaming import ResponseStream, choose_interval_s
from nemo_rl.generation.requests import answer_by_deadline
from nemo_rl.interfaces import Generation
from nemo_rl.tracing import GENERATION, span, within
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, Message, SamplingParams

MAX_CHARACTERS_PER_TOKEN = 32  # a conversation with more per token of context length is refused without encoding it
MAX_LOGGED_FIELDS = 100  # distinct names of ignored fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompletionRules:
    """Settings that all calls of a server share."""

    model_name: str
    max_model_len: int  # tokens of prompt and response together
    sampling: SamplingParams  # a client may only shorten a response or add stop strings
    seed: int  # the run's
    max_concurrent_calls: int
    timeout_s: float  # per generation
    answers_full_context: bool = False  # True: a conversation that leaves no room gets an empty, truncated answer
    max_queued_calls: int = 0  # waiting calls; further ones are answered with 429
    queue_timeout_s: float = 60.0  # longest wait of a call
    can_guide: bool = False  # the engine can mask tokens by a guide
    guided_calls: Literal["refused", "untrained"] = "refused"  # in training
    forced_tool_choice: Literal["refused", "auto", "guided"] = "refused"  # requests that demand a tool call
    hides_unused_tools: bool = False  # a request that may not call tools has none in its prompt
    aliases: tuple[str, ...] = ()  # further names of the model
    # weight versions of the engine's other models by name; without any, every name means the model
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model_name, *self.aliases, *self.others)


class CallQueue:
    """Runs up to `max_running` calls; `max_waiting` more wait in order of arrival, further ones are 429.

    Waiting here beats a 429: clients back off for longer and longer, and later calls overtake them.
    """

    def __init__(self, max_running: int, max_waiting: int, timeout_s: float) -> None:
        self.num_running = 0
        self.num_waiting = 0
        self._free = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the slot of a running call; raises RequestError 429 if none becomes free in time."""
        if self._free.locked() and self.num_waiting >= self._max_waiting:
            counts = f"{self.num_running} calls are running and {self.num_waiting} wait"
            raise RequestError(429, counts, code="over_capacity")
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError as error:
            text = f"{self.num_running} calls are running, and none ended in {self._timeout_s:g} s"
            raise RequestError(429, text, code="over_capacity") from error
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._free.release()


class CompletionHandler:
    """Answers model calls with one engine; raises RequestError for a request that it cannot answer."""

    def __init__(self, generation: Generation, codec: Codec, rules: CompletionRules) -> None:
        self.queue = CallQueue(rules.max_concurrent_calls, rules.max_queued_calls, rules.queue_timeout_s)
        self._generation = generation
        self._codec = codec
        self._rules = rules
        self._call_counter = itertools.count()
        self._logged_fields: set[str] = set()

    async def complete_in_session(
        self, request: CallRequest, live: LiveSession, *, is_named: bool = False, sink: Sink | None = None
    ) -> CallAnswer:
        """Answer a session's call and commit it; a call that fails or is cancelled leaves no trace in the session.

        `is_named`: the request's body names the session; echoed tokens then identify the chain, and the answer carries
        its token ids. `sink` receives the deltas while tokens are sampled.
        """
        request = self._hide_unused_tools(request)
        is_side_call = live.is_side_call is not None and live.is_side_call(request)
        is_side_call = is_side_call or request.model in self._rules.others
        try:
            return await self._complete_and_commit(
                request, live, is_named=is_named, is_side_call=is_side_call, sink=sink
            )
        except ContextLengthError as error:
            live.session.record_failure(CallFailure(error.kind, str(error), is_side_call))
            if not self._rules.answers_full_context:
                raise
            live.session.mark_truncated(_conversation(live.session, request), request.tools)
            return self._make_empty_answer(request, error, sink)
        except CallError as error:
            live.session.record_failure(CallFailure(error.kind, str(error), is_side_call))
            raise

    async def _complete_and_commit(
        self, request: CallRequest, live: LiveSession, *, is_named: bool, is_side_call: bool, sink: Sink | None
    ) -> CallAnswer:
        request = self._check(request, trains=live.trains)
        call = self._encode_call(lambda: _begin_in_session(live, request, with_echo=is_named))
        self._check_guide_follows_thinking(request, call)
        sample_index = live.acquire_sample_index(call)
        try:
            seed = _derive_seed(live.seed, array("q", call.prompt_token_ids).tobytes(), sample_index)
            sampling = self._sampling(request, call, live.sampling or self._rules.sampling)
            generation_request = _make_generation_request(request, call, sampling, seed, self._rules, live)
            with_token_ids = is_named or request.return_token_ids
            work = self._answer(request, generation_request, with_token_ids=with_token_ids, sink=sink)
            with within(live.span), span(GENERATION, "gateway"):
                answer = await _run_unless_closed(work, live)
            is_trained = request.guide is None or not live.trains
            live.session.commit(
                call,
                answer.completion,
                answer.response.message,
                completion_id=answer.completion_id,
                is_trained=is_trained,
                is_side_call=is_side_call,
                asked=_conversation(live.session, request)[request.num_instructions :] if request.is_kept else (),
            )
        except BaseException:
            live.release_sample_index(call, sample_index)
            raise
        return answer

    def _make_empty_answer(self, request: CallRequest, error: ContextLengthError, sink: Sink | None) -> CallAnswer:
        """Return an empty answer that counts as truncated; nothing is committed."""
        request_id = uuid4().hex
        start = StreamStart(
            f"{request.id_prefix}{request_id}", request.model or self._rules.model_name, error.num_tokens
        )
        if sink is not None:
            sink(start)
        completion = Completion(request_id, (), (), "length")
        empty = ParsedResponse(Message("assistant", ""))
        return CallAnswer(
            start.completion_id, start.model, (), completion, empty, with_token_ids=False, with_logprobs=False
        )

    def count_tokens(self, request: CallRequest, live: LiveSession | None) -> int:
        """Return the number of tokens in a call's prompt; changes nothing."""
        request = self._hide_unused_tools(request)
        self._check_length(request)
        session = Session(self._codec) if live is None else live.session
        call = self._encode_call(lambda: session.begin(request.messages, request.tools))
        return len(call.prompt_token_ids)

    async def complete_without_session(
        self, request: CallRequest, calls: EchoedCallStore, *, sink: Sink | None = None
    ) -> CallAnswer:
        """Answer a call whose last assistant message carries the tokens that identify the chain."""
        request = self._check(self._hide_unused_tools(request), trains=True)
        if request.guide is not None:
            raise make_unsupported_error(request.guide_field, "only calls in a session can be guided")
        call = self._encode_call(
            lambda: calls.begin(request.messages, request.tools, echo=request.echo, num_known=request.num_known)
        )
        seed = _derive_seed(self._rules.seed, b"without session", next(self._call_counter))
        sampling = self._sampling(request, call, self._rules.sampling)
        generation_request = _make_generation_request(request, call, sampling, seed, self._rules)
        answer = await self._answer(request, generation_request, with_token_ids=True, sink=sink)
        calls.commit(call, answer.completion, answer.response.message)
        return answer

    def next_session_seed(self) -> int:
        """Return a seed for a session opened without one."""
        return _derive_seed(self._rules.seed, b"session", next(self._call_counter))

    def _hide_unused_tools(self, request: CallRequest) -> CallRequest:
        is_hidden = self._rules.hides_unused_tools and not request.parses_tool_calls
        return replace(request, tools=()) if is_hidden else request

    def _check(self, request: CallRequest, *, trains: bool) -> CallRequest:
        """Return the request with a demand for a call as its guide; raises RequestError if it cannot be served."""
        ignored = request.ignored_fields
        self._check_model(request)
        if (forcing := request.forcing) is not None:
            request = self._apply_forcing(request, forcing)
            ignored |= set() if self._rules.forced_tool_choice == "guided" else {forcing.field}
        if request.guide is not None:
            self._check_guide(request.guide_field, trains=trains)
        self._log_ignored_fields(ignored)
        self._check_length(request)
        return request

    def _check_model(self, request: CallRequest) -> None:
        """Raise RequestError for an unknown name if there are several models."""
        if self._rules.others and request.model not in (None, *self._rules.names):
            text = f"no model {escape(request.model, 80)!r}; known: {', '.join(self._rules.names)}"
            raise RequestError(404, text, param="model", code="model_not_found")

    def _apply_forcing(self, request: CallRequest, forcing: Forcing) -> CallRequest:
        if not request.tools:
            raise RequestError(400, f"{forcing.field}: a call that is required needs tools", param=forcing.field)
        if self._rules.forced_tool_choice == "auto":
            return request
        if self._rules.forced_tool_choice == "refused":
            raise make_unsupported_error(
                forcing.field,
                f"{forcing.field}: the policy decides whether it calls a tool, and which; gateway.forced_tool_choice: "
                "auto takes the request without that demand, guided masks every other token",
            )
        if request.guide is not None:
            text = f"{forcing.field} and {request.guide_field} exclude each other"
            raise RequestError(400, text, param=forcing.field)
        guide = self._codec.call_guide(request.tools, forcing.names, is_required=forcing.is_required)
        if guide is None:
            parser = self._codec.tool_parser_name
            raise make_unsupported_error(forcing.field, f"{forcing.field}: no guide for calls of tool parser {parser}")
        return replace(request, guide=guide, guide_field=forcing.field)

    def _check_length(self, request: CallRequest) -> None:
        limit = self._rules.max_model_len * MAX_CHARACTERS_PER_TOKEN
        has_room = request.num_image_tokens < self._rules.max_model_len
        if not has_room or sum(len(message.content) for message in request.messages) > limit:
            raise ContextLengthError(None, self._rules.max_model_len, asks_truncation=request.asks_truncation)

    def _check_guide(self, field: str, *, trains: bool) -> None:
        """Raise RequestError if the engine cannot guide a response, or training on it is refused."""
        if not self._rules.can_guide:
            raise make_unsupported_error(field, f"{field}: this engine cannot guide a response")
        if trains and self._rules.guided_calls == "refused":
            raise make_unsupported_error(
                field,
                "a guided response is sampled from a masked distribution, which is not the policy's that is trained; "
                "gateway.guided_calls: untrained serves it and leaves its tokens out of the loss",
            )

    def _check_guide_follows_thinking(self, request: CallRequest, call: PendingCall) -> None:
        """Raise RequestError if a guided response would be read as thinking.

        A guide to optional calls is exempt: text may precede the calls, so thinking can close there.
        """
        forcing, field = request.forcing, request.guide_field
        is_optional = forcing is not None and field == forcing.field and not forcing.is_required
        if request.guide is None or is_optional:
            return
        text = None
        if self._codec.opens_thinking(call.prompt_token_ids):
            text = f"{field}: the chat template opens thinking, and a guide would mask the end of it"
        elif self._codec.takes_for_thinking(request.guide):
            name = self._codec.reasoning_parser_name
            text = (
                f"{field}: reasoning parser {name} takes a response without a closing tag for thinking; use another "
                "gateway.reasoning_parser, or none"
            )
        if text is not None:
            raise make_unsupported_error(field, text)

    def _encode_call(self, encode: Callable[[], PendingCall]) -> PendingCall:
        """Return the encoded call; an error of the template or tokenizer becomes RequestError 400."""
        try:
            return encode()
        except RequestError:
            raise
        except UnknownEcho as error:
            raise RequestError(409, str(error), param="messages", code="unknown_tokens") from error
        except Exception as error:
            text = " ".join(str(error).split())[:500]
            raise RequestError(400, f"the conversation cannot be encoded: {text}", param="messages") from error

    async def _answer(
        self, request: CallRequest, generation_request: GenerationRequest, *, with_token_ids: bool, sink: Sink | None
    ) -> CallAnswer:
        prompt_token_ids = generation_request.token_ids
        start = StreamStart(
            f"{request.id_prefix}{generation_request.request_id}",
            request.model or self._rules.model_name,
            len(prompt_token_ids),
        )
        rules = ReadingRules(
            call_id_seed=str(generation_request.seed),
            stop_strings=generation_request.sampling.stop_strings,
            with_tools=bool(request.tools) and request.parses_tool_calls,
            with_parallel_calls=request.allows_parallel_calls,
            tools=request.tools,
            is_thinking=self._codec.opens_thinking(prompt_token_ids),
        )
        if sink is None:
            completion = await self._generate(generation_request)
            response = self._codec.read(completion.token_ids, rules)
        else:
            with ResponseStream(
                self._codec,
                start,
                sink,
                rules,
                interval_s=lambda: choose_interval_s(self.queue.num_running),
                call_later=asyncio.get_running_loop().call_later,
            ) as stream:
                completion = await self._generate(replace(generation_request, on_tokens=stream.feed))
                response = self._codec.read(completion.token_ids, rules)
                stream.finish(completion, response)
        return CallAnswer(
            completion_id=start.completion_id,
            model=start.model,
            prompt_token_ids=prompt_token_ids,
            completion=completion,
            response=response,
            with_token_ids=with_token_ids,
            with_logprobs=request.return_logprobs and not (with_token_ids and request.reads_message_logprobs),
        )

    def _sampling(self, request: CallRequest, call: PendingCall, sampling: SamplingParams) -> SamplingParams:
        room = self._rules.max_model_len - len(call.prompt_token_ids)
        if room <= 0:
            length, asks_truncation = len(call.prompt_token_ids), request.asks_truncation
            raise ContextLengthError(length, self._rules.max_model_len, asks_truncation=asks_truncation)
        limit = min(room, sampling.max_new_tokens, request.max_tokens or room)
        stop_strings = tuple(dict.fromkeys((*sampling.stop_strings, *request.stop_strings)))
        return replace(sampling, max_new_tokens=limit, stop_strings=stop_strings, guide=request.guide)

    async def _generate(self, generation_request: GenerationRequest) -> Completion:
        """Return the completion; cancelling this cancels the request in the engine."""
        async with self.queue.turn():
            try:
                result = await answer_by_deadline(self._generation, generation_request)
            except Exception as error:  # whatever an engine raises is a failed request
                logger.exception("gateway: engine raised an exception for request %s", generation_request.request_id)
                raise EngineError(f"the engine failed: {type(error).__name__}") from error
        if result is None:
            raise EngineError("the engine failed: it returned no result")
        if isinstance(result, FailedRequest) and result.is_too_long:
            raise ContextLengthError(
                len(generation_request.token_ids), self._rules.max_model_len, cause=escape(result.cause, 300)
            )
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

    def _log_ignored_fields(self, names: Iterable[str]) -> None:
        unlogged = sorted({escape(name, 80) for name in names} - self._logged_fields)
        if unlogged and len(self._logged_fields) < MAX_LOGGED_FIELDS:
            self._logged_fields.update(unlogged)
            logger.info("gateway: ignoring request fields %s; the run decides how tokens are sampled", unlogged)


async def _run_unless_closed(work: Coroutine[Any, Any, CallAnswer], live: LiveSession) -> CallAnswer:
    """Return the answer; raises RequestError 409 if the session is closed meanwhile, which cancels the work."""
    task = asyncio.create_task(work)
    live.running.add(task)
    closed = RequestError(409, "the session was closed during this call", code="session_closed")
    try:
        answer = await task
    except asyncio.CancelledError:
        if live.is_closed:
            raise closed from None
        raise
    finally:
        live.running.discard(task)
    if live.is_closed:
        raise closed
    return answer


def _begin_in_session(live: LiveSession, request: CallRequest, *, with_echo: bool) -> PendingCall:
    if not with_echo or request.echo is None:
        return live.session.begin(_conversation(live.session, request), request.tools)
    return live.session.begin_from_echo(request.messages, request.tools, echo=request.echo, num_known=request.num_known)


def _conversation(session: Session, request: CallRequest) -> tuple[Message, ...]:
    """Return instructions, the conversation of the completion that the request names, if any, and new messages."""
    if request.previous_id is None:
        return request.messages
    conversation = session.conversation(request.previous_id)
    if conversation is None:
        text = f"no response {escape(request.previous_id, 80)!r} in this session"
        raise RequestError(400, text, param="previous_response_id", code="previous_response_not_found")
    instructions, new = request.messages[: request.num_instructions], request.messages[request.num_instructions :]
    return (*instructions, *conversation, *new)


def _make_generation_request(
    request: CallRequest,
    call: PendingCall,
    sampling: SamplingParams,
    seed: int,
    rules: CompletionRules,
    live: LiveSession | None = None,
) -> GenerationRequest:
    request_id = uuid4().hex
    session_id = live.session_id if live is not None else request_id
    version = None if call.parent is None else call.parent.weight_versions[1]  # a chain keeps its weights
    if rules.others:
        version = rules.others.get(request.model or "")
    return GenerationRequest(
        request_id,
        call.prompt_token_ids,
        sampling,
        seed,
        session_id,
        images=call.images,
        timeout_s=rules.timeout_s,
        weight_version=version,
    )


def _derive_seed(seed: int, identity: bytes, sample_index: int) -> int:
    """Return a stable 63-bit hash, equal in every process and on every machine."""
    text = f"{seed}\x1f{sample_index}\x1f".encode() + identity
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1
