"""Calls that clients report, against what was recorded: sessions that requests name, and calls without one."""

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from nemo_rl.gateway.echoes import Claim, LogprobMismatch
from nemo_rl.gateway.manager import GatewayManager, SessionHandle
from nemo_rl.gateway.schema import SESSION_FIELD, RequestError
from nemo_rl.gateway.sessions import CallFailureKind, Echo, UnknownEcho
from nemo_rl.types import GenerationRequest, SamplingParams
from tests.fakes.generation import FakeGeneration
from tests.unit.gateway.engines import SpeakingGeneration
from tests.unit.gateway.test_manager import manage
from tests.unit.gateway.test_server import HI, client_of

MORE: Any = {"role": "user", "content": "more"}


def say_four(request: GenerationRequest, prompt: str) -> str:
    return "4"


async def said_by(manager: GatewayManager, messages: list[Any], session: str | None, **fields: Any) -> Any:
    """The message that a client without an address of its own is answered."""
    async with client_of(manager.default_base_url, manager.api_key) as client:
        if session is not None:
            fields["extra_body"] = {"metadata": {SESSION_FIELD: session, "own": "kept"}}
        done = await client.chat.completions.create(model="policy", messages=messages, **fields)
        return done.choices[0].message


def claim_of(said: Any, **changes: Any) -> Claim:
    told = said.model_extra | changes
    echo = Echo(tuple(told["prompt_token_ids"]), tuple(told["generation_token_ids"]))
    return Claim(echo, tuple(told["generation_log_probs"]))


def complete_in_session(
    use: Callable[[GatewayManager, SessionHandle], Awaitable[None]], generation: FakeGeneration
) -> None:
    async def body(manager: GatewayManager) -> None:
        await use(manager, manager.open_session(seed=5, server=0))
        assert manager.num_sessions == (0, 0)

    manage(generation, body)


def test_a_session_named_by_its_requests_samples_by_its_own_seed_and_sampling():
    generation = SpeakingGeneration("chatml", say_four)

    async def body(manager: GatewayManager) -> None:
        greedy = SamplingParams(8, temperature=0.0)
        for seed, sampling in ((5, None), (5, None), (6, None), (5, greedy)):
            handle = manager.open_session(seed=seed, sampling=sampling, server=0)
            await said_by(manager, [HI], handle.id, temperature=0.3)
            await manager.finish(handle)
        await said_by(manager, [HI], None)

    manage(generation, body)
    seeds = [request.seed for request in generation.requests]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3
    assert [request.sampling.temperature for request in generation.requests] == [0.7, 0.7, 0.7, 0.0, 0.7]


def test_an_echo_continues_its_call_whatever_became_of_the_text():
    async def use(manager: GatewayManager, handle: SessionHandle) -> None:
        first = await said_by(manager, [HI], handle.id)
        edited = first.model_dump() | {"content": "something else"}
        second = await said_by(manager, [HI, edited, MORE], handle.id)
        finished = await manager.finish_with_claims(handle, [claim_of(first), claim_of(second)])
        (chain,) = finished.chains
        assert [m.message.content for m in chain.message_log] == ["hi", "4", "more", "4"]
        assert chain.weight_versions == (3, 4)

    complete_in_session(use, SpeakingGeneration("chatml", say_four))


def test_only_the_calls_that_are_reported_are_trained_and_a_rewritten_history_is_a_chain_of_its_own():
    async def use(manager: GatewayManager, handle: SessionHandle) -> None:
        first, aside, other = [await said_by(manager, [one], handle.id) for one in (HI, MORE, {**HI, "content": "x"})]
        claims = [claim_of(first), claim_of(other), claim_of(first)]
        finished = await manager.finish_with_claims(handle, claims)
        assert [chain.message_log[0].message.content for chain in finished.chains] == ["hi", "x"]
        assert aside.content == "4"

    complete_in_session(use, SpeakingGeneration("chatml", say_four))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"generation_token_ids": [1, 2]}, UnknownEcho, "the tokens were changed"),
        ({"generation_log_probs": [-0.25, -0.3]}, LogprobMismatch, "differ by 0.05"),
        ({"generation_log_probs": [-0.25]}, LogprobMismatch, "1 log-probs were reported for 2 generated tokens"),
        ({"generation_log_probs": [-0.25, float("nan")]}, LogprobMismatch, "log-prob 1 was reported as nan"),
    ],
)
def test_a_report_that_is_not_what_was_recorded_is_refused(changes: Any, error: type[Exception], text: str):
    async def use(manager: GatewayManager, handle: SessionHandle) -> None:
        said = await said_by(manager, [HI], handle.id)
        with pytest.raises(error, match=text):
            await manager.finish_with_claims(handle, [claim_of(said, **changes)])

    complete_in_session(use, SpeakingGeneration("chatml", say_four))


