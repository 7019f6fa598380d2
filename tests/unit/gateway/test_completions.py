"""Calls through the engine, without HTTP: limits, seeds, failures, and many sessions at once."""

import asyncio
import gc
import logging
import random
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from nemo_rl.gateway.calls import CallAnswer, CallRequest
from nemo_rl.gateway.completions import CallQueue, CompletionHandler
from nemo_rl.gateway.dialects.chat_completions import ChatCompletions, ChatRequest
from nemo_rl.gateway.dialects.responses import Responses
from nemo_rl.gateway.live_sessions import LiveSession, SessionRegistry
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.sessions import CallFailureKind, Chain
from nemo_rl.tracing import Tracer, span
from nemo_rl.types import Completion, FailedRequest, GenerationRequest
from tests.fakes.generation import FakeGeneration, draws_of
from tests.unit.gateway.engines import (
    ADDRESS,
    CALL_TEXT,
    DEADLINE_S,
    TOOL,
    SpeakingGeneration,
    codec_of,
    encoder_of,
    json_bytes,
    rules,
    tokenizer_of,
)
from tests.unit.gateway.test_echoes import Clock

HI = {"role": "user", "content": "hi"}


def request(*messages: dict[str, Any], **fields: Any) -> CallRequest:
    return ChatRequest.model_validate({"messages": list(messages) or [HI], **fields}).to_call()


def render(answer: CallAnswer) -> dict[str, Any]:
    return ChatCompletions().render(request(), answer, encoder_of("chatml"))


def live_session(seed: int = 1) -> LiveSession:
    return SessionRegistry(codec_of("chatml"), max_sessions=1, ttl_s=60.0, clock=Clock()).open(seed=seed)


def ask(generation: FakeGeneration, *requests: CallRequest, **changes: Any) -> list[CallAnswer]:
    async def main() -> list[CallAnswer]:
        completions, live = CompletionHandler(generation, codec_of("chatml"), rules(**changes)), live_session()
        return [await completions.complete_in_session(each, live) for each in requests]

    return asyncio.run(main())


