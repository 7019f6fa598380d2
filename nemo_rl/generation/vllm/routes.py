"""The experts that vLLM routed the tokens of a request to, as `VllmGeneration` gets them from its engine.

n rows, L layers with experts, k experts per token.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from nemo_rl.column_arrays import id_dtype
from nemo_rl.errors import GenerationError
from nemo_rl.token_columns import NO_COLUMNS, TokenColumns, routed_experts_columns
from nemo_rl.types import GenerationRequest

if TYPE_CHECKING:
    from vllm import RequestOutput

PlainArray: TypeAlias = tuple[tuple[int, ...], str, bytes]  # shape, dtype and values: vLLM's RPC does not carry arrays


def to_plain(array: np.ndarray) -> PlainArray:
    """Return an array in types that vLLM's RPC carries."""
    return array.shape, array.dtype.str, array.tobytes()


def to_array(plain: PlainArray) -> np.ndarray:
    shape, dtype, data = plain
    return np.frombuffer(data, dtype).reshape(shape)


class RouteSource(Protocol):
    """The routes of an engine's finished requests."""

    async def start(self) -> None:
        """Let the engine record; called once, before the first request. Raises GenerationError if it cannot."""
        ...

    async def take(self, request: GenerationRequest, output: "RequestOutput") -> TokenColumns:
        """Return the column of a finished request's tokens, prompt first."""
        ...

    def drop(self, request: GenerationRequest) -> None: ...


def make_route_source(engine: Any, *, on_cpu: bool) -> RouteSource:
    """Return the source of the routes of an AsyncLLM or InProcessEngine. Use it from one event loop."""
    return RecordedRoutes(engine) if on_cpu else ReturnedRoutes(engine)


class RecordedRoutes:
    """Takes the routes that a CPU engine's worker keeps (cpu/routes.py), in one call for all requests that end
    together."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._taken: list[tuple[str, int]] = []
        self._dropped: list[str] = []
        self._call: asyncio.Task[list[np.ndarray]] | None = None  # not sent yet

    async def start(self) -> None:
        try:
            await self._engine.collective_rpc("record_routes")
        except ValueError as error:
            raise GenerationError(f"policy.router_replay: vLLM's routes cannot be recorded: {error}") from error

    async def take(self, request: GenerationRequest, output: "RequestOutput") -> TokenColumns:
        num_tokens = len(request.token_ids) + len(output.outputs[0].token_ids)
        index = len(self._taken)
        self._taken.append((request.request_id, num_tokens - 1))
        routes = (await asyncio.shield(self._next_call()))[index]  # a cancelled caller does not cancel the others' call
        return routed_experts_columns(routes, num_tokens)

    def drop(self, request: GenerationRequest) -> None:
        self._dropped.append(request.request_id)
        self._next_call().add_done_callback(_ignore_error)

    def _next_call(self) -> "asyncio.Task[list[np.ndarray]]":
        if self._call is None:
            self._call = asyncio.create_task(self._send())
        return self._call

    async def _send(self) -> list[np.ndarray]:
        await asyncio.sleep(0)  # requests that end in the same iteration of the event loop share the call
        taken, dropped = self._taken, self._dropped
        self._taken, self._dropped, self._call = [], [], None
        first, *_ = await self._engine.collective_rpc("take_routes", args=(taken, dropped))
        return [to_array(plain) for plain in first]


class ReturnedRoutes:
    """Reads the routes that vLLM returns with an answer (`enable_return_routed_experts`).

    They are those of all layers, zeros for one without experts.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._layers: list[int] = []
        self._num_experts = 0

    async def start(self) -> None:
        (self._layers, self._num_experts), *_ = await self._engine.collective_rpc("describe_experts")
        if not self._layers:
            raise GenerationError("policy.router_replay: vLLM found no experts in the model")

    async def take(self, request: GenerationRequest, output: "RequestOutput") -> TokenColumns:
        sampled = output.outputs[0]
        if sampled.routed_experts is None:
            return NO_COLUMNS
        routes = sampled.routed_experts[:, self._layers].astype(id_dtype(self._num_experts))
        return routed_experts_columns(routes, len(request.token_ids) + len(sampled.token_ids))

    def drop(self, request: GenerationRequest) -> None:
        """Do nothing: routes end with their request."""


def _ignore_error(call: "asyncio.Task[Any]") -> None:
    """Retrieve the error of a call that may never be awaited; the next request meets the dead engine itself."""
    if not call.cancelled():
        call.exception()
