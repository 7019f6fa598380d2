"""The environment `mcp`: the tools of an MCP server (modelcontextprotocol.io), called by the policy in its own syntax.

The loop: the policy is called with the server's tools, its calls go to the server, their results come back as messages
of role `tool`; a response without a call ends the rollout. The server keeps the state, one session a rollout.
"""

import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from pydantic import Field

from nemo_rl.config.entry_checks import check_agent_runner, check_call_timeout, require_package
from nemo_rl.config.environment import AgentRunnerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.environments.chat_client import ChatClient, converse_with_tools
from nemo_rl.errors import ConfigError
from nemo_rl.types import AgentResult, Prompt

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

STDERR_BYTES = 2000  # of a server that failed: as much as its failure quotes


class McpConfig(AgentRunnerConfig):
    """An MCP server: exactly one of `command` and `url`. Rewards: `reward_tool`, else `scored_by` or `scorers`."""

    command: list[str] | None = None  # started for each rollout, spoken to over its stdin and stdout
    url: str | None = None  # a running server (streamable HTTP); each rollout opens a session
    tools: list[str] | None = None  # those that the policy is offered; None: all but `reward_tool`
    # a tool that is called at the end with the prompt's env_state and `answer`, the last text; its number is the reward
    reward_tool: str | None = None
    max_turns: int = Field(default=8, gt=0)  # responses of the policy
    call_timeout_s: float = Field(default=30.0, gt=0)  # of one request to the server
    max_output_chars: int = Field(default=4096, gt=0)  # of one result; the rest is cut


class McpServerError(Exception):
    """The server failed, or does not have what the configuration names."""


def check_mcp(key: str, section: McpConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for a server that cannot be reached, and for tools without a parser of their calls."""
    if (section.command is None) == (section.url is None):
        both = {"command": section.command, "url": section.url}
        raise ConfigError(key, both, "an MCP server has either a command or a url")
    if section.command is not None and not section.command:
        raise ConfigError(f"{key}.command", [], "must name a program")
    if section.url is not None and not section.url.startswith(("http://", "https://")):
        raise ConfigError(f"{key}.url", section.url, "must begin with http:// or https://")
    check_call_timeout(key, section.call_timeout_s, section.timeout_s)
    if config.gateway.tool_parser is None:
        raise ConfigError("gateway.tool_parser", None, f"{key} needs one: the policy calls tools")
    require_package(f"{key}.type", "mcp", "mcp", "mcp")
    check_agent_runner(key, section, config)


class McpAgent:
    """A tool loop against one session of the server per rollout.

    What the policy does wrong (an unknown tool, arguments that do not fit, a tool's own error) is told to it; a server
    that dies or does not answer fails the rollout.
    """

    def __init__(self, name: str, section: McpConfig) -> None:
        self._name = name
        self._section = section

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        section = self._section
        async with (
            _connect(section) as server,
            ChatClient(base_url, api_key, timeout_s=section.timeout_s) as policy,
        ):
            listed = await _list_tools(server)
            offered = {name: tool for name, tool in listed.items() if self._is_offered(name, listed)}
            schemas = [to_openai_tool(tool) for tool in offered.values()]
            call = partial(self._call, server, offered)
            answer = await converse_with_tools(policy, prompt, schemas, call, max_turns=section.max_turns)
            return AgentResult(await self._reward(prompt, server, listed, answer), answer)

    async def _call(self, server: "Client", tools: "Mapping[str, Tool]", function: Mapping[str, Any]) -> str:
        from mcp import MCPError

        name = function["name"]
        if name not in tools:
            return f"error: there is no tool {name!r}; tools: {', '.join(tools)}"
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are not JSON ({error})"
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object"
        try:
            result = await server.call_tool(name, arguments)
        except MCPError as error:
            if _is_lost(error):
                raise
            return f"error: {error}"
        text = result_text(result)[: self._section.max_output_chars]
        return f"error: {text}" if result.is_error else text

    def _is_offered(self, name: str, listed: "Mapping[str, Tool]") -> bool:
        """Return whether the policy may call the tool; raises McpServerError for configured tools that are missing."""
        section = self._section
        wanted = {*(section.tools or ()), *([section.reward_tool] if section.reward_tool else ())}
        if missing := sorted(wanted - listed.keys()):
            raise McpServerError(f"the server has no tool {missing[0]!r}; tools: {', '.join(listed)}")
        return name in section.tools if section.tools is not None else name != section.reward_tool

    async def _reward(
        self, prompt: Prompt, server: "Client", listed: "Mapping[str, Tool]", answer: str | None
    ) -> dict[str, float]:
        """Call the reward tool with those of the prompt's fields, and `answer`, that it takes."""
        tool = self._section.reward_tool
        if tool is None:
            return {}
        known = listed[tool].input_schema.get("properties", {})
        fields = {**prompt.env_state, "answer": answer or ""}
        result = await server.call_tool(tool, {name: value for name, value in fields.items() if name in known})
        text = result_text(result)
        if result.is_error:
            raise McpServerError(f"reward_tool {tool!r}: {text}")
        try:
            return {self._name: float(text)}
        except ValueError as error:
            raise McpServerError(f"reward_tool {tool!r} answered {text[:80]!r}, not a number") from error


MCP = Entry(McpConfig, make=McpAgent, check=check_mcp)


@asynccontextmanager
async def _connect(section: McpConfig) -> "AsyncIterator[Client]":
    """Open a session with the server; a process that was started for it ends with it.

    Raises the first of the errors that the client's task groups collect; with what a process wrote last, if it did.
    """
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        server: Any = section.url
        if section.command is not None:
            program, *arguments = section.command
            server = stdio_client(StdioServerParameters(command=program, args=arguments), errlog=stderr)
        try:
            async with Client(server, read_timeout_seconds=section.call_timeout_s) as client:
                yield client
        except Exception as error:
            first = _innermost(error)
            if _is_lost(first) and (written := _last_line(stderr)):
                raise McpServerError(f"{first}; the server wrote: {written}") from error
            raise first from None


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    lines = file.read()[-STDERR_BYTES:].strip().splitlines()
    return lines[-1] if lines else ""


def _innermost(error: BaseException) -> BaseException:
    """Return the first exception of a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_lost(error: BaseException) -> bool:
    """Return whether the connection ended or a request timed out, rather than that the server refused a call."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

    return isinstance(error, MCPError) and error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT)


async def _list_tools(server: "Client") -> "dict[str, Tool]":
    """Return all tools of the server by name, page by page."""
    tools: dict[str, Tool] = {}
    cursor: str | None = None
    while True:
        page = await server.list_tools(cursor=cursor)
        tools.update({tool.name: tool for tool in page.tools})
        cursor = page.next_cursor
        if cursor is None:
            return tools


def to_openai_tool(tool: "Tool") -> dict[str, Any]:
    """Return a tool's schema in OpenAI's shape."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def result_text(result: "CallToolResult") -> str:
    """Return a result as the policy reads it: its texts, and the type of what is none."""
    parts: Sequence[Any] = result.content
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in parts)
