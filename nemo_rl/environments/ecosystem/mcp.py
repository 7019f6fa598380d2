"""Environment `mcp`: the tools of an MCP server (modelcontextprotocol.io), called by the policy in its own syntax.

The policy is offered the server's tools; its calls go to the server, and their results come back as messages of role
`tool`; a response without a call ends the rollout. The server keeps the state, in one session per rollout.
"""

import json
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from pydantic import Field

from nemo_rl.config.entry_checks import check_agent_runner, check_call_timeout, require_package
from nemo_rl.config.environment import AgentRunnerConfig
from nemo_rl.config.images import ImagesConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.value_types import AnyText, Seconds
from nemo_rl.data.images import ImageReader
from nemo_rl.data.messages import to_image_url
from nemo_rl.environments.ecosystem.chat_client import ChatClient, converse_with_tools
from nemo_rl.environments.tools import BROKEN_TOOL
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import AgentResult, ImagePart, Prompt

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

logger = logging.getLogger(__name__)

STDERR_BYTES = 2000  # end of a failed server's stderr that is read for its failure


class McpConfig(AgentRunnerConfig):
    """An MCP server: exactly one of `command` and `url`. Rewards: `reward_tool`, else `scored_by` or `scorers`."""

    command: list[AnyText] | None = None  # a program started per rollout, which speaks MCP over stdin and stdout
    url: str | None = None  # a running server (streamable HTTP), with one session per rollout
    tools: list[str] | None = None  # tools offered to the policy; None: all except `reward_tool`
    # called at the end with the prompt's env_state and `answer`, the last text; returns the reward as a number
    reward_tool: str | None = None
    max_turns: int = Field(default=8, gt=0)  # responses of the policy
    call_timeout_s: Seconds = 30.0  # per request to the server
    max_output_chars: int = Field(default=4096, gt=0)  # per result; the rest is cut
    images: bool = False  # show the policy the images of results, such as screenshots; false: their type alone
    max_images: int = Field(default=16, gt=0, le=64)  # images shown per rollout; later ones are replaced by their type

    @property
    def shows_images(self) -> bool:
        return self.images


class McpServerError(Exception):
    """The server failed, or lacks a tool that the configuration names."""


class BrokenTool(Exception):
    """A call of the policy that its rollout's server did not answer in time, or did not survive."""


def check_mcp(key: str, section: McpConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for an incomplete address of the server, and without a parser of tool calls."""
    if (section.command is None) == (section.url is None):
        both = {"command": section.command, "url": section.url}
        raise ConfigError(key, both, "an MCP server has either a command or a url")
    if section.command is not None and not "".join(section.command[:1]).strip():
        raise ConfigError(f"{key}.command", section.command, "must begin with the name of a program")
    if section.reward_tool is not None and section.reward_tool in (section.tools or ()):
        raise ConfigError(f"{key}.tools", section.tools, f"offers {key}.reward_tool to the policy")
    if section.url is not None and not section.url.startswith(("http://", "https://")):
        raise ConfigError(f"{key}.url", section.url, "must begin with http:// or https://")
    check_call_timeout(key, section.call_timeout_s, section.timeout_s)
    if section.images and section.max_images > (limit := config.gateway.images.max_count):
        problem = f"a conversation repeats its images in each request; gateway.images.max_count is {limit}"
        raise ConfigError(f"{key}.max_images", section.max_images, problem)
    if config.gateway.tool_parser is None:
        raise ConfigError("gateway.tool_parser", None, f"{key} needs one: the policy calls tools")
    require_package(f"{key}.type", "mcp", "mcp", "mcp")
    check_agent_runner(key, section, config)


class McpAgent:
    """A tool loop against one session of the server per rollout.

    Mistakes of the policy (an unknown tool, arguments that do not fit, a tool's own error) are answered with an error
    message. A call that its rollout's own server (`command`) does not survive, or answer, ends the rollout as a wrong
    answer; a shared server (`url`) that dies or does not answer fails it.
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
            call = partial(self._call, server, offered, _Screens(section.max_images if section.images else 0))
            try:
                answer = await converse_with_tools(policy, prompt, schemas, call, max_turns=section.max_turns)
            except BrokenTool as error:
                logger.info("env.%s: a call of the policy broke its MCP server: %s", self._name, error)
                return AgentResult({self._name: 0.0} if section.reward_tool else {}, response_fault=BROKEN_TOOL)
            return AgentResult(await self._reward(prompt, server, listed, answer), answer)

    async def _call(
        self, server: "Client", tools: "Mapping[str, Tool]", screens: "_Screens", function: Mapping[str, Any]
    ) -> str | list[dict[str, Any]]:
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
            if _is_lost(error) and self._section.command is not None:
                raise BrokenTool(str(error)) from error
            if _is_lost(error):  # a shared server
                raise
            return f"error: {error}"
        text = result_text(result)[: self._section.max_output_chars]
        if result.is_error:
            return f"error: {text}"
        shown = screens.take(result)
        return [{"type": "text", "text": text}, *map(to_image_url, shown)] if shown else text

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
        """Call the reward tool with those of env_state's fields, and of `answer`, that it accepts."""
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


@asynccontextmanager
async def _connect(section: McpConfig) -> "AsyncIterator[Client]":
    """Open a session with the server; a process started for the session ends with it.

    Raises the first error that the client's task groups collect, followed by the last line of the process's stderr.
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
    """Return the first exception in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_lost(error: BaseException) -> bool:
    """Return whether the connection ended or a request timed out, instead of the server refusing a call."""
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
    """Return a result as the policy reads it: its text; other parts are replaced by their type."""
    parts: Sequence[Any] = result.content
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in parts)


class _Screens:
    """Takes the images of a rollout's results, as many as it may show."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._reader = ImageReader(ImagesConfig())

    def take(self, result: "CallToolResult") -> list[ImagePart]:
        """Return a result's images that can be shown, at most as many as a row may have by default."""
        parts = [part for part in result.content if part.type == "image"]
        found = []
        for part in parts[: min(self._room, self._reader.limits.max_count)]:
            try:
                found.append(self._reader.read(f"data:{part.mime_type};base64,{part.data}", "the result's image"))
            except DataError as error:
                logger.info("an MCP server's image is not shown: %s", error)
        self._room -= len(found)
        return found


MCP = Entry(McpConfig, make=McpAgent, check=check_mcp)