def test_calls_without_a_session_are_claimed_once_each_also_where_they_are_twins():
    async def body(manager: GatewayManager) -> None:
        said = [await said_by(manager, [HI], None) for _ in range(2)]
        assert manager.num_echoed_calls == 1
        for index in range(3):
            handle = manager.open_session(seed=index, server=0)
            if index < 2:
                finished = await manager.finish_with_claims(handle, [claim_of(said[index])])
                assert len(finished.chains) == 1
            else:
                with pytest.raises(UnknownEcho):
                    await manager.finish_with_claims(handle, [claim_of(said[0])])
        assert manager.num_echoed_calls == 0

    manage(SpeakingGeneration("chatml", say_four), body)


def test_a_session_that_has_ended_ends_its_client_and_keeps_nothing():
    async def use(manager: GatewayManager, handle: SessionHandle) -> None:
        await manager.abandon(handle)
        with pytest.raises(openai.ConflictError):
            await said_by(manager, [HI], handle.id)
        with pytest.raises(openai.NotFoundError):
            await said_by(manager, [HI], "never-opened")
        assert manager.num_echoed_calls == 0

    complete_in_session(use, SpeakingGeneration("chatml", say_four))


def test_a_session_remembers_that_the_engine_failed_its_last_call():
    answers = iter([None, None, "4"])

    async def use(manager: GatewayManager, handle: SessionHandle) -> None:
        with pytest.raises(openai.InternalServerError):
            await said_by(manager, [HI], handle.id)
        finished = await manager.finish(handle)
        assert finished.last_failure is not None
        assert finished.last_failure.kind is CallFailureKind.ENGINE
        assert "it was made to fail" in finished.last_failure.cause
        again = manager.open_session(seed=1, server=0)
        with pytest.raises(openai.InternalServerError):
            await said_by(manager, [HI], again.id)
        await said_by(manager, [HI], again.id)
        assert (await manager.finish(again)).last_failure is None

    complete_in_session(use, SpeakingGeneration("chatml", lambda request, prompt: next(answers)))


def test_ids_and_log_probs_on_the_message_are_not_listed_a_second_time_for_clients_that_read_ids():
    async def use(manager: GatewayManager, handle: SessionHandle) -> None:
        async with client_of(manager.default_base_url) as client:
            for as_ids in (True, False):
                extra = {"metadata": {SESSION_FIELD: handle.id}, "return_tokens_as_token_ids": as_ids}
                done = await client.chat.completions.create(
                    model="policy", messages=[HI], logprobs=True, extra_body=extra
                )
                assert (done.choices[0].logprobs is None) is as_ids
        with pytest.raises(RequestError):
            await manager.finish(SessionHandle("never-opened", "", ""))
        await manager.finish(handle)

    complete_in_session(use, SpeakingGeneration("chatml", say_four))


def test_non_finite_log_probs_of_the_engine_fail_the_call():
    class Strange(SpeakingGeneration):
        def _answer_to(self, request: GenerationRequest) -> Any:
            answer: Any = super()._answer_to(request)
            return type(answer)("r", answer.token_ids, (float("nan"),) * len(answer.token_ids), "stop")

    async def use(manager: GatewayManager, handle: SessionHandle) -> None:
        with pytest.raises(openai.InternalServerError, match="not finite"):
            await said_by(manager, [HI], handle.id)
        assert not (await manager.finish(handle)).chains

    complete_in_session(use, Strange("chatml", say_four))


def test_the_first_server_has_the_port_that_was_asked_for(unused_port: int):
    async def body(manager: GatewayManager) -> None:
        assert manager.default_base_url == f"http://127.0.0.1:{unused_port}/v1"

    manage(FakeGeneration(), body, port=unused_port)