def refusal(generation: FakeGeneration, asked: CallRequest, **changes: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        ask(generation, asked, **changes)
    return error.value


def test_a_call_is_sampled_under_the_model_that_it_names() -> None:
    """Calls of other models than the sampled one are answered, and left out of the session's chains."""
    generation = SpeakingGeneration("chatml", lambda request, prompt: "ok")
    named: dict[str, Any] = {"aliases": ("student",), "others": {"the/base": -1, "judge": 1}}
    own, others = (None, "policy", "student"), ("the/base", "judge")

    async def main() -> LiveSession:
        completions, live = CompletionHandler(generation, codec_of("chatml"), rules(**named)), live_session()
        for model in (*own, *others):
            message = {"role": "user", "content": f"I ask {model}"}
            await completions.complete_in_session(request(message, model=model), live)
        return live

    live = asyncio.run(main())
    assert [each.weight_version for each in generation.requests] == [None, None, None, -1, 1]
    assert len(live.session.chains()) == len(own)
    error = refusal(generation, request(model="jugde"), **named)
    assert (error.status, error.param) == (404, "model")
    assert "no model 'jugde'; known: policy, student, the/base, judge" in str(error)


@pytest.mark.parametrize(
    ("fields", "room_of_run", "allowed"),
    [
        ({}, 256, 256),
        ({"max_tokens": 5}, 256, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 256, 6),
        ({"max_tokens": 10_000}, 256, 256),
        ({"max_tokens": 10_000}, 8192, 4096 - 21),
    ],
)
def test_responses_are_as_long_as_client_run_and_context_allow(fields, room_of_run, allowed):
    generation = SpeakingGeneration("chatml", lambda request, prompt: "ok")
    (answer,) = ask(generation, request(**fields), max_new_tokens=room_of_run)
    assert len(answer.prompt_token_ids) == 21  # "user", "hi", "assistant", 3 ends of lines, 3 special tokens
    assert generation.requests[0].sampling.max_new_tokens == allowed


def test_a_conversation_without_room_is_refused():
    error = refusal(FakeGeneration(), request(), max_model_len=21)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert str(error) == "This model's maximum context length is 21 tokens; 21 tokens leave no room for a response"


@pytest.mark.parametrize("full", ["error", "length"])
def test_a_prompt_that_is_too_long_for_the_engine_alone_is_no_fault_of_the_engine(full: str) -> None:
    """A status of 500 would be sent again."""

    class ShortEngine(FakeGeneration):
        async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
            for each in requests:
                yield FailedRequest(each.request_id, "the engine takes 16 tokens", is_too_long=True)

    async def main() -> tuple[RequestError | CallAnswer, LiveSession]:
        changes = rules(answers_full_context=full == "length")
        handler, live = CompletionHandler(ShortEngine(), codec_of("chatml"), changes), live_session()
        try:
            return await handler.complete_in_session(request(), live), live
        except RequestError as error:
            return error, live

    answer, live = asyncio.run(main())
    assert live.session.last_failure is not None
    assert live.session.last_failure.kind is CallFailureKind.CONTEXT_LENGTH
    if full == "length":
        assert isinstance(answer, CallAnswer)
        assert answer.is_truncated
    else:
        assert isinstance(answer, RequestError)
        assert (answer.status, answer.code) == (400, "context_length_exceeded")
        assert str(answer).startswith("This model's maximum context length is 4096 tokens; 21 tokens leave no room")
        assert str(answer).endswith("the engine takes fewer: the engine takes 16 tokens")


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
@pytest.mark.parametrize("text", ["hi", "hi" * 1000])
def test_truncation_auto_is_accepted_and_drops_nothing(truncation: str, text: str) -> None:
    """A text of 2,000 characters is refused before it is encoded."""
    asked = Responses().parse(json_bytes({"input": text, "truncation": truncation}), ADDRESS)
    error = refusal(FakeGeneration(), asked, max_model_len=21)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert str(error).endswith("the gateway drops no part of a conversation") == (truncation == "auto")
    prompts: list[str] = []
    (answer,) = ask(SpeakingGeneration("chatml", lambda request, prompt: prompts.append(prompt) or "ok"), asked)
    assert text in prompts[0]
    assert Responses().render(asked, answer, encoder_of("chatml"))["truncation"] == "disabled"


def test_with_full_context_length_a_conversation_without_room_ends_and_its_chain_is_truncated():
    generation = SpeakingGeneration("chatml", lambda request, prompt: "ok")

    async def main() -> tuple[CallAnswer, LiveSession]:
        handler = CompletionHandler(generation, codec_of("chatml"), rules(max_model_len=64, answers_full_context=True))
        live = live_session()
        first = await handler.complete_in_session(request(), live)
        history = [HI, {"role": "assistant", "content": first.response.message.content}]
        return await handler.complete_in_session(request(*history, {**HI, "content": "more " * 99}), live), live

    answer, live = asyncio.run(main())
    assert (render(answer)["choices"][0]["finish_reason"], answer.completion.token_ids) == ("length", ())
    (chain,) = live.session.chains()
    assert chain.is_truncated
    assert len(generation.requests) == 1
    assert live.session.last_failure is not None


def test_equal_requests_are_all_kept_whether_or_not_they_overlap():
    async def main() -> list[tuple[Chain, ...]]:
        gate = asyncio.Event()

        async def hold(request: GenerationRequest) -> None:
            await gate.wait()

        generation = SpeakingGeneration("chatml", lambda request, prompt: "ok", before=hold)
        handler = CompletionHandler(generation, codec_of("chatml"), rules())
        at_once, in_turn = live_session(), live_session()
        calls = [asyncio.create_task(handler.complete_in_session(request(), at_once)) for _ in range(3)]
        while len(generation.requests) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*calls)
        for _ in range(3):
            await handler.complete_in_session(request(), in_turn)
        return [at_once.session.chains(), in_turn.session.chains()]

    assert [len(chains) for chains in asyncio.run(main())] == [3, 3]


