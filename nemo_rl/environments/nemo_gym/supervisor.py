"""A script that runs a command and ends all its processes: `supervisor.py COMMAND...`, with a pipe as standard input.

Orphaned descendants of the command, in any session, become children of this process, so that all can be found. The
script ends with the command, or when the pipe is closed, by its owner or by the owner's death (SIGKILL included). Only
the standard library is imported.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
INTERRUPT_GRACE_S = 10.0  # between the interrupt and the kill
KILL_TIMEOUT_S = 20.0  # time for killed processes to disappear
POLL_INTERVAL_S = 0.2


def main() -> int:
    """Run the command until it ends or standard input is closed; return its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for ignored in (signal.SIGINT, signal.SIGHUP):  # handled by the run, which closes the pipe
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(end(command)))
    command = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        restore_signals=True,
        preexec_fn=lambda: prepare_command(libc),
    )
    while command.returncode is None and not is_closed(sys.stdin.fileno()):
        reap(command)
    return end(command)


def prepare_command(libc: ctypes.CDLL) -> None:
    """Make the command's process die with the supervisor and receive interrupts again."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for taken in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(taken, signal.SIG_DFL)


def is_closed(pipe: int) -> bool:
    """Return whether the other end is closed, after waiting POLL_INTERVAL_S for that."""
    readable, _, _ = select.select([pipe], [], [], POLL_INTERVAL_S)
    return bool(readable) and not os.read(pipe, 4096)


def reap(command: subprocess.Popen) -> None:
    """Collect the exit status of every child that has ended, the command and orphans."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == command.pid:
            command.returncode = os.waitstatus_to_exitcode(status)


def end(command: subprocess.Popen) -> int:
    """Interrupt the command, then kill what remains; return its exit status, 0 if it was ended from outside."""
    status = command.returncode
    if status is None:
        os.kill(command.pid, signal.SIGINT)
        wait_until_gone(command, INTERRUPT_GRACE_S, lambda: command.returncode is not None)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap(command)
        time.sleep(0.02)
    return 0 if status is None else (status if status >= 0 else 128 - status)


def wait_until_gone(command: subprocess.Popen, timeout_s: float, is_gone: Callable[[], bool]) -> None:
    """Wait for `is_gone`, at most `timeout_s`, and collect the exit statuses of children meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not is_gone() and time.monotonic() < deadline:
        reap(command)
        time.sleep(0.05)


def descendants(root: int) -> list[int]:
    """Return the ids of all descendants of `root` that are not zombies."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        children.setdefault(int(parent), []).append(int(entry))
        if state == "Z":
            zombies.add(int(entry))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return [pid for pid in found if pid not in zombies]


if __name__ == "__main__":
    sys.exit(main())
