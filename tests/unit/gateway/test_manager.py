"""Sessions over several servers: where they are placed, what they hand out, and that none is left over."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from aiohttp import ClientConnectionError, ClientSession
from openai import AsyncOpenAI

from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.distributed.cluster import node_ip
from nemo_rl.errors import ConfigError
from nemo_rl.gateway.dialects.chat_completions import SESSION_FIELD
from nemo_rl.gateway.echoes import Claim, LogprobMismatch
from nemo_rl.gateway.manager import GatewayManager, SessionHandle, split_settings
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.server import GatewayServer, check_gateway
from nemo_rl.gateway.sessions import CallFailureKind, Echo, UnknownEcho
from nemo_rl.types import GenerationRequest, SamplingParams
from tests.fakes.generation import FakeGeneration
from tests.unit.gateway.engines import DEADLINE_S, SpeakingGeneration, codec_of, rules
from tests.unit.gateway.test_server import HI, client_of, eventually, never


def manage(
    generation: FakeGeneration, use: Callable[[GatewayManager], Awaitable[None]], *, num_servers: int = 2, **keys: Any
) -> None:
    """Run `use` against a manager."""

    async def main() -> None:
        section = GatewayConfig(num_servers=num_servers, **keys)
        manager = await GatewayManager.start(generation, codec_of("chatml"), rules(), section)
        try:
            await asyncio.wait_for(use(manager), DEADLINE_S)
        finally:
            await manager.close()
        assert sum(manager.num_sessions) == 0

    asyncio.run(main())


def say_ok(request: GenerationRequest, prompt: str) -> str:
    return "ok"


async def ask(handle: SessionHandle, **fields: Any) -> str | None:
    async with AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0) as client:
        done = await client.chat.completions.create(model="policy", messages=[HI], **fields)
    return done.choices[0].message.content


async def request_with_run_key(manager: GatewayManager, method: str, handle: SessionHandle, **fields: Any) -> None:
    """Post fields as the session's reward, or delete it."""
    url = handle.base_url.removesuffix("/v1") + ("/reward" if method == "POST" else "")
    headers = {"Authorization": f"Bearer {manager.api_key}"}
    async with ClientSession(headers=headers) as client, client.request(method, url, json=fields) as response:
        assert response.status == 200


def test_a_session_is_placed_on_the_server_with_the_fewest_and_stays_there():
    async def use(manager: GatewayManager) -> None:
        handles = [manager.open_session(seed=i) for i in range(6)]
        assert manager.num_sessions == (2, 2, 2)
        assert len({handle.base_url.split("/sessions/")[0] for handle in handles}) == 3
        on_second = [handle for handle in handles if handle.server == 1]
        for handle in on_second:
            await manager.finish(handle)
        assert manager.num_sessions == (2, 0, 2)
        assert [manager.open_session(seed=i).server for i in (6, 7)] == [1, 1]
        assert await ask(handles[-1]) == "ok"
        assert manager.num_sessions == (2, 2, 2)

    manage(SpeakingGeneration("chatml", say_ok), use, num_servers=3)


def test_a_finished_session_hands_out_its_chains_and_rewards_and_is_closed():
    async def use(manager: GatewayManager) -> None:
        handle = manager.open_session(seed=1)
        assert handle.base_url.endswith(f"/sessions/{handle.id}/v1")
        await ask(handle)
        await request_with_run_key(manager, "POST", handle, rewards={"correct": 1, "format": 0.5})
        finished = await manager.finish(handle)
        (chain,) = finished.chains
        assert [each.message.content for each in chain.message_log] == ["hi", "ok"]
        assert chain.weight_versions == (3, 4)
        assert finished.rewards == {"correct": 1.0, "format": 0.5}
        with pytest.raises(openai.ConflictError):
            await ask(handle)
        with pytest.raises(RequestError) as error:
            await manager.finish(handle)
        assert error.value.status == 409
        await manager.abandon(handle)

    manage(SpeakingGeneration("chatml", say_ok), use)


def test_a_session_without_a_call_that_went_well_has_no_chains():
    async def use(manager: GatewayManager) -> None:
        handle = manager.open_session(seed=1)
        with pytest.raises(openai.InternalServerError):
            await ask(handle)
        assert (await manager.finish(handle)).chains == ()

    manage(SpeakingGeneration("chatml", lambda request, prompt: None), use)


def test_a_sessions_own_sampling_takes_the_place_of_the_runs():
    generation = SpeakingGeneration("chatml", say_ok)
    greedy = replace(rules().sampling, temperature=0.0, max_new_tokens=9)

    async def use(manager: GatewayManager) -> None:
        await ask(manager.open_session(seed=1, sampling=greedy), stop="x")
        await ask(manager.open_session(seed=1))
        await ask(manager.open_session(seed=1, sampling=greedy), max_tokens=4, temperature=1.0)
        sampled = [each.sampling for each in generation.requests]
        assert [(each.temperature, each.max_new_tokens) for each in sampled] == [(0.0, 9), (0.7, 256), (0.0, 4)]
        assert sampled[0].stop_strings == ("x",)
        assert {each.stop_token_ids for each in sampled} == {greedy.stop_token_ids}

    manage(generation, use)