def test_the_answer_names_the_model_that_was_asked_for():
    generation = SpeakingGeneration("chatml", lambda request, prompt: "ok")
    assert [render(each)["model"] for each in ask(generation, request(model="gpt-x"), request())] == ["gpt-x", "policy"]


def test_a_text_that_cannot_fit_is_refused_without_encoding_it(monkeypatch):
    monkeypatch.setattr("nemo_rl.gateway.sessions.Session.begin", None)
    error = refusal(FakeGeneration(), request({"role": "user", "content": "a" * 3201}), max_model_len=100)
    assert (error.status, error.code) == (400, "context_length_exceeded")


def test_sampling_is_the_runs_and_ignored_fields_are_noted_once(caplog):
    generation = SpeakingGeneration("chatml", lambda request, prompt: "ok")
    fields = {"temperature": 0.0, "top_p": 0.5, "seed": 3, "user": "me", "presence_penalty": None}
    fields |= {"n": 1, "min_tokens": 0, "best_of": 1, "add_generation_prompt": True}  # nothing that is not so anyway
    with caplog.at_level(logging.INFO, logger="nemo_rl.gateway"):
        ask(generation, request(**fields), request(**fields, stop="x"))
    assert [each.sampling.temperature for each in generation.requests] == [0.7, 0.7]
    assert [each.sampling.top_p for each in generation.requests] == [1.0, 1.0]
    assert [each.sampling.stop_strings for each in generation.requests] == [(), ("x",)]
    notes = [record.getMessage() for record in caplog.records]
    assert notes == [
        "gateway: ignoring request fields ['seed', 'temperature', 'top_p']; the run decides how tokens are sampled"
    ]


def test_equal_calls_draw_differently_and_a_retry_draws_what_the_failed_call_would_have_drawn():
    failed: list[int] = []

    def say(request: GenerationRequest, prompt: str) -> str | None:
        if len(failed) == 1 or failed.append(request.seed):
            return "ok"
        return None

    async def main() -> list[int]:
        generation = SpeakingGeneration("chatml", say)
        completions, live = CompletionHandler(generation, codec_of("chatml"), rules()), live_session()
        with pytest.raises(RequestError):
            await completions.complete_in_session(request(), live)
        assert live.session.num_calls == 0
        for _ in range(2):
            await completions.complete_in_session(request(), live)
        return [each.seed for each in generation.requests]

    failed_seed, retried, again = asyncio.run(main())
    assert failed_seed == retried != again


def test_what_a_session_draws_follows_its_seed_and_nothing_else():
    async def main() -> list[list[CallAnswer]]:
        generation = SpeakingGeneration("chatml", lambda request, prompt: CALL_TEXT + str(request.seed))
        completions = CompletionHandler(generation, codec_of("chatml"), rules())
        asked = request(tools=[TOOL])
        return [
            [await completions.complete_in_session(asked, live) for _ in range(2)]
            for live in map(live_session, (1, 2, 1))
        ]

    first, other, again = asyncio.run(main())
    assert [each.response for each in first] == [each.response for each in again]  # ids of tool calls too
    assert not {each.response.message for each in first} & {each.response.message for each in other}


def test_with_tool_choice_none_or_without_tools_a_call_stays_text():
    generation = SpeakingGeneration("chatml", lambda request, prompt: CALL_TEXT)
    answers = ask(generation, request(tools=[TOOL]), request(tools=[TOOL], tool_choice="none"), request())
    assert [len(each.response.message.tool_calls) for each in answers] == [1, 0, 0]
    assert [render(each)["choices"][0]["finish_reason"] for each in answers] == ["tool_calls", "stop", "stop"]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids


