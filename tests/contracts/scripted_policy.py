"""A policy's endpoint that says what a test scripts, with tokens, as the gateway answers NeMo Gym's model server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class ScriptedPolicy:
    """Answers what it is told, with tokens that extend those sent back to it, as the gateway does."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answers = answers

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = self._answers[min(sum(m["role"] == "assistant" for m in body["messages"]), len(self._answers) - 1)]
        self.bodies.append(body)
        if "error" in said:
            return web.json_response(said, status=400)
        last = [m for m in body["messages"] if "prompt_token_ids" in m][-1:]
        prompt = [*last[0]["prompt_token_ids"], *last[0]["generation_token_ids"], 9] if last else [1, 2]
        tokens = {"prompt_token_ids": prompt, "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -0.25]}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **said, **tokens}}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "policy"}
        return web.json_response({**head, "choices": [choice]})


@asynccontextmanager
async def serving(policy: ScriptedPolicy) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", policy.chat)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()