def test_abandoning_a_session_ends_its_calls_in_the_engine():
    generation = SpeakingGeneration("chatml", say_ok, before=never)

    async def use(manager: GatewayManager) -> None:
        handle = manager.open_session(seed=1)
        task = asyncio.create_task(ask(handle))
        await eventually(lambda: len(generation.requests) == 1)
        await manager.abandon(handle)
        with pytest.raises(openai.ConflictError):
            await task
        assert generation.num_cancelled == 1
        assert manager.num_sessions == (0, 0)

    manage(generation, use)


def test_sessions_that_clients_close_or_nobody_uses_are_not_counted():
    async def use(manager: GatewayManager) -> None:
        handle = manager.open_session(seed=1)
        await request_with_run_key(manager, "DELETE", handle)
        assert manager.num_sessions == (0, 0)
        manager.open_session(seed=2)
        await eventually(lambda: manager.num_sessions == (0, 0))

    manage(FakeGeneration(), use, session_ttl_s=0.5)


def test_all_sessions_that_fit_are_opened_and_then_refused():
    async def use(manager: GatewayManager) -> None:
        handles = [manager.open_session(seed=i) for i in range(5)]
        with pytest.raises(RequestError) as error:
            manager.open_session(seed=5)
        assert (error.value.status, error.value.code) == (429, "too_many_sessions")
        await manager.abandon(handles[3])
        assert manager.open_session(seed=5).server == handles[3].server

    manage(FakeGeneration(), use, num_servers=3, max_sessions=5)


def test_sessions_and_connections_follow_the_open_files(caplog):
    few = split_settings(GatewayConfig(num_servers=3, max_sessions=100, max_client_sessions=4), 10)
    assert [(each.max_sessions, each.max_connections) for each in few] == [(4, 4), (3, 3), (3, 3)]
    assert [each.max_client_sessions for each in few] == [2, 1, 1]
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "limiting sessions to 10 of 100" in warning.getMessage()
    assert "raise the hard limit to 456: ulimit -Hn" in warning.getMessage()
    caplog.clear()
    many = split_settings(GatewayConfig(num_servers=2, max_sessions=100), 1000)
    assert [(each.max_sessions, each.max_connections) for each in many] == [(50, 500), (50, 500)]
    assert caplog.records == []
    with pytest.raises(ConfigError, match="the open files allow 2 servers"):
        split_settings(GatewayConfig(num_servers=3), 2)


def test_an_address_or_a_token_that_cannot_be_used_is_refused_before_an_engine_loads(monkeypatch):
    monkeypatch.delenv("GATEWAY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"gateway.token_env = 'GATEWAY_KEY': .* not set"):
        check_gateway(GatewayConfig(token_env="GATEWAY_KEY"))
    with pytest.raises(ConfigError, match=r"gateway.host, gateway.port = 'no-such-host.invalid:0': does not resolve"):
        check_gateway(GatewayConfig(host="no-such-host.invalid"))
    check_gateway(GatewayConfig())


def test_where_all_addresses_are_listened_on_agents_are_told_this_machines_and_a_token(monkeypatch):
    monkeypatch.setenv("GATEWAY_KEY", "secret")
    (settings,) = split_settings(GatewayConfig(host="0.0.0.0", token_env="GATEWAY_KEY"), 10)
    assert (settings.advertised_host, settings.token) == (node_ip(), "secret")

    async def use(manager: GatewayManager) -> None:
        handle = manager.open_session(seed=1)
        assert handle.base_url.startswith(f"http://{node_ip()}:")
        assert len(handle.api_key) >= 32
        assert handle.api_key not in repr(handle)
        local = replace(handle, base_url=handle.base_url.replace(node_ip(), "127.0.0.1"))
        assert await ask(local) == "ok"
        with pytest.raises(openai.AuthenticationError):
            await ask(replace(local, api_key="guessed"))

    manage(SpeakingGeneration("chatml", say_ok), use, host="0.0.0.0")


def test_servers_that_listen_are_closed_when_a_later_one_cannot_start(monkeypatch):
    start = GatewayServer.start
    started: list[GatewayServer] = []

    async def start_one(*args: Any) -> GatewayServer:
        if started:
            raise OSError("no port is free")
        started.append(await start(*args))
        return started[0]

    async def main() -> None:
        monkeypatch.setattr(GatewayServer, "start", start_one)
        with pytest.raises(OSError, match="no port"):
            await GatewayManager.start(FakeGeneration(), codec_of("chatml"), rules(), GatewayConfig(num_servers=2))
        async with ClientSession() as client:
            with pytest.raises(ClientConnectionError):
                await client.get(f"{started[0].base_url}/health")

    asyncio.run(main())


def test_a_manager_can_be_closed_twice():
    async def use(manager: GatewayManager) -> None:
        manager.open_session(seed=1)
        await manager.close()
        await manager.close()

    manage(FakeGeneration(), use)


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


def test_twins_without_a_session_that_are_continued_stay_one_chain_each():
    async def body(manager: GatewayManager) -> None:
        firsts = [await said_by(manager, [HI], None) for _ in range(3)]
        seconds = [await said_by(manager, [HI, first.model_dump(), MORE], None) for first in firsts]
        for index in range(3):
            handle = manager.open_session(seed=index, server=0)
            claims = [claim_of(firsts[index]), claim_of(seconds[index])]
            finished = await manager.finish_with_claims(handle, claims)
            assert [len(chain.message_log) for chain in finished.chains] == [4]
        assert manager.num_echoed_calls == 0

    manage(SpeakingGeneration("chatml", say_four), body)


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