def test_a_session_closed_as_its_call_finishes_takes_nothing_more():
    async def main() -> None:
        registry = SessionRegistry(codec_of("chatml"), max_sessions=1, ttl_s=60.0, clock=Clock())
        live = registry.open(seed=1)

        async def close_behind(request: GenerationRequest) -> None:
            asyncio.get_running_loop().call_soon(registry.close, live.session_id)

        generation = SpeakingGeneration("chatml", lambda request, prompt: "ok", before=close_behind)
        with pytest.raises(RequestError) as error:
            await CompletionHandler(generation, codec_of("chatml"), rules()).complete_in_session(request(), live)
        assert error.value.status == 409
        assert live.session.num_calls == 0

    asyncio.run(main())


class BrokenGeneration(FakeGeneration):
    """Raises, answers nothing, or breaks its contract."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self._manner = manner

    async def generate(self, requests):
        if self._manner == "raises":
            raise OSError("the engine's memory")
        if self._manner == "hangs":
            await asyncio.Event().wait()
        if self._manner == "too many":
            async for each in FakeGeneration(vocab_size=6).generate([requests[0]]):
                yield type(each)(each.request_id, each.token_ids * 999, each.logprobs * 999, "stop")  # type: ignore


@pytest.mark.parametrize("manner", ["raises", "nothing", "too many"])
def test_a_broken_engine_is_500(manner):
    error = refusal(BrokenGeneration(manner), request())
    assert (error.status, error.code) == (500, "engine_failed")
    assert "memory" not in str(error)  # what it says is for the log


def test_an_engine_that_hangs_is_500_after_the_deadline():
    assert refusal(BrokenGeneration("hangs"), request(), timeout_s=0.01).code == "timeout"


def test_more_calls_than_allowed_are_429_and_room_comes_back():
    async def main() -> None:
        gate = asyncio.Event()

        async def wait(request: GenerationRequest) -> None:
            await gate.wait()

        generation = SpeakingGeneration("chatml", lambda request, prompt: "ok", before=wait)
        completions = CompletionHandler(generation, codec_of("chatml"), rules(max_concurrent_calls=2))
        live = live_session()
        tasks = [asyncio.create_task(completions.complete_in_session(request(), live)) for _ in range(3)]
        done, _ = await asyncio.wait(tasks, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = done
        error = refused.exception()
        assert isinstance(error, RequestError)
        assert error.status == 429
        gate.set()
        await asyncio.gather(*(task for task in tasks if task is not refused))
        assert completions.queue.num_running == 0
        assert live.session.num_calls == 2
        assert len({each.seed for each in generation.requests}) == 2

    asyncio.run(main())


def test_calls_beyond_the_engines_capacity_run_in_the_order_of_their_arrival():
    async def main() -> None:
        async def wait(request: GenerationRequest) -> None:
            await asyncio.sleep(0)

        generation = SpeakingGeneration("chatml", lambda request, prompt: prompt.split("agent ")[1][:1], before=wait)
        limits = rules(max_concurrent_calls=1, max_queued_calls=8)
        completions = CompletionHandler(generation, codec_of("chatml"), limits)
        order: list[int] = []

        async def ask(index: int) -> None:
            await completions.complete_in_session(
                request({"role": "user", "content": f"agent {index}"}), live_session()
            )
            order.append(index)

        await asyncio.wait_for(asyncio.gather(*map(ask, range(9))), DEADLINE_S)
        assert order == list(range(9))
        assert (completions.queue.num_running, completions.queue.num_waiting) == (0, 0)

    asyncio.run(main())


def test_a_queue_is_bounded_in_length_and_time_and_forgets_who_gives_up():
    async def main() -> None:
        queue = CallQueue(max_running=1, max_waiting=1, timeout_s=0.05)

        async def ask() -> None:
            async with queue.turn():
                pass

        async with queue.turn():
            with pytest.raises(RequestError, match=r"1 calls are running, and none ended in 0.05 s") as late:
                await ask()
            assert late.value.status == 429
            waiting = asyncio.create_task(ask())
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="1 calls are running and 1 wait"):
                await ask()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert (queue.num_running, queue.num_waiting) == (1, 0)
        await asyncio.wait_for(ask(), DEADLINE_S)
        assert (queue.num_running, queue.num_waiting) == (0, 0)

    asyncio.run(main())


async def converse(
    completions: CompletionHandler, live: LiveSession, index: int, failures: Counter[int]
) -> tuple[Chain, ...]:
    """Three turns of one agent, which asks again when a call fails."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"agent {index}"}]
    for turn in range(3):
        while True:
            try:
                answer = await completions.complete_in_session(request(*messages), live)
                break
            except RequestError:
                failures[index] += 1
        messages.append({"role": "assistant", "content": answer.response.message.content})
        messages.append({"role": "user", "content": f"turn {turn} of {index}"})
    return live.session.chains()


