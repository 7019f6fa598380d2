"""A sandbox for Python code that a model wrote: a process that can do nothing but compute.

On Linux (x86-64, ARM64) the kernel guarantees, for any user and without privileges, that the code

- starts, signals or traces no process or thread, and opens no socket (seccomp);
- reads only its own temporary directory and the Python installation, and writes only to that directory, if the kernel
  has Landlock (5.13 and later);
- ends after `cpu_s` seconds of CPU time or `wall_s` seconds (some more if it disables its own alarm), holds at most
  `memory_bytes` of address space, and writes at most `FILE_BYTES` to each file, its output included (resource limits);

and that it sees no environment variable of the trainer. On other systems the limits hold, and a Python audit hook
refuses processes, sockets and writing outside, which prevents accidents but does not stop a determined attacker. Not
bounded: the total size of many files, other than by time.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
FILE_BYTES = 4 * 1024 * 1024
STARTUP_GRACE_S = 10.0  # for the interpreter's start on a busy machine, in addition to `wall_s`


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of one call."""

    cpu_s: float = 2.0
    wall_s: float = 5.0
    memory_bytes: int = 512 * 1024 * 1024
    max_output_chars: int = 4096


def run_python(code: str, limits: SandboxLimits) -> str:
    """Run the code, blocking, and return what it printed, with the value of a last expression as in a notebook.

    Errors of the code, their traceback and a limit that ended it are part of the text, which is truncated in the middle
    to `max_output_chars`. Each call is a fresh process in an empty directory.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as home,
        tempfile.TemporaryFile() as output,
    ):
        status = _run(code, limits, home, output.fileno())
        output.seek(0)
        raw = output.read(FILE_BYTES)
    text = _truncate_middle(raw.decode(errors="replace").rstrip("\n"), limits.max_output_chars)
    problem = "[stopped: too much output]" if len(raw) == FILE_BYTES else _describe_termination(status, limits)
    return "\n".join(part for part in (text, problem) if part)


def _run(code: str, limits: SandboxLimits, home: str, output: int) -> int | None:
    """Return the exit status; None after the deadline."""
    settings = {
        "cpu_s": math.ceil(limits.cpu_s),
        "wall_s": limits.wall_s,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": FILE_BYTES,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", str(LAUNCHER), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd=home,
        env={"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        process.communicate(code.encode(errors="replace"), timeout=limits.wall_s + STARTUP_GRACE_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


def _describe_termination(status: int | None, limits: SandboxLimits) -> str:
    if status in (None, -signal.SIGALRM):
        return f"[stopped: longer than {limits.wall_s:g} s]"
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"[stopped: more than {limits.cpu_s:g} s of computing]"
    if status is not None and status < 0:
        return f"[stopped: {signal.Signals(-status).name}]"
    return ""


def _truncate_middle(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
