import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.environments.nemo_gym.client import GymClient
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig
from nemo_rl.environments.nemo_gym.reply import (
    GymCall,
    GymEpisodeFailed,
    GymError,
    GymInvalidReply,
    GymRefused,
    GymUnavailable,
)
from nemo_rl.errors import ConfigError
from tests.fakes import gym_stack
from tests.fakes.gym_stack import FakeGymStack, Script, row_of, script_of_row

NEVER = 3600.0


def section(**settings: Any) -> NemoGymConfig:
    values = {"timeout_s": 120.0, "start_timeout_s": 120.0, "retry_backoff_s": 0.01, "max_retries": 3, **settings}
    return NemoGymConfig(**values)


@asynccontextmanager
async def client_of(stack: FakeGymStack, **settings: Any) -> AsyncIterator[GymClient]:
    client = GymClient(section(head_url=stack.head_url, **settings))
    try:
        await client.connect(["agent"])
        yield client
    finally:
        await client.close()


def asked(use: Callable[[GymClient, FakeGymStack], Awaitable[Any]], *, agents: tuple[str, ...] = ("agent",)) -> Any:
    """What `use` returns, with a connected client of a stack whose rows carry their scripts."""

    async def run() -> Any:
        async with FakeGymStack(agents, script_of_row) as stack, client_of(stack) as client:
            return await use(client, stack)

    return asyncio.run(run())


def failure_of(row: dict[str, Any], **settings: Any) -> tuple[GymError, int]:
    """The error of one row, and how often the agent was sent it."""

    async def run() -> tuple[GymError, int]:
        async with FakeGymStack(script=script_of_row) as stack, client_of(stack, **settings) as client:
            with pytest.raises(GymError) as error:
                await client.run("agent", row)
            return error.value, len(stack.rows)

    return asyncio.run(run())


def test_a_row_comes_back_with_its_reward_and_calls() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        reply = await client.run("agent", row_of("hello", script={"turns": 2, "reward": 0.5}, level=3))
        assert reply.reward == 0.5
        assert reply.calls[0] == GymCall((1, 2, 3), (4, 5), (-0.25, -0.5))
        assert reply.calls[1].prompt_token_ids == (1, 2, 3, 4, 5, 9)
        assert [item["type"] for item in reply.output] == ["message"] * 3
        assert reply.extras == {"level": 3}
        assert stack.rows[0][1]["responses_create_params"]["input"] == [{"role": "user", "content": "hello"}]

    asked(use)


def test_answers_out_of_order_go_to_their_rows() -> None:
    async def run() -> list[float]:
        gates = [asyncio.Event() for _ in range(5)]
        all_began = asyncio.Event()
        began: set[int] = set()

        async def after(place: int) -> None:
            began.add(place)
            if len(began) == len(gates):
                all_began.set()
            await gates[place].wait()
            if place:
                gates[place - 1].set()  # the last row is answered first

        def script(agent: str, row: Any) -> Script:
            return Script(before=lambda: after(row["place"]), reward=float(row["place"]))

        async with FakeGymStack(script=script) as stack, client_of(stack) as client:
            runs = [asyncio.create_task(client.run("agent", row_of("?", place=place))) for place in range(5)]
            await all_began.wait()
            gates[-1].set()
            return [reply.reward for reply in await asyncio.gather(*runs)]

    assert asyncio.run(run()) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_no_more_rollouts_are_under_way_than_allowed() -> None:
    async def run() -> int:
        async with FakeGymStack() as stack, client_of(stack, max_concurrency=3) as client:
            await asyncio.gather(*(client.run("agent", row_of("?")) for _ in range(20)))
            return stack.most_running

    assert asyncio.run(run()) <= 3


@pytest.mark.parametrize(
    ("status", "kind", "attempts"),
    [
        (500, GymRefused, 1),
        (400, GymRefused, 1),
        (404, GymRefused, 1),
        (307, GymRefused, 1),
        (502, GymUnavailable, 1),
        (504, GymUnavailable, 1),
        (503, GymUnavailable, 4),
        (429, GymUnavailable, 4),
    ],
)
def test_only_rows_that_were_not_begun_are_sent_again(status: int, kind: type[GymError], attempts: int) -> None:
    error, num_sent = failure_of(row_of("?", script={"status": status, "text": "tool\nbroke"}))
    assert type(error) is kind
    assert num_sent == attempts
    assert f"HTTP {status}: tool broke" in str(error)
    assert "agent 'agent' at http://127.0.0.1:" in str(error)


def test_a_row_without_parameters_is_refused_with_the_servers_words() -> None:
    error, _ = failure_of({"agent_ref": {"name": "agent"}})
    assert isinstance(error, GymRefused)
    assert "HTTP 422: " in str(error)
    assert "Field required" in str(error)


