"""Environment `openenv`: a server of an OpenEnv environment (package openenv-core), one session per rollout.

After `reset`, each response of the policy is the action of a `step`, whose observation is the next user message, until
the environment is done. The server keeps the state; the rollout's reward is the sum of its rewards.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.entry_checks import check_agent_runner, check_call_timeout, require_package
from nemo_rl.config.environment import AgentRunnerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.value_types import Seconds
from nemo_rl.environments.ecosystem.chat_client import ChatClient, prompt_messages
from nemo_rl.errors import ConfigError
from nemo_rl.types import AgentResult, Prompt

SCHEMES = ("http://", "https://", "ws://", "wss://")


class OpenEnvConfig(AgentRunnerConfig):
    """A running OpenEnv server. `reset` receives the prompt's `env_state.reset`, a mapping, if present."""

    url: str | None = None  # address of the server
    action_format: Literal["text", "json"] = "text"  # json: the response is a JSON object, the action
    action_field: str = "message"  # text: the action's field that holds the response
    observation_field: str | None = None  # field shown to the policy; None: the whole observation as JSON
    max_turns: int = Field(default=16, gt=0)  # responses of the policy
    call_timeout_s: Seconds = 60.0  # per request to the server


class OpenEnvError(Exception):
    """The server's answer lacks a field that the configuration names."""


def check_openenv(key: str, section: OpenEnvConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for an invalid address, and if the package is not installed."""
    if section.url is None or not section.url.startswith(SCHEMES):
        raise ConfigError(f"{key}.url", section.url, f"the server's address must begin with {', '.join(SCHEMES)}")
    check_call_timeout(key, section.call_timeout_s, section.timeout_s)
    require_package(f"{key}.type", "openenv", "openenv", "openenv")
    check_agent_runner(key, section, config)


class OpenEnvAgent:
    """The loop of one rollout. An action that is not a JSON object ends it; a server error fails it."""

    def __init__(self, name: str, section: OpenEnvConfig) -> None:
        self._name = name
        self._section = section

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]

        section = self._section
        assert section.url is not None  # check_openenv
        server = GenericEnvClient(
            section.url, connect_timeout_s=section.call_timeout_s, message_timeout_s=section.call_timeout_s
        )
        async with server, ChatClient(base_url, api_key, timeout_s=section.timeout_s) as policy:
            return await self._converse(prompt, policy, server)

    async def _converse(self, prompt: Prompt, policy: ChatClient, server: Any) -> AgentResult:
        messages = prompt_messages(prompt)
        result = await server.reset(**prompt.env_state.get("reset", {}))
        reward, answer = result.reward or 0.0, None
        for _ in range(self._section.max_turns):
            if text := self._observation_text(result.observation):
                messages.append({"role": "user", "content": text})
            reply = None if result.done else await policy.complete(messages)
            action = None if reply is None else self._action(reply.text)
            if reply is None or action is None or (reply.is_truncated and not reply.text):
                break
            answer = reply.text
            messages.append(dict(reply.message))
            result = await server.step(action)
            reward += result.reward or 0.0
        return AgentResult({} if self._section.scored_by else {self._name: reward}, answer)

    def _action(self, text: str) -> dict[str, Any] | None:
        """Return the action of a response; None if a JSON object is expected and it is something else."""
        if self._section.action_format == "text":
            return {self._section.action_field: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def _observation_text(self, observation: Mapping[str, Any]) -> str:
        field = self._section.observation_field
        if field is None:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            raise OpenEnvError(f"the observation has no {field!r}; it has {', '.join(observation)}")
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


OPENENV = Entry(OpenEnvConfig, make=OpenEnvAgent, check=check_openenv)
