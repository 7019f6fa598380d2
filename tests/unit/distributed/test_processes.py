import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl.distributed import processes
from nemo_rl.distributed.processes import Activity, kill_children, read_activity, wait_until_idle

CORE_AND_WORKER = """
import os, subprocess, sys, time
WORKER = '''
import sys, time
from nemo_rl.distributed.processes import end_with
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
    monkeypatch.setattr(processes, "_read_status", lambda pid: [state, *["3"] * 20])
    assert read_activity([1, 2]) == Activity(12, 0)


def test_processes_that_cannot_be_read_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_read_status", lambda pid: [])

    async def main() -> None:
        waiting = asyncio.create_task(wait_until_idle([1], 0.01))
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(main())