def failure_of_episode(front: str, **script: Any) -> tuple[GymError, list[Any]]:
    """The error of one row of a stack with environment servers, and what was sent for it."""

    async def run() -> tuple[GymError, list[Any]]:
        async with FakeGymStack(script=script_of_row, front=front) as stack, client_of(stack) as client:
            with pytest.raises(GymError) as error:
                await client.run("agent", row_of("?", script=script))
            return error.value, [row for _, row in stack.rows]

    return asyncio.run(run())


def test_an_episode_that_was_turned_away_is_the_next_attempt_of_its_rollout() -> None:
    busy = {"failure_reason": "queue is full", "terminal": False, "stage": "admission"}
    error, sent = failure_of_episode("single_agent_turn", failure=busy)
    assert isinstance(error, GymUnavailable)
    assert "failed at stage admission: queue is full" in str(error)
    assert [body["episode_id"]["attempt"] for body in sent] == [0, 1, 2, 3]
    assert len({body["episode_id"]["rollout_id"] for body in sent}) == 1
    _, sent = failure_of_episode("legacy_agent", status=503)
    assert [body.get("_ng_attempt_index", 0) for body in sent] == [0, 1, 2, 3]
    assert len({body["_ng_rollout_id"] for body in sent}) == 1


@pytest.mark.parametrize("front", ["single_agent_turn", "single_agent_turn_legacy", "legacy_agent"])
@pytest.mark.parametrize(
    ("script", "delivery"), [({"dies": True}, "possibly_delivered"), ({"status": 502}, "possibly_delivered")]
)
def test_a_row_that_may_have_been_delivered_is_not_sent_again(front: str, script: Any, delivery: str) -> None:
    error, sent = failure_of_episode(front, **script)
    assert isinstance(error, GymUnavailable)
    assert error.delivery == delivery
    assert "the row may have been delivered" in str(error)
    assert len(sent) == 1


def test_a_reported_failure_is_not_sent_again() -> None:
    for stage in ("seed", "agent", "verification", "cleanup", None):
        failure = {"failure_reason": "broke", "terminal": False} | ({"stage": stage} if stage else {})
        error, sent = failure_of_episode("single_agent_turn", failure=failure)
        assert isinstance(error, GymEpisodeFailed)
        assert (error.delivery, len(sent)) == ("delivered", 1)


def test_a_busy_server_is_asked_again_until_it_takes_the_row() -> None:
    answers = iter([503, 429, 200])

    async def run() -> tuple[float, int]:
        async with FakeGymStack(script=lambda agent, row: Script(status=next(answers))) as stack:
            async with client_of(stack) as client:
                reply = await client.run("agent", row_of("?"))
            return reply.reward, len(stack.rows)

    assert asyncio.run(run()) == (1.0, 3)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (Script(alter=gym_stack.with_nan_log_prob), "nan: no finite log-prob"),
        (Script(alter=gym_stack.without_reward), "reward must be a finite number"),
        (Script(alter=gym_stack.without_response), "response must be an object"),
        (Script(alter=gym_stack.with_token_missing), "1 tokens with 2 log-probs"),
        (Script(raw=b'{"reward": 1.0, '), "the reply is not JSON"),
        (Script(raw=b"\xff\xfe\x00garbage"), "the reply is not JSON"),
        (Script(raw=b"null"), "the reply must be an object"),
    ],
)
def test_broken_replies_are_told_apart_and_not_asked_for_again(script: Script, said: str) -> None:
    async def run() -> tuple[GymError, int]:
        async with FakeGymStack(script=lambda agent, row: script) as stack, client_of(stack) as client:
            with pytest.raises(GymInvalidReply) as error:
                await client.run("agent", row_of("?"))
            return error.value, len(stack.rows)

    error, num_sent = asyncio.run(run())
    assert said in str(error)
    assert (error.agent, num_sent) == ("agent", 1)
    assert error.url.endswith("/run")


def test_a_masked_reply_is_a_reply() -> None:
    async def run() -> bool:
        async with (
            FakeGymStack(script=lambda a, r: Script(alter=gym_stack.masked)) as stack,
            client_of(stack) as client,
        ):
            return (await client.run("agent", row_of("?"))).mask_sample

    assert asyncio.run(run())


def test_a_rollout_that_never_ends_is_given_up_at_its_deadline() -> None:
    async def run() -> GymError:
        hang = Script(before=asyncio.Event().wait)
        async with FakeGymStack(script=lambda agent, row: hang) as stack, client_of(stack, timeout_s=0.2) as client:
            with pytest.raises(GymUnavailable) as error:
                await client.run("agent", row_of("?"))
            return error.value

    assert "no reply within env.nemo_gym.timeout_s = 0.2 s" in str(asyncio.run(run()))


def test_the_wait_for_a_turn_is_no_part_of_the_time() -> None:
    """The second row waits for as long as the first one is allowed to hang, and is run then."""

    async def run() -> float:
        scripts = iter([Script(before=asyncio.Event().wait), Script(reward=0.25)])
        async with (
            FakeGymStack(script=lambda agent, row: next(scripts)) as stack,
            client_of(stack, timeout_s=2.0, max_concurrency=1) as client,
        ):
            runs = [asyncio.create_task(client.run("agent", row_of("?"))) for _ in range(2)]
            _, second = await asyncio.gather(*runs, return_exceptions=True)
            assert not isinstance(second, BaseException), second
            return second.reward

    assert asyncio.run(run()) == 0.25