def run_sessions(*, failing_share: float, delays: random.Random | None) -> tuple[list[tuple[Chain, ...]], int]:
    """Chains of 64 agents at once, and how many calls failed."""
    failures: Counter[int] = Counter()
    failed: set[tuple[int, int]] = set()

    async def delay(request: GenerationRequest) -> None:
        for _ in range(0 if delays is None else delays.randrange(20)):
            await asyncio.sleep(0)
        identity = (request.seed, len(request.token_ids))
        if draws_of(request).random() < failing_share and identity not in failed:
            failed.add(identity)
            raise ConnectionError("a tenth of the calls fail at first")

    async def main() -> list[tuple[Chain, ...]]:
        generation = FakeGeneration(vocab_size=len(tokenizer_of("chatml")), latency=delay)
        completions = CompletionHandler(generation, codec_of("chatml"), rules(max_new_tokens=12))
        registry = SessionRegistry(codec_of("chatml"), max_sessions=64, ttl_s=60.0, clock=Clock())
        agents = [converse(completions, registry.open(seed=i), i, failures) for i in range(64)]
        chains = await asyncio.wait_for(asyncio.gather(*agents), DEADLINE_S)
        assert completions.queue.num_running == 0
        registry.close_all()
        assert len(registry) == 0
        return chains

    return asyncio.run(main()), failures.total()


def test_64_sessions_with_delays_failures_and_retries_equal_a_clean_run(caplog):
    clean, none = run_sessions(failing_share=0.0, delays=None)
    caplog.set_level(logging.CRITICAL, logger="nemo_rl.gateway")
    disturbed, some = run_sessions(failing_share=0.1, delays=random.Random(1))
    assert none == 0 < some
    assert disturbed == clean
    for index, chains in enumerate(clean):
        (chain,) = chains
        assert [each.message.content for each in chain.message_log if each.message.role == "user"] == [
            f"agent {index}",
            f"turn 0 of {index}",
            f"turn 1 of {index}",
        ]
        assert sum(each.is_generated for each in chain.message_log) == 3


def test_a_closed_session_is_freed_at_once():
    async def main() -> None:
        completions = CompletionHandler(FakeGeneration(vocab_size=200), codec_of("chatml"), rules(max_new_tokens=4))
        registry = SessionRegistry(codec_of("chatml"), max_sessions=1, ttl_s=60.0, clock=Clock())
        gc.disable()  # nothing may wait for the collector
        try:
            live = registry.open(seed=1)
            await converse(completions, live, 0, Counter())
            session = weakref.ref(registry.close(live.session_id))
            del live
            await asyncio.sleep(0)
            assert session() is None
        finally:
            gc.enable()

    asyncio.run(main())


def test_a_call_belongs_to_the_span_in_which_its_session_was_opened() -> None:
    kept: list[Any] = []

    class Sink:
        def write(self, records: Sequence[Any]) -> None:
            kept.extend(records)

        def close(self) -> None:
            """Nothing is held."""

    with Tracer([Sink()]):
        with span("rollout", "rollouts"):
            live = live_session()

        async def main() -> None:
            handler = CompletionHandler(
                SpeakingGeneration("chatml", lambda asked, text: "hello"), codec_of("chatml"), rules()
            )
            await handler.complete_in_session(request(), live)

        asyncio.run(main())
    spans = {record.name: record for record in kept}
    assert spans["generation"].track == "gateway"
    assert spans["generation"].parent_id == spans["rollout"].span_id
