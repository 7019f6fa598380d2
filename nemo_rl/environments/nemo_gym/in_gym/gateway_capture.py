"""NeMo Gym's token capture on the run's gateway: the sink, the source and the parent resolver of nemo-gym 0.7.

    token_id_capture:
      enabled: true
      sink: gateway_capture:GatewaySink
      sink_kwargs: {url: "${policy_base_url}", api_key: "${policy_api_key}"}
      lineage_store: gateway_capture:GatewayLineage
      lineage_store_kwargs: {url: "${policy_base_url}", api_key: "${policy_api_key}"}
      rebuild_response: false

A record is on the gateway, and visible to all clients, when `put` returns. It lives as long as the run's process.
"""

# Checked without Gym installed.
# pyright: reportMissingImports=false

import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from nemo_gym.token_id_capture.lineage import IncrementalLineageStore
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot
from nemo_gym.token_id_capture.records import TokenEntry

TIMEOUT_S = 60.0


class GatewayAddress:
    """The gateway's endpoints below /captures."""

    def __init__(self, url: str | list[str], api_key: str) -> None:
        """`url` is the policy's base URL, with or without /v1; of several, the first."""
        first = url if isinstance(url, str) else url[0]
        self._root = first.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"}

    def url(self, *path: str, **query: str) -> str:
        address = "/".join([self._root, "captures", *(quote(part, safe="") for part in path)])
        return f"{address}?{urlencode(query)}" if query else address


def decode(method: str, url: str, status: int, text: str) -> Any:
    """Return the decoded answer; raises RuntimeError with the gateway's words for an error."""
    if status != 200:
        raise RuntimeError(f"{method} {url}: HTTP {status}: {text[:500]}")
    return json.loads(text)


class GatewayClient:
    """Requests from an event loop."""

    def __init__(self, url: str | list[str], api_key: str) -> None:
        self._address = GatewayAddress(url, api_key)
        self._http: aiohttp.ClientSession | None = None

    async def request(self, method: str, *path: str, body: bytes | None = None, **query: str) -> Any:
        """Return the decoded answer; raises RuntimeError for an error."""
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            self._http = aiohttp.ClientSession(timeout=timeout, headers=self._address.headers)
        url = self._address.url(*path, **query)
        async with self._http.request(method, url, data=body) as response:
            return decode(method, url, response.status, await response.text())

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None


class GatewaySink:
    """Stores records (`TokenSink`)."""

    def __init__(self, url: str | list[str], api_key: str) -> None:
        self._gateway = GatewayClient(url, api_key)

    async def put(self, entry: TokenEntry) -> None:
        body = entry.model_dump_json().encode()
        await self._gateway.request("POST", entry.rollout_id, "calls", entry.model_call_id, body=body)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await self._gateway.request("POST", rollout_id, "calls", model_call_id, "begin")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        body = json.dumps({"call_id": model_call_id}).encode()
        await self._gateway.request("POST", rollout_id, "incomplete", body=body)

    async def close(self) -> None:
        await self._gateway.close()


class GatewaySource:
    """Freezes and retires a rollout's records (`TokenSource`)."""

    def __init__(self, url: str | list[str], api_key: str) -> None:
        self._gateway = GatewayClient(url, api_key)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        answer = await self._gateway.request("POST", rollout_id, "freeze")
        entries = tuple(TokenEntry.model_validate(record) for record in answer["records"])
        return TokenCaptureSnapshot(rollout_id, entries, answer["incomplete"], answer["snapshot_id"], answer["version"])

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        answer = await self._gateway.request("DELETE", rollout_id, snapshot_id=snapshot_id, version=str(version))
        return answer["dropped"]

    async def close(self) -> None:
        await self._gateway.close()


class GatewayLineage(IncrementalLineageStore):
    """Finds the call that a request continues among a rollout's records, by Gym's own matcher (`LineageResolver`).

    Each record is read once, and once more if its tokens are those that a request continues. Gym keeps what it matches
    by, without tokens, and calls these methods in threads.
    """

    def __init__(self, url: str | list[str], api_key: str) -> None:
        super().__init__()
        self._address = GatewayAddress(url, api_key)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _fetch_new_entries(
        self, rollout_id: str, cursor: tuple[int, int] | None
    ) -> tuple[list[tuple[TokenEntry, str]], tuple[int, int]]:
        serial, num_known = cursor or (None, 0)
        answer = self._get(rollout_id, "calls", after=str(num_known))
        if serial not in (None, answer["serial"]):
            raise self.CursorReset
        entries = [TokenEntry.model_validate(record) for record in answer["records"]]
        return [(entry, entry.model_call_id) for entry in entries], (answer["serial"], num_known + len(entries))

    def _load_entry(self, rollout_id: str, ref: str) -> TokenEntry:
        return TokenEntry.model_validate(self._get(rollout_id, "calls", ref))

    def _get(self, *path: str, **query: str) -> Any:
        url = self._address.url(*path, **query)
        try:
            with self._opener.open(
                urllib.request.Request(url, headers=self._address.headers), timeout=TIMEOUT_S
            ) as found:
                return decode("GET", url, found.status, found.read().decode())
        except urllib.error.HTTPError as error:
            return decode("GET", url, error.code, error.read().decode(errors="replace"))