def test_a_server_that_dies_with_a_row_fails_it_without_a_second_try() -> None:
    error, num_sent = failure_of(row_of("?", script={"dies": True}))
    assert isinstance(error, GymUnavailable)
    assert "connection lost" in str(error)
    assert num_sent == 1


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same port", "another port"])
def test_a_server_that_returns_is_found_again(elsewhere: bool) -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        first = stack.agent_url("agent")
        with pytest.raises(GymUnavailable):
            await client.run("agent", row_of("?", script={"dies": True}))
        await stack.stop_agent("agent")
        late = asyncio.create_task(_return_when_refused(stack, elsewhere))
        assert (await client.run("agent", row_of("again"))).reward == 1.0
        await late
        assert (stack.agent_url("agent") != first) is elsewhere

    async def _return_when_refused(stack: FakeGymStack, elsewhere: bool) -> None:
        await asyncio.sleep(0)  # the row is sent first, to nobody
        await stack.start_agent("agent", elsewhere=elsewhere)

    asked(use)


def test_a_server_that_stays_away_is_unavailable_after_the_last_try() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        await stack.stop_agent("agent")
        await stack.stop_head()
        with pytest.raises(GymUnavailable, match=r"not accepted in 4 attempts \(Cannot connect"):
            await client.run("agent", row_of("?"))

    asked(use)


def test_an_agent_that_the_stack_does_not_have_is_named_with_the_nearest() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        assert client.known_agents == ("agent", "math_agent")
        with pytest.raises(ConfigError, match="did you mean 'math_agent'") as error:
            await client.connect(["agent", "maths_agent"])
        assert error.value.value == "maths_agent"
        with pytest.raises(GymRefused, match="no such agent; known: agent, math_agent"):
            await client.run("maths_agent", row_of("?"))

    asked(use, agents=("agent", "math_agent"))


def test_a_row_before_any_connection_is_refused() -> None:
    async def run() -> None:
        client = GymClient(section(head_url="http://127.0.0.1:1/"))
        with pytest.raises(GymRefused, match="not connected to the stack"):
            await client.run("agent", row_of("?"))
        await client.close()

    asyncio.run(run())


def test_agents_that_start_late_are_waited_for() -> None:
    async def run() -> tuple[str, ...]:
        async with FakeGymStack(("agent", "late")) as stack:
            await stack.stop_agent("late")
            client = GymClient(section(head_url=stack.head_url))
            connecting = asyncio.create_task(client.connect(["late"]))
            await client.connect(["agent"])  # who is not needed is not waited for
            assert not connecting.done()
            await stack.start_agent("late")
            await connecting
            await client.close()
            return client.known_agents

    assert asyncio.run(run()) == ("agent", "late")


def test_agents_that_never_start_are_named_at_the_deadline() -> None:
    async def run() -> str:
        async with FakeGymStack(("agent", "late")) as stack:
            await stack.stop_agent("late")
            client = GymClient(section(head_url=stack.head_url, start_timeout_s=1.0))
            with pytest.raises(GymUnavailable) as error:
                await client.connect(["agent", "late"])
            await client.close()
            return str(error.value)

    said = asyncio.run(run())
    assert "no response from late (http://127.0.0.1:" in said
    assert "within env.nemo_gym.start_timeout_s = 1 s" in said


def test_a_head_server_that_never_answers_is_named_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        async def run() -> str:
            client = GymClient(section(head_url=url, start_timeout_s=0.5))
            with pytest.raises(GymUnavailable) as error:
                await client.connect(["agent"])
            await client.close()
            return str(error.value)

        assert url in asyncio.run(run())


def test_a_stack_that_has_died_ends_the_wait() -> None:
    def check() -> None:
        raise GymUnavailable("the stack has died")

    async def run() -> None:
        client = GymClient(section(head_url="http://127.0.0.1:9"))
        with pytest.raises(GymUnavailable, match="the stack has died"):
            await client.connect(["agent"], check=check)
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "text"),
    [(404, "{}"), (200, "no json"), (200, "[1]"), (200, json.dumps("- a list")), (200, json.dumps("{"))],
)
def test_what_is_no_head_server_is_said_at_once(status: int, text: str) -> None:
    async def run() -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status, text=text)

        app = web.Application()
        app.add_routes([web.get("/global_config_dict_yaml", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = GymClient(section(head_url=f"http://127.0.0.1:{runner.addresses[0][1]}", start_timeout_s=NEVER))
        with pytest.raises(GymInvalidReply, match="not a head server of NeMo Gym"):
            await client.connect(["agent"])
        await client.close()
        await runner.cleanup()

    asyncio.run(run())


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ConfigError, match="head_url"):
        GymClient(section())
