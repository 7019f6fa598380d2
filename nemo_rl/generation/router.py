"""Several engine replicas as one `interfaces.Generation`: sessions are sticky, a run survives the death of a replica,
and replicas join and leave while it runs."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nemo_rl.distributed.load_balancer import MAX_SESSIONS, LoadBalancer
from nemo_rl.errors import GenerationError, summarize_error
from nemo_rl.interfaces import EnginePart, Generation, HoldsAdapters
from nemo_rl.types import Completion, FailedRequest, GenerationRequest
from nemo_rl.weight_manifests import Weights, WeightStream

logger = logging.getLogger(__name__)

CONTROL_S = 600.0  # limit for an engine to pause, load weights, sleep or wake
CLOSE_S = 60.0
MAX_REPLICAS = 1024
MAX_DEATHS = 3  # replica deaths per request; then the request is failed as the cause
RETRY_S = (10.0, 60.0)  # waits before further attempts to start a replica

Restart = Callable[[int], Awaitable[Generation]]  # starts the engine of a replica's index


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The replicas of a `ReplicatedGeneration`, by name."""

    wanted: int
    serving: tuple[str, ...]
    starting: tuple[str, ...]
    waiting: tuple[str, ...]  # started; they serve from the next refit on
    leaving: tuple[str, ...]  # get no new requests and close at the first refit at which they are idle
    failed: tuple[str, ...] = ()  # did not start; the next `resize` tries again
    problem: str = ""  # cause of the last failed start


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request in flight; `num_deaths` replicas died while serving it."""

    original: GenerationRequest
    num_deaths: int = 0

    @property
    def request(self) -> GenerationRequest:
        """Return the request to send: the same seed, and a new id on a retry, since engines refuse a known one."""
        if not self.num_deaths:
            return self.original
        return replace(self.original, request_id=f"{self.original.request_id}#{self.num_deaths}")


@dataclass(slots=True)
class GenerateCall:
    """One call of `generate`: its results in order of completion, and the tasks that produce them."""

    results: "asyncio.Queue[Completion | FailedRequest | BaseException]" = field(default_factory=asyncio.Queue)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class ReplicatedGeneration:
    """Engines with the same model. A session stays on the replica that was least busy when it began.

    A replica that raises GenerationError, or does not pause, resume or load weights in `control_s` seconds, is removed;
    its unanswered requests go to the others, with the same seed. GenerationError is raised only if no replica is left.
    With `restart`, which starts replica number `index`, a removed replica returns at the next `update_weights`, so that
    it never serves old weights, and `resize` changes their number. Use it from one event loop.
    """

    def __init__(
        self,
        engines: Sequence[Generation],
        *,
        restart: Restart | None = None,
        max_replicas: int = MAX_REPLICAS,
        control_s: float = CONTROL_S,
        max_sessions: int = MAX_SESSIONS,
        retry_s: Sequence[float] = RETRY_S,
    ) -> None:
        if not engines:
            raise ValueError("no engine")
        self._live_engines = dict(enumerate(engines))
        self._is_async = all(engine.is_async for engine in engines)  # those that follow are of the same kind
        self._wanted = set(self._live_engines)  # indices; other live replicas are leaving
        self._max_replicas = max_replicas
        self._closing: dict[int, asyncio.Task[None]] = {}
        self._load_balancer = LoadBalancer(self._live_engines, max_sessions=max_sessions)
        self._restart = restart
        self._control_s = control_s
        self._restarted: dict[int, Generation] = {}  # waiting for weights
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._retry_s = tuple(retry_s)
        self._failed: dict[int, str] = {}  # cause per replica that did not start
        self._background: set[asyncio.Task[None]] = set()
        self._last_death: GenerationError | None = None
        self._closed = False

    @property
    def replicas(self) -> tuple[Generation, ...]:
        """Return the engines that are alive."""
        return tuple(self._live_engines.values())

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Return the names of `replicas`, in their order."""
        return tuple(map(_name, self._live_engines))

    @property
    def state(self) -> ReplicaState:
        """Return which replicas serve, start, wait and leave, and which did not start."""
        groups = (
            self._load_balancer.members,
            self._starting.keys() & self._wanted,
            self._restarted.keys(),
            (self._live_engines.keys() | self._closing.keys()) - self._wanted,
            self._failed.keys(),
        )
        named = (tuple(map(_name, sorted(group))) for group in groups)
        return ReplicaState(len(self._wanted), *named, problem=next(reversed(self._failed.values()), ""))

    def resize(self, count: int) -> None:
        """Change the number of replicas: new ones start in the background and serve from the next refit; surplus ones
        get no new requests, answer those in flight, close at the next refit.

        Raises ValueError for an impossible number and then changes nothing.
        """
        if self._restart is None and count > len(self._live_engines):
            raise ValueError(f"{count} engine replicas: none can be started; at most {len(self._live_engines)}")
        if not 1 <= count <= self._max_replicas:
            raise ValueError(f"{count} engine replicas: must be from 1 to {self._max_replicas}")
        serving = set(self._load_balancer.members)
        kept = sorted(self._wanted, key=lambda index: (index not in serving, index))[:count]
        leaving = sorted(self._live_engines.keys() - self._wanted)
        unused = (index for index in range(self._max_replicas) if index not in kept and index not in leaving)
        self._wanted = set(kept)
        self._failed.clear()
        for index in itertools.islice(itertools.chain(leaving, unused), count - len(kept)):
            self._wanted.add(index)
        for index in self._starting.keys() - self._wanted:
            self._starting.pop(index).cancel()
        for index in serving - self._wanted:
            self._load_balancer.remove(index)
        for index in self._wanted.intersection(leaving):  # has loaded all weights
            self._load_balancer.add(index)
        for index in self._wanted - self._live_engines.keys() - self._restarted.keys() - self._starting.keys():
            self._start_in_background(index)

    @property
    def is_async(self) -> bool:
        return self._is_async

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        call = GenerateCall()
        try:
            self._dispatch([Attempt(request) for request in requests], call)
            for _ in requests:
                result = await call.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            for task in call.tasks:
                task.cancel()
            await asyncio.gather(*call.tasks, return_exceptions=True)

    def _dispatch(self, attempts: Sequence[Attempt], call: GenerateCall) -> None:
        """Start each attempt on its session's replica, with one engine call per replica."""
        if self._closed or not self._load_balancer.has_members:
            raise self._no_replica_error()
        parts: dict[int, list[Attempt]] = {}
        for attempt in attempts:
            parts.setdefault(self._load_balancer.acquire(attempt.original.session_id), []).append(attempt)
        for index, part in parts.items():
            waiting = {attempt.request.request_id: attempt for attempt in part}
            task = asyncio.create_task(self._serve(index, self._live_engines[index], waiting, call))
            call.tasks.add(task)
            task.add_done_callback(call.tasks.discard)
            task.add_done_callback(partial(self._release_unanswered, index, waiting))

    def _release_unanswered(self, index: int, waiting: Mapping[str, Attempt], _: asyncio.Task[None]) -> None:
        """Release requests of a replica that died, or whose task was cancelled because a request was late."""
        for attempt in waiting.values():
            self._load_balancer.release(index)
            self._load_balancer.forget(attempt.original.session_id)

    async def _serve(self, index: int, engine: Generation, waiting: dict[str, Attempt], call: GenerateCall) -> None:
        """Send the attempts in `waiting`, by id, to `engine`, which is replica `index`, and remove answered ones;
        re-dispatch the rest if the replica dies."""
        attempts = list(waiting.values())
        try:
            async with aclosing(engine.generate([a.request for a in attempts])) as results:  # type: ignore[type-var]
                async for result in results:
                    attempt = waiting.pop(result.request_id)
                    self._load_balancer.release(index)
                    if (
                        isinstance(result, FailedRequest) and not result.is_too_long
                    ):  # a retry may succeed on another replica
                        self._load_balancer.forget(attempt.original.session_id)
                    call.results.put_nowait(replace(result, request_id=attempt.original.request_id))
            if waiting:
                raise GenerationError(f"no result for {len(waiting)} of {len(attempts)} requests")
        except GenerationError as error:
            self._remove_replica(index, engine, error)
            self._retry(list(waiting.values()), error, call)
        except Exception as error:  # a bug: raised to the caller of `generate`  # noqa: BLE001
            call.results.put_nowait(error)

    def _retry(self, attempts: Sequence[Attempt], error: GenerationError, call: GenerateCall) -> None:
        again = []
        for attempt in attempts:
            if attempt.num_deaths + 1 < MAX_DEATHS:
                again.append(replace(attempt, num_deaths=attempt.num_deaths + 1))
            else:
                cause = f"{MAX_DEATHS} engine replicas died while they had it; the last: {summarize_error(error)}"
                call.results.put_nowait(FailedRequest(attempt.original.request_id, cause))
        try:
            if again:
                self._dispatch(again, call)
        except GenerationError as no_replica:
            call.results.put_nowait(no_replica)

    def _remove_replica(self, index: int, engine: Generation, error: GenerationError) -> None:
        """Remove a dead engine, once; close it, and start another in its place if `restart` is given."""
        if self._live_engines.get(index) is not engine or self._closed:
            return
        del self._live_engines[index]
        self._load_balancer.remove(index)
        self._last_death = error
        if not self._load_balancer.members:  # keep serving with replicas that were to leave
            for other in self._live_engines:
                self._load_balancer.add(other)
        logger.warning(
            "removed engine replica %d; %d of %d still serving: %s",
            index,
            len(self._load_balancer.members),
            len(self._wanted),
            summarize_error(error),
        )
        if self._restart is None or index not in self._wanted:
            self._close_in_background(index, engine)
        else:
            self._start_in_background(index, instead_of=engine)

    def _close_in_background(self, index: int, engine: Generation) -> None:
        task = self._spawn_background(close_with_deadline(engine, CLOSE_S))
        self._closing[index] = task
        task.add_done_callback(lambda _: self._closing.pop(index) if self._closing.get(index) is task else None)

    def _start_in_background(self, index: int, *, instead_of: Generation | None = None) -> None:
        task = self._spawn_background(self._start(index, instead_of))
        self._starting[index] = task
        task.add_done_callback(lambda _: self._starting.pop(index) if self._starting.get(index) is task else None)

    async def _start(self, index: int, instead_of: Generation | None) -> None:
        assert self._restart is not None  # checked by the callers
        if instead_of is not None:
            await close_with_deadline(instead_of, CLOSE_S)
        if closing := self._closing.get(index):  # it frees its devices when it has closed
            await asyncio.wait([closing])
        what = "start" if instead_of is None else "restart"
        for retry_s in (*self._retry_s, None):
            try:
                self._restarted[index] = await self._restart(index)
            except Exception as error:  # any cause: the others keep serving without it  # noqa: BLE001
                cause = summarize_error(error)
            else:
                logger.info("engine replica %d has started; it serves from the next refit on", index)
                return
            if retry_s is None:
                logger.warning("cannot %s engine replica %d, given up: %s", what, index, cause)
                self._failed[index] = cause
            else:
                logger.warning("cannot %s engine replica %d, next attempt in %g s: %s", what, index, retry_s, cause)
                await asyncio.sleep(retry_s)

    def _spawn_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _no_replica_error(self) -> GenerationError:
        if self._closed:
            return GenerationError("the engines are closed")
        return GenerationError(f"no engine replica is left of {len(self._wanted)}; the last: {self._last_death}")

    async def pause(self, *, keep_cache: bool = False) -> None:
        """Pause all replicas, for a refit."""
        await self.begin_refit()
        await self._for_all_engines(lambda engine: engine.pause(keep_cache=keep_cache))

    async def begin_refit(self) -> None:
        """Let started replicas join, to load weights with the others before they serve, and close idle ones that leave,
        so that the members of a refit stay the same."""
        joined, self._restarted = self._restarted, {}
        self._live_engines.update(joined)
        kept = self._wanted.union(self._load_balancer.members)
        for index in self._live_engines.keys() - kept:
            if self._load_balancer.work_of(index):
                continue
            self._close_in_background(index, self._live_engines.pop(index))
            logger.info("engine replica %d has left; %d are left", index, len(self._live_engines))

    async def resume(self) -> None:
        await self._for_all_engines(lambda engine: engine.resume())

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        """Load weights into all replicas; restarted ones serve from here on."""
        await self._load(manifest, lambda engine, own: engine.update_weights(own, weight_version))

    async def load_adapter(self, manifest: Weights, weight_version: int) -> None:
        """Load an adapter into all replicas, which hold adapters if one does; restarted ones serve from here on."""

        async def load(engine: Generation, own: Weights) -> None:
            assert isinstance(engine, HoldsAdapters)
            await engine.load_adapter(own, weight_version)

        await self._load(manifest, load)

    async def _load(self, manifest: Weights, load: Callable[[Generation, Weights], Awaitable[None]]) -> None:
        async def load_own(engine: Generation) -> None:
            own = manifest
            if isinstance(manifest, WeightStream):
                index = next(i for i, each in self._live_engines.items() if each is engine)
                own = replace(manifest, engine=_name(index))
            await load(engine, own)

        await self._for_all_engines(load_own)
        for index in self._wanted & self._live_engines.keys() - set(self._load_balancer.members):
            self._load_balancer.add(index)

    async def sleep(self, *, discards_weights: bool = False) -> None:
        await self._for_all_engines(lambda engine: engine.sleep(discards_weights=discards_weights))

    async def wake(self, *parts: EnginePart) -> None:
        await self._for_all_engines(lambda engine: engine.wake(*parts))

    async def _for_all_engines(self, control: Callable[[Generation], Awaitable[None]]) -> None:
        """Await `control` on all live replicas, then re-raise the first error other than a replica death."""

        async def on_one(index: int, engine: Generation) -> None:
            try:
                async with asyncio.timeout(self._control_s):
                    await control(engine)
            except TimeoutError:
                self._remove_replica(index, engine, GenerationError(f"did not answer within {self._control_s:g} s"))
            except GenerationError as error:
                self._remove_replica(index, engine, error)

        outcomes = await asyncio.gather(
            *(on_one(index, engine) for index, engine in self._live_engines.items()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if not self._live_engines:
            raise self._no_replica_error()

    async def close(self) -> None:
        """Close all replicas and warn about those that do not close in time. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        engines = [*self._live_engines.values(), *self._restarted.values()]
        await asyncio.gather(*(close_with_deadline(engine, CLOSE_S) for engine in engines))
        self._live_engines.clear()
        self._restarted.clear()


def _name(index: int) -> str:
    return f"engine {index}"


async def close_with_deadline(engine: Generation, deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            await engine.close()
    except TimeoutError:
        logger.warning("an engine did not end within %g s", deadline_s)
    except GenerationError as error:
        logger.warning("an engine did not close cleanly: %s", summarize_error(error))


async def start_engines(start: Restart, count: int) -> list[Generation]:
    """Start all engines together; if one does not start, close the others and raise its error."""
    outcomes = await asyncio.gather(*(start(index) for index in range(count)), return_exceptions=True)
    started = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not failed:
        return started
    await asyncio.gather(*(engine.close() for engine in started), return_exceptions=True)
    raise GenerationError(f"{len(failed)} of {count} engine replicas did not start: {failed[0]}") from failed[0]
