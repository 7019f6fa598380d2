"""Whatever API an agent speaks, streamed or not, the same conversation trains on the same tokens and log-probs."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway.conversations import MODES, NAME, Agent, Clients, ScriptedEngine
from tests.unit.gateway.engines import DEADLINE_S, started
from tests.unit.gateway.test_server import eventually

SCRIPTS: tuple[str, ...] = (
    # (script); the number of chains that it leaves follows
    "u:x a -> 1",
    "u:tx a -> 1",
    "u:c a -> 1",
    "u:cc a -> 1",
    "u:xc a -> 1",
    "u:txcc a -> 1",
    "u:t a -> 1",
    "u:cx a -> 1",
    "u:cxc a -> 1",
    "sys u:x a -> 1",
    "u:x a u:x a -> 1",
    "u:tx a u:tx a u:tx a -> 1",
    "sys u:x a u:x a -> 1",
    "sys u:tc a r:x a u:x a -> 1",
    "u:c a r:x a -> 1",
    "u:cc a r:x a -> 1",
    "u:ccc a r:cc a r:x a -> 1",
    "u:tc a r:tc a r:tx a -> 1",
    "u:xc a r:xc a r:x a u:x a -> 1",
    "u:cx a r:x a -> 1",
    "u:cxc a r:x a -> 1",
    "u:c a r:c a r:c a r:c a r:x a -> 1",
    "notools u:x a u:x a -> 1",
    "notools u:c a u:x a -> 1",
    "notools sys u:tc a u:x a -> 1",
    "u:x short u:x a -> 1",
    "u:tx short u:x a -> 1",
    "u:c short u:x a -> 1",
    "u:x a u:x short u:x a -> 1",
    "u:xc a notext r:x a -> 1",
    "u:txc a notext r:x a u:x a -> 1",
    "u:txcc a notext r:x a -> 1",
    "u:tx a nothink u:x a -> 1",
    "u:tc a nothink r:tx a nothink u:x a -> 1",
    "u:txc a nothink notext r:x a -> 1",
    "u:x a retry -> 2",
    "u:x a retry u:x a -> 2",
    "u:x a retry retry u:x a -> 3",
    "u:c a retry r:x a -> 2",
    "u:c a r:x a retry u:x a -> 2",
    "u:tcc a retry r:x a -> 2",
    "u:x a edit u:x a -> 2",
    "u:x a u:x a edit u:x a -> 2",
    "u:tc a r:x a edit u:x a -> 2",
    "u:x a u:x swap:tx a -> 1",
    "u:x a u:x a compact:x a -> 2",
    "u:c a r:x a compact:c a r:x a -> 2",
    "sys u:c a r:x a compact:tx a u:x a -> 2",
    "u:x a sub:tx u:x a -> 2",
    "u:c a sub:tx r:x a -> 2",
    "u:c a sub:x sub:tx r:x a -> 3",
    "sys u:c a sub:x r:x a -> 2",
    "u:x a retools u:x a -> 2",
    "u:x a notools u:x a -> 2",
    "u:h cancel swap:x a -> 1",
    "u:x a u:h cancel swap:x a -> 1",
    "u:c a r:h cancel -> 1",
    "u:x a u:h cancel cancel swap:c a r:x a -> 1",
    "sys u:h cancel swap:tx a u:x a -> 1",
    "u:h cancel sub:x swap:x a -> 2",
    "u:tx a u:h cancel compact:x a -> 2",
    "u:xc a notext r:xc a notext r:x a -> 1",
)


async def recorded(server: Any, engine: ScriptedEngine, clients: Clients, mode: str, script: str, seed: int) -> Any:
    """Return (tokens, mask, log-probs) of the chains that a script leaves."""
    session_id = server.open_session(seed=seed)
    await Agent(server, engine, clients, mode, session_id).play(script)
    session = server.close_session(session_id)
    chains = []
    for chain in session.chains():
        tokens = [(i, int(m.is_generated)) for m in chain.message_log for i in m.token_ids]
        logprobs = [p for m in chain.message_log for p in m.generation_logprobs or ()]
        chains.append((tokens, logprobs, chain.rewards, chain.is_truncated))
    return chains


def run(use: Any) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        clients, server = Clients(), await started(engine, NAME)
        try:
            await asyncio.wait_for(use(server, engine, clients), DEADLINE_S)
            idle = eventually(lambda: server._completions.queue.num_running == 0)
            await asyncio.wait_for(idle, DEADLINE_S)  # a call that was broken off unwinds a little later
        finally:
            await clients.close()
            await server.close()

    asyncio.run(main())


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_conversation_trains_on_the_same_tokens_in_every_dialect(case):
    script, _, num_chains = case.partition("->")

    async def use(server: Any, engine: ScriptedEngine, clients: Clients) -> None:
        chains = {mode: await recorded(server, engine, clients, mode, script, seed=5) for mode in MODES}
        assert len(chains["chat"]) == int(num_chains)
        for mode in MODES:
            assert chains[mode] == chains["chat"], mode

    run(use)


TURNS = st.sampled_from(
    [
        *("u:x a", "u:tx a", "u:tc a r:x a", "u:txcc a r:xc a r:x a", "u:c a sub:x r:x a", "u:x a retry", "u:x a edit"),
        *("u:xc a notext r:x a", "u:x compact:x a", "u:h cancel swap:x a", "u:x a retools", "u:x short"),
    ]
)


@settings(max_examples=6, deadline=None)
@given(scripts=st.lists(st.lists(TURNS, min_size=1, max_size=4).map(" ".join), min_size=2, max_size=3))
def test_conversations_at_once_train_on_what_each_would_alone(scripts):
    async def use(server: Any, engine: ScriptedEngine, clients: Clients) -> None:
        alone = [await recorded(server, engine, clients, "chat", script, seed=i) for i, script in enumerate(scripts)]
        tasks = [(i, mode) for i in range(len(scripts)) for mode in MODES]
        at_once = await asyncio.gather(
            *(recorded(server, engine, clients, mode, scripts[i], seed=i) for i, mode in tasks)
        )
        for (i, mode), chains in zip(tasks, at_once, strict=True):
            assert chains == alone[i], (mode, scripts[i])

    run(use)


def test_no_token_of_a_conversation_is_rendered_a_second_time():
    async def use(server: Any, engine: ScriptedEngine, clients: Clients) -> None:
        for mode in MODES:
            engine.requests.clear()
            ((tokens, _, _, _),) = await recorded(
                server, engine, clients, mode, "sys u:txcc a r:tc a r:x a u:tx a", seed=1
            )
            prompts = [request.token_ids for request in engine.requests]
            whole = tuple(token for token, _ in tokens)
            assert all(whole[: len(prompt)] == prompt for prompt in prompts), mode

    run(use)
