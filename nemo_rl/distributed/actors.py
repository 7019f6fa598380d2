"""Objects in processes of their own: spawn one, await its methods, stream from it, kill it.

Any class may live in an actor; it need not know of Ray. A method that is `async def` runs on the actor's event loop,
any other on the actor's threads (with `max_concurrency=1` always the same thread), so that none blocks the others.
"""

import asyncio
import inspect
import re
import traceback
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import ray
import ray.exceptions

from nemo_rl.distributed.cluster import ReservedSlot, connect, use_node_interface
from nemo_rl.distributed.remote_spans import Identity, RemoteSpans, span_of_call
from nemo_rl.errors import WorkerDied, WorkerError, WorkerTimeout
from nemo_rl.tracing import current_context

FAILED_IMPORT = re.compile(r"^(?:ModuleNotFoundError|ImportError): (.+)$", re.MULTILINE)  # a line of Ray's traceback

Payload: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]  # args and kwargs


@dataclass(frozen=True, slots=True)
class _RemoteError:
    """An exception of a method, as text: exceptions themselves do not always survive pickling."""

    summary: str
    worker_traceback: str


def _describe_error(error: BaseException) -> _RemoteError:
    return _RemoteError(f"{type(error).__name__}: {error}", traceback.format_exc())


class _ActorHost:
    """Lives in the actor's process and calls the object that it was asked to make."""

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=cls.__name__)
        self._target: Any = None
        self._construction_error: _RemoteError | None = None
        use_node_interface()
        try:
            self._target = self._executor.submit(partial(cls, *args, **kwargs)).result()
        except (Exception, SystemExit) as error:  # the constructor is user code: reported to the caller of each method  # noqa: BLE001
            self._construction_error = _describe_error(error)

    async def call(self, name: str, payload: Payload) -> Any:
        if self._construction_error is not None:
            return self._construction_error
        args, kwargs = payload
        try:
            method = partial(getattr(self._target, name), *args, **kwargs)
            if inspect.iscoroutinefunction(method.func):
                return await method()
            context = copy_context()  # methods in threads belong to the call's span
            return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, method)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # raised by user code; they would end the actor  # noqa: BLE001
            return _describe_error(error)

    async def call_in_span(self, name: str, payload: Payload, caller: Identity) -> RemoteSpans:
        """Do as `call` within a span that belongs to the caller's; return the result with the spans of this process."""
        with span_of_call(name, caller):
            result = await self.call(name, payload)
        return RemoteSpans.take(result)

    async def stream(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        if self._construction_error is not None:
            yield self._construction_error
            return
        try:
            async for item in getattr(self._target, name)(*args, **kwargs):
                yield item
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # user code, as in `call`  # noqa: BLE001
            yield _describe_error(error)


class ActorHandle:
    """An object in another process. Errors there arrive as WorkerError, with the traceback of that process.

    `name` is what error messages call it.
    """

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self.name = name

    async def call(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Return the result of method `name`.

        Raises WorkerError if the method raised, WorkerTimeout after `timeout_s`, WorkerDied if the process is gone. A
        call that timed out or was cancelled here is cancelled there too if it is `async def`; a thread runs to its end.
        """
        return await self.call_with_payload(name, (args, kwargs), timeout_s=timeout_s)

    async def call_with_payload(self, name: str, payload: Any, *, timeout_s: float | None = None) -> Any:
        """Do as `call` with (args, kwargs), or with the reference that `put` returned for them."""
        context = current_context()
        if context is None:
            reference = self._actor.call.remote(name, payload)
        else:
            reference = self._actor.call_in_span.remote(name, payload, (context.trace_id, context.span_id))
        try:
            async with asyncio.timeout(timeout_s):
                result = await reference
            return self._raise_if_failed(name, result if context is None else result.add_to_trace(self.name))
        except TimeoutError as error:
            ray.cancel(reference)
            raise WorkerTimeout(f"{self.name}.{name} did not answer in {timeout_s} s") from error
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            raise self._worker_error(name, error) from error

    def call_blocking(self, name: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Do as `call`, blocking the event loop: only while a run is set up."""
        reference = self._actor.call.remote(name, (args, kwargs))
        try:
            return self._raise_if_failed(name, ray.get(reference, timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            ray.cancel(reference)
            raise WorkerTimeout(f"{self.name}.{name} did not answer in {timeout_s} s") from error
        except ray.exceptions.RayError as error:
            raise self._worker_error(name, error) from error

    async def stream(self, name: str, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Yield the items of the async generator method `name`; closing the iterator cancels it there."""
        references = self._actor.stream.options(num_returns="streaming").remote(name, args, kwargs)
        finished = False
        try:
            async for reference in references:
                yield self._raise_if_failed(name, await reference)
            finished = True
        except ray.exceptions.RayError as error:
            finished = True
            raise self._worker_error(name, error) from error
        finally:
            if not finished:
                ray.cancel(references)

    def kill(self) -> None:
        """End the process at once; calls that wait raise WorkerError."""
        ray.kill(self._actor)

    def _raise_if_failed(self, name: str, result: Any) -> Any:
        if isinstance(result, _RemoteError):
            raise WorkerError(f"{self.name}.{name} raised {result.summary}\n{result.worker_traceback}")
        return result

    def _worker_error(self, name: str, error: ray.exceptions.RayError) -> WorkerError:
        if isinstance(error, ray.exceptions.RayActorError):
            return WorkerDied(f"{self.name} has died: {_short_reason(error)}")
        return WorkerError(f"{self.name}.{name}: {_short_reason(error)}")


def put(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return arguments for `call_with_payload` of several actors, which are then sent to each machine once."""
    return ray.put((args, kwargs))


def spawn_actor(
    cls: type,
    *args: Any,
    num_cpus: float = 0,
    num_gpus: float = 0,
    max_concurrency: int = 1,
    max_restarts: int = 0,
    resources: Mapping[str, float] | None = None,
    env_vars: Mapping[str, str] | None = None,
    slot: ReservedSlot | None = None,
    num_threads: int | None = None,
    label: str | None = None,
    **kwargs: Any,
) -> ActorHandle:
    """Make `cls(*args, **kwargs)` in a process of its own and return at once.

    `num_cpus`, `num_gpus` and `resources` are set aside on the machine that it is placed on; `max_concurrency` calls
    run at once, more wait. A process that dies is restarted up to `max_restarts` times. `env_vars` are set before the
    process imports anything. `slot`: on reserved resources (distributed/cluster.py), seeing its GPUs. `num_threads`
    is that of methods that are not `async`; None: `max_concurrency`. `label` names it in error messages; None: the
    class's. An error of the constructor is raised by every call. Connects to Ray if necessary.
    """
    connect()
    env_vars = {**(slot.env_vars if slot else {}), **(env_vars or {})}
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_concurrency": max_concurrency,
        "max_restarts": max_restarts,
    }
    if resources:
        options["resources"] = dict(resources)
    if env_vars:
        options["runtime_env"] = {"env_vars": env_vars}
    if slot:
        options["scheduling_strategy"] = slot.strategy
    # Each call holds at most one thread, so with as many threads as calls they never run out.
    actor = ray.remote(_ActorHost).options(**options).remote(cls, args, kwargs, num_threads or max_concurrency)
    return ActorHandle(actor, label or cls.__name__)


def _short_reason(error: BaseException) -> str:
    """Return Ray's reason without its advice: an import that failed, how the process ended, or else its first line."""
    if failed_import := FAILED_IMPORT.search(str(error)):
        return f"its process cannot import code ({failed_import[1]}); install it, or put its directory on PYTHONPATH"
    lines = [line.strip() for line in str(error).strip().splitlines()]
    found = next((line.partition("Worker exit detail:")[2] for line in lines if "Worker exit detail:" in line), "")
    detail = found.partition("Some common causes")[0].strip()
    return detail or f"{type(error).__name__}: {lines[0] if lines else ''}"


def put_bytes(content: np.ndarray) -> Any:
    """Return a reference to a copy of `content` (uint8), which may be sent to other processes."""
    connect()
    return ray.put(content)


def get_bytes(reference: Any, timeout_s: float) -> np.ndarray:
    """Return a reference's array, read-only, without a copy on a machine that has it; raises WorkerError if lost."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        raise WorkerError(f"cannot read from the object store: {type(error).__name__}") from error
