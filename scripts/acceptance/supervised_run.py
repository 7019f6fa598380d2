"""A supervised run (`nemo-rl run`) that faults are inflicted on: its heartbeat, events and processes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
POLL_S = 0.05
HANG_TIMEOUT_S = 10.0
START_DEADLINE_S = 400.0  # for training to begin, on a machine that may be busy
STOP_DEADLINE_S = 60.0
CLOCK = "chaos_clock"  # the file with the shift of the wall clock


class Run:
    """A supervised run in a directory of its own."""

    process: "subprocess.Popen[bytes]"

    def __init__(self, directory: Path, arguments: Sequence[str], checkpoints: Path) -> None:
        self.directory, self.checkpoints, self.arguments = directory, checkpoints, tuple(arguments)

    def start(self) -> None:
        """Start the supervisor."""
        self.directory.mkdir(parents=True, exist_ok=True)
        own = ("--restarts", "100000", "--crash-loop", "30", "--backoff-s", "0.1", "--directory", str(self.directory))
        own += ("--hang-timeout-s", str(HANG_TIMEOUT_S), "--progress-timeout-s", str(START_DEADLINE_S))
        own += ("--", "grpo", *self.arguments, f"logger.log_dir={self.directory / 'logs'}")
        own += (f"checkpointing.checkpoint_dir={self.checkpoints}",)
        environment = {**os.environ, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **self._shifted_clock()}
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        with (self.directory / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nemo_rl", "run", *own], cwd=ROOT, env=environment, stdout=output, stderr=output
            )

    def _shifted_clock(self) -> dict[str, str]:
        """Return the environment in which `shift_clock` shifts the wall clock; empty without a C compiler."""
        library, shift = self.directory / "clock.so", self.directory / CLOCK
        source = Path(__file__).with_name("clock.c")
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)]
        if not library.exists() and (
            shutil.which("cc") is None or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            return {}
        self.shift_clock(0)
        return {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(shift)}

    def shift_clock(self, seconds: int) -> None:
        """Set how far the wall clock of the run's processes is from the machine's."""
        path = self.directory / CLOCK
        with path.open("r+b" if path.exists() else "wb") as file:  # the same file, which they have mapped
            file.write(seconds.to_bytes(8, "little", signed=True))

    def left_over(self) -> list[psutil.Process]:
        """Return the processes that this run's supervisor has started and that still live."""
        mark, found = f"NEMO_RL_HEARTBEAT={self.directory}", []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes() and is_alive(process):
                    found.append(process)
        return found

    def finish(self, deadline_s: float) -> int:
        """Return the exit code; a run that does not end in time, or whose caller is interrupted, is ended."""
        try:
            return self.process.wait(deadline_s)
        finally:
            self.process.terminate()
            self.process.wait(STOP_DEADLINE_S)

    def restart_supervisor(self) -> None:
        """Start the same command again, as a scheduler does after the supervisor itself has died."""
        self.process.wait()
        self.start()

    @property
    def heartbeat(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.directory / "heartbeat.json").read_text())
        return {}

    @property
    def driver(self) -> psutil.Process | None:
        """The process of the training command; None between two starts."""
        with contextlib.suppress(psutil.Error, KeyError):
            return psutil.Process(self.heartbeat["pid"])
        return None

    def events(self, name: str, after: float) -> list[dict[str, Any]]:
        path = self.directory / "events.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row["event"] == name and row["monotonic_s"] > after]

    def family(self) -> list[psutil.Process]:
        """Everything below the driver."""
        driver = self.driver
        with contextlib.suppress(psutil.Error):
            return [] if driver is None else driver.children(recursive=True)
        return []

    def wait_until(self, condition: Callable[[], object], deadline_s: float = START_DEADLINE_S) -> bool:
        """Wait for a condition, or for the end of the run; return whether it holds."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing for {deadline_s:g} s; see {self.directory / 'output'}")
            time.sleep(POLL_S)
        return True

    def is_training(self) -> bool:
        state, driver = self.heartbeat, self.driver
        return state.get("phase") == "training" and driver is not None and driver.is_running()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie does not."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
