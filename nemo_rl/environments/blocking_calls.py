"""Blocking calls of user code on threads, off the event loop."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from nemo_rl.distributed.machine import compute_in_turn
from nemo_rl.environments.user_code import describe_exit
from nemo_rl.errors import UserExitError
from nemo_rl.observability.user_code_record import USER_CODE

ResultT = TypeVar("ResultT")
IDLE_THREAD_S = 10.0
ADD_THREADS_S = 0.001
_Outcome: TypeAlias = tuple[Any, BaseException | None]  # a result, or the exception


@dataclass(slots=True, eq=False)
class _BlockingCall:
    function: Callable[[], Any]
    result: asyncio.Future[Any]
    has_ended: bool = False  # and the event loop has seen it
    is_abandoned: bool = False  # cancelled or timed out while its thread makes it


class BlockingCalls:
    """At most `max_concurrency` blocking calls at once; further calls wait for a slot. For one event loop at a time.

    Daemon threads make the calls: one makes all of them in turn as long as they are quick. While some wait, another
    thread is added every ADD_THREADS_S, or one per waiting call if none has ended meanwhile. So a hundred
    quick calls, whose Python runs one at a time anyway, do not wake a hundred threads. A thread ends when no call has
    come for IDLE_THREAD_S, and unlike an executor's it is not joined when the interpreter exits.

    A call that is cancelled or times out leaves its thread running, since a thread cannot be stopped, and frees its
    slot. Each call has an empty `contextvars` context, but what it sets for its thread (torch's grad mode,
    `threading.local`) stays for that thread's later calls.

    Consumes: calls of `run`. Produces: results, through futures, several to one callback of the event loop. An idle
    thread waits until the event loop sends it a message; the event loop is told that calls have ended.
    """

    def __init__(self, name: str, max_concurrency: int, *, user_code: str = "") -> None:
        """`user_code`: the name of the user's functions for USER_CODE; empty: they are the project's."""
        self._name = name
        self._user_code = user_code
        self._max_concurrency = max_concurrency
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(max_concurrency)
        self._waiting: deque[_BlockingCall] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle: list[SimpleQueue[None]] = []  # one per idle thread, the last used first
        self._ended: deque[tuple[_BlockingCall, _Outcome]] = deque()
        self._num_ended = 0
        self._num_abandoned = 0
        self._is_loop_told = False  # the loop will look at `_ended`
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[[], ResultT], *, timeout_s: float | None = None) -> ResultT:
        """Return the function's result or raise its exception; raise TimeoutError `timeout_s` after it got a slot."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # calls of an earlier loop will never run
            self._loop, self._slots = loop, asyncio.Semaphore(self._max_concurrency)
            self._timer, self._is_loop_told = None, False
        async with self._slots:
            call = _BlockingCall(function, loop.create_future())
            deadline = asyncio.timeout(timeout_s)
            try:
                self._start(call)
                async with deadline:
                    return await call.result
            except TimeoutError as error:
                if deadline.expired():
                    raise TimeoutError(f"no answer in {timeout_s:g} s") from error
                raise
            finally:
                if not call.result.done() or call.result.cancelled():
                    self._abandon(call)

    # ---- on the event loop

    def _start(self, call: _BlockingCall) -> None:
        self._waiting.append(call)
        if len(self._idle) + self._num_abandoned >= len(self._threads):  # none will look for a call soon
            self._add_thread()
        elif self._timer is None:
            self._set_timer()

    def _abandon(self, call: _BlockingCall) -> None:
        if call.has_ended:
            return
        try:
            self._waiting.remove(call)
        except ValueError:  # a thread makes it
            call.is_abandoned = True
            self._num_abandoned += 1

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(ADD_THREADS_S, self._add_threads, self._num_ended)

    def _add_threads(self, num_ended: int) -> None:
        """Add threads for the calls that wait, for 1 ms at most: each start waits until the new thread has had the GIL.

        If the system refuses one, the existing threads make the calls.
        """
        self._timer = None
        if not self._waiting:
            return
        self._set_timer()
        wanted = 1 if self._num_ended > num_ended else len(self._waiting)
        end = time.perf_counter() + ADD_THREADS_S
        with contextlib.suppress(RuntimeError):
            while wanted and self._waiting and time.perf_counter() < end:
                self._add_thread()
                wanted -= 1

    def _add_thread(self) -> None:
        """Wake an idle thread or start one; raises RuntimeError if the system refuses."""
        try:
            self._idle.pop().put(None)
        except IndexError:
            thread = threading.Thread(target=self._run_thread, name=self._name, daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:
                self._threads.discard(thread)
                raise

    def _tell_callers(self) -> None:
        self._is_loop_told = False
        while self._ended:
            call, (result, error) = self._ended.popleft()
            self._num_ended += 1
            call.has_ended = True
            self._num_abandoned -= call.is_abandoned
            if call.result.done() or call.result.get_loop() is not self._loop:
                continue
            if error is None:
                call.result.set_result(result)
            else:
                call.result.set_exception(error)

    # ---- on the threads

    def _run_thread(self) -> None:
        messages: SimpleQueue[None] = SimpleQueue()
        while True:
            self._make_calls()
            self._idle.append(messages)
            if self._waiting and self._leave_idle(messages):  # a call came meanwhile
                continue
            try:
                messages.get(timeout=IDLE_THREAD_S)
            except Empty:
                if self._leave_idle(messages):
                    self._threads.discard(threading.current_thread())
                    return
                messages.get()  # it is on its way

    def _leave_idle(self, messages: "SimpleQueue[None]") -> bool:
        """Return whether this thread was idle still; else a message is on its way."""
        try:
            self._idle.remove(messages)
        except ValueError:
            return False
        return True

    def _make_calls(self) -> None:
        while True:
            try:
                call = self._waiting.popleft()
            except IndexError:
                return
            self._ended.append((call, _call(call.function, self._user_code)))
            del call  # while the thread waits, what it holds would stay alive
            self._tell_loop()

    def _tell_loop(self) -> None:
        if self._is_loop_told or self._loop is None:
            return
        self._is_loop_told = True
        try:
            self._loop.call_soon_threadsafe(self._tell_callers)
        except RuntimeError:  # the loop is closed, so no caller waits
            self._is_loop_told = False


def _call(function: Callable[[], Any], user_code: str) -> _Outcome:
    """Call the function in an empty context."""
    if user_code:
        USER_CODE.begin(user_code)
    try:
        return Context().run(compute_in_turn, function), None
    except StopIteration as error:  # no future of asyncio takes it: its caller would wait forever
        raised = RuntimeError("user code raised StopIteration").with_traceback(error.__traceback__)
        raised.__cause__ = error
        return None, raised
    except Exception as error:  # returned to the caller, who raises it  # noqa: BLE001
        return None, error
    except BaseException as error:  # SystemExit and the like; a thread never receives a Ctrl-C  # noqa: BLE001
        return None, UserExitError(describe_exit(error)).with_traceback(error.__traceback__)
    finally:
        if user_code:
            USER_CODE.end(user_code)
