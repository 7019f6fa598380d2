"""User code on the event loop of a run: what would end the run fails the rollout instead.

`contain_exit` runs user code. `sys.exit` and KeyboardInterrupt become a UserExitError anywhere; on a UserCodeLoop so do
`loop.stop()` and the cancellation of tasks that user code did not make. Nothing catches `os._exit`, `abort` or a signal
to the own process; observability/user_code_record.py names the function then.
"""

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Coroutine, Iterable
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from nemo_rl.errors import UserExitError
from nemo_rl.observability.user_code_record import USER_CODE

ResultT = TypeVar("ResultT")
ON_SIGINT = "_on_sigint"  # asyncio's own handler of Ctrl-C
# the task that runs user code; tasks and callbacks made by user code inherit the value
_owner: ContextVar["asyncio.Task[Any] | None"] = ContextVar("user_code_owner", default=None)


class UserCodeLoop(asyncio.SelectorEventLoop):
    """The event loop of a run: user code can neither stop it nor cancel tasks of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_make_task)

    def stop(self) -> None:
        if _owner.get() is not None:
            raise UserExitError("user code called loop.stop(), which ends no run")
        super().stop()


class _Task(asyncio.Task[Any]):
    """A task that user code can cancel only if it runs in it or has made it."""

    is_made_by_user_code = False
    num_run_cancels = 0  # cancellations by others than user code

    def cancel(self, msg: Any | None = None) -> bool:
        owner = _owner.get()
        if owner is None or sys._getframe(1).f_code.co_name == ON_SIGINT:
            self.num_run_cancels += 1
        elif self is not owner and not self.is_made_by_user_code:
            raise UserExitError("user code cancelled a task that it did not make, which ends no run")
        return super().cancel(msg)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task = _Task(work, loop=loop, context=context)
    if (_owner.get() if context is None else context.get(_owner)) is not None:
        task.is_made_by_user_code = True
    return task


async def contain_exit(work: Awaitable[ResultT], user_code: str = "") -> ResultT:
    """Return the result of user code; what it does to end the run is raised as a UserExitError.

    That is `sys.exit`, KeyboardInterrupt, and on a UserCodeLoop the cancellation of its own task. A real Ctrl-C passes:
    it reaches a task as a cancellation, or as the interrupt of asyncio's or Python's own signal handler. `user_code`
    names the code for USER_CODE; empty: it is the project's.
    """
    task = asyncio.current_task()
    before = (task.cancelling(), task.num_run_cancels) if isinstance(task, _Task) else None
    token = _owner.set(task)
    if user_code:
        USER_CODE.begin(user_code)
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and _is_from_signal(error):
            raise
        raise UserExitError(describe_exit(error)) from error
    finally:
        if user_code:
            USER_CODE.end(user_code)
        try:  # contextlib.suppress would take a third of this function's time  # noqa: SIM105
            _owner.reset(token)
        except ValueError:  # an abandoned coroutine is closed in another context
            pass
        if before is not None and isinstance(task, _Task) and before != (task.cancelling(), task.num_run_cancels):
            await _refuse_own_cancellation(task, *before)


async def _refuse_own_cancellation(task: _Task, num_cancelling: int, num_run_cancels: int) -> None:
    """Take back a cancellation by user code of the task that it runs in, and raise UserExitError for it."""
    if task.num_run_cancels != num_run_cancels or task.cancelling() <= num_cancelling:
        return
    while task.cancelling() > num_cancelling:
        task.uncancel()
    try:
        await asyncio.sleep(0)  # where it arrives if it has not yet
    except asyncio.CancelledError:
        if task.num_run_cancels != num_run_cancels:
            raise
    raise UserExitError("user code cancelled its own task, which ends no run")


async def gather_apart(work: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Return the results of tasks that are the run's, not user code's, although it may call this."""
    context = copy_context()
    context.run(_owner.set, None)
    return list(await asyncio.gather(*(asyncio.create_task(one, context=context.copy()) for one in work)))


def describe_exit(error: BaseException) -> str:
    """Describe a SystemExit or KeyboardInterrupt raised by user code, as the cause of a failure."""
    return f"user code raised {type(error).__name__}({', '.join(map(repr, error.args))}), which ends no run"


def name_user_code(target: object) -> str:
    """Return the dotted path of a user's function, or of the class of a user's object; empty for the project's own.

    Example: "rewards:short".
    """
    named = target if hasattr(target, "__qualname__") else type(target)
    module = str(named.__module__)
    return "" if module.startswith("nemo_rl.") else f"{module}:{getattr(named, '__qualname__', '')}"


def _is_from_signal(error: KeyboardInterrupt) -> bool:
    """Return whether a handler of SIGINT raised it: asyncio's is its last frame, Python's own leaves none."""
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or frames[-1].name == ON_SIGINT or "raise KeyboardInterrupt" not in (frames[-1].line or "")
