"""A NeMo Gym stack as a script: a head server and agents over HTTP that do as real ones do, or fail as they are told.

With `front`, each agent has an environment server of that implementation, as in nemo-gym 0.7; both are one server here.

Agents call the policy at `policy_base_url` as Gym's model server does: the row's parameters are passed on, and an
assistant's message goes back with the tokens of its call. Without a policy the calls are made up.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from omegaconf import OmegaConf

from nemo_rl.environments.nemo_gym.reply import TOKEN_FIELDS
from tests.fakes.gym_items import (
    Body,
    Row,
    chat_tool,
    last_text,
    made_up_tokens,
    message_item,
    messages,
    output_items,
)

PASSED_ON = ("temperature", "top_p", "metadata", "user", "tool_choice", "parallel_tool_calls")
ADDED = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
LENGTH_WORDS = ("context length", "max_tokens")  # in a policy's 400: Gym calls the rollout truncated, not failed


@dataclass(frozen=True, slots=True)
class Script:
    """Behaviour of an agent for one row."""

    turns: int = 1  # calls of the model, a user's message between them
    reward: float | Callable[[str], float] = 1.0  # or by the last answer's text
    before: Callable[[], Awaitable[object]] | None = None  # awaited first: answers out of order, hangs
    status: int = 200  # another one answers with `text` instead of running the row
    text: str = "the script says so"
    dies: bool = False  # the agent's server stops in the midst of this row
    repeats: bool = False  # answers what it answered last
    raw: bytes | None = None  # sent in place of the reply
    alter: Callable[[Body], object] | None = None  # changes the reply in place
    adds: Body | None = None  # further fields of the reply
    failure: Body | None = None  # an episode's failure, in place of its result


class FakeGymStack:
    """Agents by name, each a server on a port of its own; `script(agent, row)` says what happens to a row."""

    def __init__(
        self,
        agents: Sequence[str] = ("agent",),
        script: Callable[[str, Row], Script] = lambda agent, row: Script(),
        *,
        policy_base_url: str | None = None,
        policy_api_key: str = "unused",
        front: str | None = None,
    ) -> None:
        self.rows: list[tuple[str, Row]] = []  # as they arrived
        self.chat_bodies: list[Body] = []  # as the policy was asked
        self.num_running = 0
        self.most_running = 0
        self.frozen: set[str] = set()  # agents that accept connections and never respond
        self.script = script
        self.policy_base_url = policy_base_url
        self.policy_api_key = policy_api_key
        self._front = front
        self._agents = {name: _Server() for name in agents}
        self._head = _Server()
        self._last: Body | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "FakeGymStack":
        self._http = aiohttp.ClientSession()
        await self.start_head()
        for name in self._agents:
            await self.start_agent(name)
        return self

    async def __aexit__(self, *details: object) -> None:
        for server in (self._head, *self._agents.values()):
            await server.stop()
        if self._http is not None:
            await self._http.close()

    @property
    def head_url(self) -> str:
        return f"http://127.0.0.1:{self._head.port}"

    def agent_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._agents[name].port}"

    async def start_head(self) -> None:
        await self._head.start([web.get("/", _alive), web.get("/global_config_dict_yaml", self._config)])

    async def stop_head(self) -> None:
        await self._head.stop()

    async def start_agent(self, name: str, *, elsewhere: bool = False) -> None:
        """Start an agent, or bring it back where it was, or `elsewhere`: on another port."""

        async def run(request: web.Request) -> web.StreamResponse:
            return await self._run(name, request)

        async def alive(request: web.Request) -> web.Response:
            if name in self.frozen:
                await asyncio.Event().wait()
            return await _alive(request)

        if elsewhere:
            self._agents[name].port = 0
        await self._agents[name].start([web.get("/", alive), web.post("/run", run)])

    async def stop_agent(self, name: str) -> None:
        """End an agent with all that it runs: its clients see their connections cut."""
        await self._agents[name].stop()

    async def _config(self, request: web.Request) -> web.Response:
        """Gym's own shape: a JSON string that holds YAML."""
        model = {"type": "responses_api_models", "name": "policy_model"}
        config: Body = {
            "config_paths": ["agents.yaml"],
            "policy_base_url": self.policy_base_url,
            # No port: as a server of another machine that the head does not know yet.
            "policy_model": {"responses_api_models": {"vllm_model": {"base_url": "${policy_base_url}"}}},
        }
        for name, server in self._agents.items():
            settings = {"host": "127.0.0.1", "port": server.port, "entrypoint": "app.py", "model_server": model}
            config[name] = {"responses_api_agents": {"simple_agent": settings}}
            if self._front is not None:
                fronting = {"host": "127.0.0.1", "port": server.port, "agent_server": {"name": name}}
                config[f"{name}_environment_server"] = {"environment_servers": {self._front: fronting}}
        return web.json_response(OmegaConf.to_yaml(OmegaConf.create(config)))

    async def _run(self, agent: str, request: web.Request) -> web.StreamResponse:
        row = await request.json()
        self.rows.append((agent, row))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._answer(agent, row)
        except PolicyFailed as error:  # as Gym's middleware: a JSON string
            return web.json_response(f"Hit an exception calling an inner server: {error}", status=500)
        finally:
            self.num_running -= 1

    async def _answer(self, agent: str, sent: Row) -> web.Response:
        row = sent["task"]["task_input"] if "episode_id" in sent else sent
        script = self.script(agent, row)
        if script.before is not None:
            await script.before()
        if script.dies:
            self._agents[agent].die()
            await asyncio.Event().wait()
        if "responses_create_params" not in row:
            return web.json_response({"detail": "responses_create_params: Field required"}, status=422)
        if script.status != 200:
            return web.json_response(script.text, status=script.status)
        body = self._last if script.repeats and self._last is not None else await self._rollout(script, row)
        self._last = body
        if script.alter is not None:
            script.alter(body)
        body = {**body, **(script.adds or {})}
        if "episode_id" in sent:
            result = None if script.failure else body
            identity = {"episode_id": sent["episode_id"], "task_id": sent["task"]["task_id"]}
            body = {**identity, "result": result, "failure": script.failure}
        return web.Response(body=script.raw or json.dumps(body).encode(), content_type="application/json")

    async def _rollout(self, script: Script, row: Row) -> Body:
        """Run the loop of Gym's agents: call, tools or a next message, call again; then the reward."""
        params = row["responses_create_params"]
        given = params["input"]
        items: list[Body] = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        output: list[Body] = []
        cut = None
        for turn in range(script.turns):
            if turn:
                output.append({"role": "user", "type": "message", "content": f"go on, {turn}"})
            said, cut = await self._call(params, [*items, *output])
            output += said
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": f"{item['name']} is done"}
                for item in said
                if item["type"] == "function_call"
            ]
            output += results
            if cut:
                break
        reward = script.reward(last_text(output)) if callable(script.reward) else script.reward
        response = {"id": "resp_1", "object": "response", "output": output, "incomplete_details": cut}
        environment = {key: value for key, value in row.items() if key not in ("responses_create_params", "agent_ref")}
        return {**environment, "responses_create_params": params, "response": response, "reward": reward}

    async def _call(self, params: Row, items: Sequence[Body]) -> tuple[list[Body], Body | None]:
        """One call of the model: the items that it becomes, and why it was cut."""
        if self.policy_base_url is None:
            return [message_item("made up", made_up_tokens(items))], None
        body = {"messages": messages(items), "model": "policy", **ADDED}
        body |= {name: params[name] for name in PASSED_ON if name in params}
        if "max_output_tokens" in params:
            body["max_tokens"] = params["max_output_tokens"]
        if params.get("tools"):
            body["tools"] = [chat_tool(tool) for tool in params["tools"]]
        body = json.loads(params.get("metadata", {}).get("extra_body", "{}")) | body
        self.chat_bodies.append(body)
        assert self._http is not None
        url, headers = f"{self.policy_base_url}/chat/completions", {"Authorization": f"Bearer {self.policy_api_key}"}
        async with self._http.post(url, json=body, headers=headers) as response:
            text, status = await response.text(), response.status
        if status == 400 and any(words in text for words in LENGTH_WORDS):
            return [message_item("", {})], {"reason": "max_output_tokens"}
        if status != 200:
            raise PolicyFailed(text)
        choice = json.loads(text)["choices"][0]
        cut = {"reason": "max_output_tokens"} if choice["finish_reason"] == "length" else None
        return output_items(choice["message"]), cut


