"""The gateway's endpoints below /captures, by which NeMo Gym's token capture stores its records.

POST   /captures/{rollout}/calls/{call}        a record, JSON
POST   /captures/{rollout}/calls/{call}/begin  the call is about to be made
POST   /captures/{rollout}/incomplete          {"call_id"?}: a call was not captured
GET    /captures/{rollout}/calls/{call}        the record of the call
GET    /captures/{rollout}/calls?after=        the records that follow the first so many
POST   /captures/{rollout}/freeze              the records, closed to further ones
DELETE /captures/{rollout}?snapshot_id=&version=   forget exactly this snapshot
"""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web

from nemo_rl.gateway.captures import CaptureSnapshot, CaptureStore
from nemo_rl.gateway.dialects.bodies import Body
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.web import Handler

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")  # as Gym's rollout ids


class IncompleteRequest(Body):
    """The body of POST /captures/{rollout}/incomplete; may be empty."""

    call_id: str = ""


def capture_routes(
    store: CaptureStore,
    read_body: Callable[[web.Request], Awaitable[bytes]],
    guarded: Callable[[Handler], Handler],
) -> list[web.RouteDef]:
    """Return the routes over `store`, each for holders of the run's key (`guarded`)."""

    async def put(request: web.Request) -> web.Response:
        record = await read_body(request)
        _check_record(record)
        store.put(_identifier(request, "rollout"), _identifier(request, "call"), record)
        return web.json_response({"status": "stored"})

    async def begin(request: web.Request) -> web.Response:
        store.announce(_identifier(request, "rollout"), _identifier(request, "call"))
        return web.json_response({"status": "announced"})

    async def mark_incomplete(request: web.Request) -> web.Response:
        parsed = IncompleteRequest.from_json(await read_body(request) or b"{}")
        store.mark_incomplete(_identifier(request, "rollout"), parsed.call_id)
        return web.json_response({"status": "incomplete"})

    async def read(request: web.Request) -> web.Response:
        record = store.read_call(_identifier(request, "rollout"), _identifier(request, "call"))
        return web.Response(body=record, content_type="application/json")

    async def list_calls(request: web.Request) -> web.Response:
        after = _number(request, "after", default="0")
        calls = store.list_calls(_identifier(request, "rollout"), after=after)
        return _render({"serial": calls.serial}, calls.records)

    async def freeze(request: web.Request) -> web.Response:
        return _render_snapshot(store.freeze(_identifier(request, "rollout")))

    async def drop(request: web.Request) -> web.Response:
        snapshot_id, version = request.query.get("snapshot_id", ""), _number(request, "version")
        rollout_id = _identifier(request, "rollout")
        return web.json_response({"dropped": store.drop(rollout_id, snapshot_id=snapshot_id, version=version)})

    path = "/captures/{rollout}"
    return [
        web.post(f"{path}/calls/{{call}}", guarded(put)),
        web.get(f"{path}/calls/{{call}}", guarded(read)),
        web.get(f"{path}/calls", guarded(list_calls)),
        web.post(f"{path}/calls/{{call}}/begin", guarded(begin)),
        web.post(f"{path}/incomplete", guarded(mark_incomplete)),
        web.post(f"{path}/freeze", guarded(freeze)),
        web.delete(path, guarded(drop)),
    ]


def _identifier(request: web.Request, name: str) -> str:
    value = request.match_info[name]
    if not IDENTIFIER.fullmatch(value):
        raise RequestError(400, f"{value!r:.80} must be letters, digits, '.', '_' and '-', at most 256", param=name)
    return value


def _number(request: web.Request, name: str, default: str = "") -> int:
    value = request.query.get(name, default)
    if not value.isdecimal():
        raise RequestError(400, f"{name} must be a number, not {value!r:.80}", param=name)
    return int(value)


def _check_record(record: bytes) -> None:
    try:
        parsed = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "a record must be a JSON object") from error
    if not isinstance(parsed, dict):
        raise RequestError(400, f"a record must be a JSON object, not {type(parsed).__name__}")


def _render_snapshot(snapshot: CaptureSnapshot) -> web.Response:
    state = {
        "incomplete": snapshot.is_incomplete,
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
    }
    return _render(state, snapshot.records)


def _render(fields: Mapping[str, object], records: Sequence[bytes]) -> web.Response:
    """Return an object of the fields and `records`, which are JSON already."""
    head = json.dumps(fields).encode().removesuffix(b"}")
    body = head + b', "records": [' + b",".join(records) + b"]}"
    return web.Response(body=body, content_type="application/json")
