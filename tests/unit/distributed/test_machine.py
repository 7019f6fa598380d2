import asyncio
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl.distributed import machine as ports
from nemo_rl.distributed.machine import (
    kill_children,
    max_connections,
    raise_file_limit,
    read_activity,
    unused_port,
    unused_ports,
)

LOWER_THEN_RAISE = """
import resource
from nemo_rl.distributed.machine import raise_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
print(raise_file_limit() > 100, resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100)
"""


def test_the_soft_limit_is_raised_to_the_hard_one():
    done = subprocess.run([sys.executable, "-c", LOWER_THEN_RAISE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize(("limits", "wanted"), [((100, 500), 500), ((100, resource.RLIM_INFINITY), 2**20)])
def test_a_limit_that_may_not_be_raised_stays(monkeypatch, caplog, limits, wanted):
    asked = []

    def refuse(kind: int, pair: tuple[int, int]) -> None:
        asked.append(pair)
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 100
    assert asked == [(wanted, limits[1])]
    assert "stays at 100: not allowed" in caplog.text


def test_a_limit_at_its_end_is_left_alone(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (500, 500))
    monkeypatch.setattr(resource, "setrlimit", None)
    assert raise_file_limit() == 500


def test_a_connection_takes_two_files_and_some_are_kept_for_others():
    assert [max_connections(limit) for limit in (1024, 258, 100, 0)] == [384, 1, 1, 1]


def kernels(monkeypatch: pytest.MonkeyPatch, directory: Path, text: str) -> None:
    (directory / "range").write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL_PORT_RANGE", directory / "range")


def test_ports_differ_and_are_none_of_the_kernels_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels(monkeypatch, tmp_path, "20050\t60999\n")
    state = random.getstate()
    found = unused_ports(10)
    assert len(set(found)) == 10
    assert all(20_000 <= port < 20_050 for port in found)
    assert random.getstate() == state


def test_a_port_that_somebody_has_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels(monkeypatch, tmp_path, "60000 60999")
    taken, other = unused_ports(2)
    monkeypatch.setattr(ports, "_candidate_ports", lambda: [other, taken])  # the last is tried first
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        assert unused_port() == other


@pytest.mark.parametrize("text", ["1024 65535", "none"])
def test_where_the_kernels_begin_below_or_are_unknown_there_is_a_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    kernels(monkeypatch, tmp_path, text)
    assert unused_port() > 1023


CORE_AND_WORKER = """
import os, subprocess, sys, time
WORKER = '''
import sys, time
from nemo_rl.distributed.machine import end_with
end_with(int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
'''
if sys.argv[1:] == ["core"]:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(os.getppid())])
    print("core", os.getpid(), worker.pid, flush=True)
else:
    subprocess.Popen([sys.executable, sys.argv[1], "core"])
time.sleep(600)
"""


def test_an_engines_core_and_worker_end_with_a_trainer_that_is_killed(tmp_path: Path):
    """The trainer starts the core, and the core's executor the worker."""
    script = tmp_path / "script.py"
    script.write_text(CORE_AND_WORKER)
    trainer = subprocess.Popen([sys.executable, script, script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    lines = sorted([trainer.stdout.readline(), trainer.stdout.readline()])
    core = lines[0].split()[1]
    assert lines[1] == "up\n"
    assert Path(f"/proc/{core}").exists()
    trainer.kill()
    assert trainer.stdout.read() == ""  # returns once all who hold the pipe, core and worker too, have ended
    trainer.wait()
    trainer.stdout.close()


COMPUTE_AND_RELEASE = """
import os, threading, time
import torch
from nemo_rl.distributed.machine import release_openmp_threads

def count():
    return len(os.listdir("/proc/self/task"))

def wait_for(number):
    deadline = time.monotonic() + 30
    while count() > number and time.monotonic() < deadline:
        time.sleep(0.01)
    return count()

torch.set_num_threads(2)
number = torch.get_num_threads()
release_openmp_threads()  # before any work: there is nothing to give up
before = count()
values = torch.ones(1 << 20)
values.mul_(3)
during = count()
release_openmp_threads()
assert torch.get_num_threads() == number == 2
after = wait_for(before)
again = values.sum().item()
print(before, during, after, again)
"""


def test_openmp_threads_are_given_up_and_made_again_at_the_next_work() -> None:
    done = subprocess.run([sys.executable, "-c", COMPUTE_AND_RELEASE], capture_output=True, text=True, check=True)
    before, during, after, again = map(float, done.stdout.split())
    assert during == before + 1  # the team of two has one thread beside its own
    assert after == before
    assert again == 3 * 2**20


def test_activity_is_that_of_the_processes_named() -> None:
    program = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as busy, subprocess.Popen(["sleep", "600"]) as idle:
        try:
            ticks = cpu_ticks_of(busy.pid)
            while cpu_ticks_of(busy.pid) <= ticks:  # of a loaded machine too
                time.sleep(0.01)
            os.kill(idle.pid, signal.SIGSTOP)
            while num_stopped_of(idle.pid, busy.pid) == 0:
                time.sleep(0.01)
            assert num_stopped_of(idle.pid) == 1
        finally:
            kill_children([busy.pid, idle.pid])
            assert [busy.wait(), idle.wait()] == [-signal.SIGKILL] * 2
    assert read_activity([busy.pid, idle.pid]) is None  # they have ended


def cpu_ticks_of(pid: int) -> int:
    activity = read_activity([pid])
    assert activity is not None
    return activity.cpu_ticks


def num_stopped_of(*pids: int) -> int:
    activity = read_activity(pids)
    assert activity is not None
    return activity.num_stopped


def test_a_process_of_another_parent_is_not_killed() -> None:
    program = "sleep 600 & echo $!; wait $!; echo $?"
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        kill_children([grandchild])
        os.kill(grandchild, signal.SIGTERM)  # the first signal that ends it is the one that its parent is told
        assert parent.stdout.read() == f"{128 + signal.SIGTERM}\n"


@pytest.mark.parametrize("state", ["t", "R"])
def test_a_process_that_a_debugger_holds_is_not_stopped(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(ports, "_read_status", lambda pid: [state, *["3"] * 20])
    assert read_activity([1, 2]) == ports.Activity(12, 0)


def test_processes_that_cannot_be_read_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_read_status", lambda pid: [])

    async def main() -> None:
        waiting = asyncio.create_task(ports.wait_until_idle([1], 0.01))
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(main())
