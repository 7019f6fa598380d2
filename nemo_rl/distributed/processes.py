"""Processes of this machine: whether they are idle, their end, and the end of an engine with its trainer."""

import asyncio
import contextlib
import os
import select
import signal
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

POLL_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class Activity:
    """CPU time and states of some processes; comparing two of them tells whether the processes are working."""

    cpu_ticks: int  # CPU time of all their threads
    num_stopped: int  # processes stopped by SIGSTOP


def read_activity(pids: Collection[int]) -> Activity | None:
    """Return the activity of processes of this machine, without those that have ended. Source: proc(5).

    None if no process can be read: all have ended, or this machine hides /proc.
    """
    found = [fields for pid in pids if (fields := _read_status(pid))]
    if not found:
        return None
    cpu_ticks = sum(int(fields[11]) + int(fields[12]) for fields in found)
    return Activity(cpu_ticks, num_stopped=sum(fields[0] == "T" for fields in found))


async def wait_until_idle(pids: Collection[int], limit_s: float, *, may_wait: bool = False) -> None:
    """Return once the processes have been idle for `limit_s`; never return if no process can be read at first.

    Processes are idle if they use no CPU time; if they `may_wait` for others, only if they are stopped. Only time that
    this process observes counts, so a suspended machine makes no process idle.
    """
    period, idle_s, before = min(POLL_PERIOD_S, limit_s / 4), 0.0, read_activity(pids)
    if before is None:
        await asyncio.Event().wait()
    while idle_s < limit_s:
        await asyncio.sleep(period)
        now = read_activity(pids)
        is_idle = (now is not None and now.num_stopped > 0) or (now == before and not may_wait)
        idle_s, before = (idle_s + period if is_idle else 0.0), now


def kill_children(pids: Collection[int]) -> None:
    """Kill the processes that this one, or another of them, has started; an id may have been reused by a stranger."""
    parents = {os.getpid(), *pids}
    for pid in pids:
        if (fields := _read_status(pid)) and int(fields[1]) in parents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def find_processes(variable: str, value: str) -> list[int]:
    """Return the ids of the live processes that were started with this environment variable, even if orphaned."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended, or of another user; a zombie has an empty environment
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _read_status(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; empty if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # after the name in brackets
    except OSError:
        return []


def end_with(trainer: int) -> None:
    """Kill this process, and its parent unless that is the trainer, as soon as the trainer has ended."""
    core = os.getppid()
    try:
        handle = os.pidfd_open(trainer)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # the kernel lacks it: only the death of the parent is noticed
        return

    def wait() -> None:
        select.select([handle], [], [])
        if core != trainer and os.getppid() == core:
            os.kill(core, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-trainer", daemon=True).start()
