"""A watched stack that loses a server is over for all its rows; a stack that is whole has rows that fail alone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nemo_rl.environments.nemo_gym import watch
from nemo_rl.environments.nemo_gym.client import GymClient
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig
from nemo_rl.environments.nemo_gym.reply import GymRefused, GymStackEnded
from tests.fakes.gym_stack import FakeGymStack, Script, row_of

DEADLINE_S = 60.0
AGENTS = ("agent", "other")
Use = Callable[[GymClient, FakeGymStack], Awaitable[None]]


def lives() -> None:
    """The stack's process has not ended."""


def watched(use: Use, script: Script, *, check: Callable[[], None] = lives, **settings: Any) -> None:
    """Call `use` with a client that watches a stack, whose rows all do as `script` says."""

    async def run() -> None:
        async with FakeGymStack(AGENTS, lambda agent, row: script) as stack:
            client = GymClient(NemoGymConfig(head_url=stack.head_url, timeout_s=3600.0, **settings))
            try:
                await client.connect(AGENTS)
                client.watch(check)
                await asyncio.wait_for(use(client, stack), DEADLINE_S)
            finally:
                await client.close()
                await client.close()

    asyncio.run(run())


async def begun(client: GymClient, stack: FakeGymStack) -> "asyncio.Task[Any]":
    """Return the task of a row that its agent has begun."""
    row = asyncio.create_task(client.run("agent", row_of("?")))
    while not stack.rows:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return row


def hanging() -> Script:
    return Script(before=asyncio.Event().wait)


def test_a_row_that_hangs_ends_with_another_server_of_its_stack() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        row = await begun(client, stack)
        await stack.stop_agent("other")
        with pytest.raises(GymStackEnded, match="server 'other' has ended"):
            await row
        with pytest.raises(GymStackEnded, match="server 'other' has ended"):
            await client.run("agent", row_of("?"))
        assert len(stack.rows) == 1

    watched(use, hanging())


def test_a_server_that_accepts_connections_and_never_responds_ends_the_stack() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        row = await begun(client, stack)
        stack.frozen.add("other")
        with pytest.raises(GymStackEnded, match="no response from server 'other' for"):
            await row

    watched(use, hanging(), server_timeout_s=0.2)


def test_the_death_of_the_head_server_ends_the_stack() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        row = await begun(client, stack)
        await stack.stop_head()
        with pytest.raises(GymStackEnded, match="'head server' has ended"):
            await row

    watched(use, hanging())


def test_the_end_of_the_process_ends_the_rows_with_its_text() -> None:
    ended: list[str] = []

    def check() -> None:
        if ended:
            raise GymStackEnded(ended[0])

    async def use(client: GymClient, stack: FakeGymStack) -> None:
        row = await begun(client, stack)
        ended.append("status 137")
        with pytest.raises(GymStackEnded, match="status 137"):
            await row

    watched(use, hanging(), check=check)


def test_the_row_during_which_its_agent_died_is_no_failure_of_its_own() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        with pytest.raises(GymStackEnded, match="server 'agent' has ended"):
            await client.run("agent", row_of("?"))

    watched(use, Script(dies=True))


def test_a_row_that_fails_in_a_whole_stack_fails_alone() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        for _ in range(3):
            with pytest.raises(GymRefused, match="HTTP 500"):
                await client.run("agent", row_of("?"))
        assert len(stack.rows) == 3

    watched(use, Script(status=500))


def test_a_row_that_waits_for_a_confirmation_does_not_outlive_the_watch() -> None:
    async def use(client: GymClient, stack: FakeGymStack) -> None:
        stack.frozen.add("other")
        row = await begun(client, stack)
        await client.close()
        with pytest.raises(GymRefused, match="HTTP 500"):
            await row

    watched(use, Script(status=500))


def test_a_watch_that_fails_ends_the_stack_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: Any) -> None:
        raise KeyError("lost")

    async def use(client: GymClient, stack: FakeGymStack) -> None:
        monkeypatch.setattr(watch, "probe", broken)
        with pytest.raises(GymStackEnded, match="the watch has failed: KeyError: 'lost'"):
            await client.run("agent", row_of("?"))

    watched(use, Script(status=500))