def spell_and_play(policy_port: int) -> FakeGymStack:
    """Make an agent of one turn and one of two for the policy at this port; the reward is the answer's length."""
    return FakeGymStack(
        ("spell", "play"),
        lambda agent, row: Script(turns=2 if agent == "play" else 1, reward=lambda text: float(len(text))),
        policy_base_url=f"http://127.0.0.1:{policy_port}/v1",
    )


class PolicyFailed(Exception):
    """The policy's endpoint answered with an error."""


class _Server:
    """One HTTP server that may stop and come back."""

    def __init__(self) -> None:
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, routes: Sequence[web.RouteDef]) -> None:
        await self.stop()
        app = web.Application(client_max_size=2**28)
        app.add_routes(routes)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._stopping is not None:
            await self._stopping
            self._stopping = None
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def die(self) -> None:
        """Stop from within a request of its own."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self._stopping = asyncio.create_task(runner.cleanup())


def script_of_row(agent: str, row: Row) -> Script:
    """Return the script that a row carries in its field `script`, as keyword arguments."""
    return Script(**row.get("script", {}))


def row_of(text: str, agent: str = "agent", **fields: Any) -> Body:
    """Return a row as in Gym's datasets."""
    params = {"input": [{"role": "user", "content": text}]}
    return {"responses_create_params": params, "agent_ref": {"type": "responses_api_agents", "name": agent}, **fields}


def calls_of(body: Body) -> list[Body]:
    """Return the output items that carry tokens."""
    return [item for item in body["response"]["output"] if TOKEN_FIELDS[0] in item]


def with_nan_log_prob(body: Body) -> None:
    calls_of(body)[-1]["generation_log_probs"][0] = float("nan")


def with_other_token(body: Body) -> None:
    calls_of(body)[-1]["generation_token_ids"][0] += 1


def with_broken_prefix(body: Body) -> None:
    calls_of(body)[-1]["prompt_token_ids"][0] += 1


def with_token_missing(body: Body) -> None:
    calls_of(body)[-1]["generation_token_ids"].pop()


def without_reward(body: Body) -> None:
    del body["reward"]


def without_response(body: Body) -> None:
    del body["response"]


def masked(body: Body) -> None:
    body["mask_sample"] = True


async def _alive(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})
