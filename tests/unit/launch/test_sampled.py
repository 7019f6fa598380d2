"""The API of a running server, found by asking it."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.config.loading import load_collect_config
from nemo_rl.distributed.endpoint import EndpointError
from nemo_rl.launch.sampled import load_collection_inputs
from tests.fakes.scoring_server import scoring_server

CHAT = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}


def api_of(completions: web.Response, recipe: Path, *overrides: str) -> str:
    """Return the API that is chosen for a server with this answer to completions, and with a chat API that works."""

    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        return completions if path == "/v1/completions" else web.json_response(CHAT)

    async def main() -> str:
        async with scoring_server(answer) as url, AsyncExitStack() as stack:
            config = load_collect_config(recipe, (f"server.address={url}", *overrides))
            inputs = await load_collection_inputs(config, stack)
            assert inputs.served is not None
            return inputs.served.api

    return asyncio.run(main())


@pytest.fixture
def recipe(tmp_path: Path, model_directory: Path, letters: Path) -> Path:
    path = tmp_path / "served.yaml"
    path.write_text(
        f"""
collect: {{output_dir: {tmp_path / "out"}}}
policy: {{model_name: {model_directory}, device: cpu, max_total_sequence_length: 32, generation: {{max_new_tokens: 4}}}}
server: {{model: m}}
rollout: {{max_retries: 0}}
data: {{input: {{dataset_name: jsonl, data_path: {letters}, env_name: letters}}}}
env: {{letters: {{type: "tests.unit.launch.scoring:length"}}}}
logger: {{progress: false}}
"""
    )
    return path


@pytest.mark.parametrize("status", [200, 400, 404, 422, 501])
def test_server_without_completions_of_token_ids_is_sent_messages(status: int, recipe: Path) -> None:
    assert api_of(web.Response(status=status, text="<html>"), recipe) == "chat"


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_failure_of_the_server_is_not_taken_for_a_missing_api(status: int, recipe: Path) -> None:
    with pytest.raises(EndpointError, match=rf": {status} engine is dead.*server\.api: chat") as caught:
        api_of(web.Response(status=status, text="engine is dead"), recipe)
    assert caught.value.status == status
    assert api_of(web.Response(status=status), recipe, "server.api=chat") == "chat"
