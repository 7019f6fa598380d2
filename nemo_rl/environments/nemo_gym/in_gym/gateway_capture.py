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

# Checked where Gym is not installed.
# pyright: reportMissingImports=false

import json
from typing import Any
from urllib.parse import quote

import aiohttp
from nemo_gym.token_id_capture.lineage import RolloutLineage
from nemo_gym.token_id_capture.protocols import LineageResolution, TokenCaptureSnapshot
from nemo_gym.token_id_capture.records import TokenEntry

TIMEOUT_S = 60.0


class GatewayClient:
    """Requests to the gateway's endpoints below /captures."""

    def __init__(self, url: str | list[str], api_key: str) -> None:
        """`url` is the policy's base URL, with or without /v1; of several, the first."""
        first = url if isinstance(url, str) else url[0]
        self._root = first.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._http: aiohttp.ClientSession | None = None

    async def request(self, method: str, *path: str, body: bytes | None = None, **query: str) -> Any:
        """Return the decoded answer; raises RuntimeError with the gateway's words for an error."""
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        url = "/".join([self._root, "captures", *(quote(part, safe="") for part in path)])
        async with self._http.request(method, url, data=body, headers=self._headers, params=query) as response:
            text = await response.text()
            if response.status != 200:
                raise RuntimeError(f"{method} {url}: HTTP {response.status}: {text[:500]}")
        return json.loads(text)

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


class GatewayLineage:
    """Finds the call that a request continues among a rollout's records, by Gym's own matcher (`LineageResolver`)."""

    def __init__(self, url: str | list[str], api_key: str) -> None:
        self._gateway = GatewayClient(url, api_key)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        lineage = RolloutLineage()
        for record in (await self._gateway.request("GET", rollout_id))["records"]:
            lineage.add_entry(TokenEntry.model_validate(record))
        return lineage.resolve(request_items)

    def is_process_shared(self) -> bool:
        return True

    async def close(self) -> None:
        await self._gateway.close()
