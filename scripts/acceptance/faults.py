"""The faults of chaos.py: which process each hits, what is done to it, and what followed."""

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from supervised_run import Run, is_alive
from survival import Fault

SAVE_DEADLINE_S = 60.0  # for a save to begin, where a fault waits for one
DAY_S = 86400
TITLES = {  # words of the title or command of processes below the driver
    "rank": ("ray::_ActorHost",),
    "ray head": ("gcs_server",),
    "raylet": ("raylet/raylet",),
    "engine core": ("EngineCore",),
}
GYM_SERVERS = {  # names in the configuration of the stack
    "gym agent": ("reasoning_gym_simple_agent", "mcqa_simple_agent"),
    "gym resources server": ("reasoning_gym", "mcqa"),
    "gym model server": ("policy_model",),
}
GYM_SERVER_VARIABLE = "NEMO_GYM_CONFIG_PATH"  # in the environment of a server's process: its name
GYM_SUPERVISOR = "nemo_gym/supervisor.py"


def find(processes: Sequence[psutil.Process], *names: str) -> list[psutil.Process]:
    """Return the processes whose title or command holds one of the names."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            title = " ".join([process.name(), *process.cmdline()])
            if any(name in title for name in names):
                found.append(process)
    return found


def find_gym_servers(processes: Sequence[psutil.Process], *names: str) -> list[psutil.Process]:
    """Return the processes of the stack's servers of these names."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.environ().get(GYM_SERVER_VARIABLE) in names:
                found.append(process)
    return found


def gym_stack(run: Run) -> list[psutil.Process]:
    """Return all processes of the stack: its supervisor, Gym's own process (the head server), and all below."""
    with contextlib.suppress(psutil.Error):
        for supervisor in find(run.family(), GYM_SUPERVISOR):
            return [supervisor, *supervisor.children(), *supervisor.children(recursive=True)]
    return []


def victims(run: Run, kind: str, choice: random.Random) -> list[psutil.Process]:
    """Return the processes that a fault of this kind hits; empty where they are not there now."""
    base = kind.removesuffix(" stopped").removesuffix(" at its start").removesuffix(" in a save")
    if base == "supervisor":
        return [psutil.Process(run.process.pid)]
    driver = run.driver
    if driver is None:
        return []
    if base == "driver":
        return [driver]
    if base == "preloader":
        with contextlib.suppress(psutil.Error):
            return [driver.parent() or driver]
        return []
    if base == "gym stack":
        return gym_stack(run)
    if base == "gym head":
        return gym_stack(run)[1:2]
    if base in GYM_SERVERS:
        found = find_gym_servers(run.family(), *GYM_SERVERS[base])
    else:
        found = find(run.family(), *TITLES[base])
    return [choice.choice(found)] if found else []


def inflict(run: Run, kind: str, choice: random.Random) -> Fault:
    """Inflict one fault and wait until the run has recovered from it."""
    fault = Fault(kind, time.monotonic(), load=os.getloadavg()[0])
    if kind == "disk full":
        with full_disk(run.checkpoints):
            time.sleep(choice.uniform(0.5, 2.0))
        return fault
    if kind == "half-open connections":
        with half_open_connections(run):
            time.sleep(choice.uniform(0.5, 2.0))
        return fault
    if kind == "clock jump":
        run.shift_clock(choice.randint(-DAY_S, DAY_S))
        return fault
    if kind.endswith("in a save"):
        run.wait_until(lambda: list(run.checkpoints.glob("tmp_step_*")), SAVE_DEADLINE_S)
    if kind.endswith("at its start"):
        kill_driver_and_wait_for_start(run, choice)
    family = run.family()
    hit = victims(run, kind, choice)
    if not hit:
        fault.skipped = "no such process now"
        return fault
    fault.at = time.monotonic()
    for process in hit:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP if kind.endswith("stopped") else signal.SIGKILL)
    if kind == "supervisor":
        run.restart_supervisor()
    _measure(run, fault)
    fault.orphans = sum(is_alive(process) for process in family)
    return fault


def kill_driver_and_wait_for_start(run: Run, choice: random.Random) -> None:
    """Return at a random moment of the next start: while it imports, loads, or resumes."""
    before = time.monotonic()
    if (driver := run.driver) is not None:
        driver.kill()
        run.wait_until(lambda: run.events("started", before) and run.driver not in (None, driver))
        time.sleep(choice.uniform(0.0, 2.0))


def _measure(run: Run, fault: Fault) -> None:
    """Wait for the next start and its first step; record when the death was noticed and the run had recovered."""
    if not run.wait_until(lambda: run.events("started", fault.at)):
        return
    noticed = run.events("died", fault.at) or run.events("started", fault.at)
    fault.noticed_s = noticed[0]["monotonic_s"] - fault.at
    if run.wait_until(lambda: run.events("training", fault.at)):
        fault.training_s = run.events("training", fault.at)[0]["monotonic_s"] - fault.at
        first = run.events("training", fault.at)[0]["step"]
        if run.wait_until(lambda: run.heartbeat.get("step", -1) > first):
            fault.recovered_s = time.monotonic() - fault.at
            with contextlib.suppress(psutil.Error):
                times = run.driver.cpu_times() if run.driver else None
                fault.cpu_s = times and times.user + times.system


@contextlib.contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """Fill the file system of a directory, which must be small: the run's own tmpfs."""
    filler = directory / "filler"
    try:
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def half_open_connections(run: Run, count: int = 50) -> Iterator[None]:
    """Hold connections to every listening socket of the driver, each with half a request."""
    driver, opened = run.driver, []
    ports = {c.laddr.port for c in driver.net_connections("tcp") if c.status == psutil.CONN_LISTEN} if driver else set()
    with contextlib.ExitStack() as stack:
        for port in ports:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)))
                    opened[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1000\r\n")
        yield
