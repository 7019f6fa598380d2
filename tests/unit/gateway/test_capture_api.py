"""The endpoints of captured calls, over HTTP. Gym's own clients use them in tests/contracts/test_gym_episodes.py."""

import json
from typing import Any

import pytest
from aiohttp import ClientSession

from nemo_rl.gateway.server import GatewayServer, ServerSettings
from tests.fakes.generation import FakeGeneration
from tests.unit.gateway.test_server import serve

RECORD = b'{"prompt_token_ids": [1],  "x": "\\u00e9"}'


async def ask(server: GatewayServer, method: str, path: str, body: bytes | None = None, key: str = "") -> Any:
    """The status, and the body or the error's code."""
    headers = {"Authorization": f"Bearer {key or server.token}"}
    async with (
        ClientSession(headers=headers) as http,
        http.request(method, f"{server.base_url}/captures/{path}", data=body) as response,
    ):
        answer = json.loads(await response.text())
    return response.status, answer if response.status == 200 else answer["error"]["code"]


def test_records_come_back_as_they_were_stored_and_end_with_their_rollout() -> None:
    async def use(server: GatewayServer) -> None:
        await ask(server, "POST", "r1/calls/a/begin")
        assert await ask(server, "GET", "r1/calls/a") == (404, "record_not_found")
        assert (await ask(server, "POST", "r1/calls/a", RECORD))[0] == 200
        assert await ask(server, "GET", "r1/calls/a") == (200, json.loads(RECORD))
        assert (await ask(server, "GET", "r1/calls"))[1]["records"] == [json.loads(RECORD)]
        assert (await ask(server, "GET", "r1/calls?after=1"))[1]["records"] == []
        _, frozen = await ask(server, "POST", "r1/freeze")
        assert (frozen["records"], frozen["incomplete"]) == ([json.loads(RECORD)], False)
        assert await ask(server, "POST", "r1/calls/b", RECORD) == (409, "rollout_frozen")
        assert await ask(server, "POST", "r1/calls/a", b"{}") == (409, "record_conflict")
        query = f"snapshot_id={frozen['snapshot_id']}&version="
        assert (await ask(server, "DELETE", f"r1?{query}7"))[1] == {"dropped": False}
        assert (await ask(server, "DELETE", f"r1?{query}{frozen['version']}"))[1] == {"dropped": True}
        await ask(server, "POST", "r2/incomplete", b'{"call_id": "c"}')
        taken = server.captures.take("r2")
        assert taken is not None
        assert taken.is_incomplete
        assert len(server.captures) == 0

    serve(FakeGeneration(), use)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "r/calls/a", b"[1]"),
        ("POST", "r/calls/a", b"{"),
        ("POST", "r/calls/a", b"[" * 100_000),
        ("POST", "r%20x/calls/a", RECORD),
        ("POST", f"{'r' * 300}/calls/a", RECORD),
        ("POST", "r/incomplete", b'{"call_id": 3}'),
        ("DELETE", "r?version=x", None),
        ("GET", "r/calls?after=-1", None),
    ],
)
def test_malformed_requests_store_nothing(method: str, path: str, body: bytes | None) -> None:
    async def use(server: GatewayServer) -> None:
        assert (await ask(server, method, path, body))[0] == 400
        assert len(server.captures) == 0

    serve(FakeGeneration(), use)


def test_only_the_runs_key_opens_captures() -> None:
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        for key in (session_id, "wrong"):
            assert (await ask(server, "POST", "r/calls/a", RECORD, key))[0] == 401
            assert (await ask(server, "POST", "r/freeze", None, key))[0] == 401
        assert len(server.captures) == 0

    serve(FakeGeneration(), use, settings=ServerSettings(token="secret"))
