"""Code that computes, and code that attacks."""

import sys
from pathlib import Path

import pytest

from nemo_rl.environments.sandbox import SandboxLimits, run_python

LIMITS = SandboxLimits(cpu_s=20, wall_s=60, memory_bytes=128 * 1024 * 1024, max_output_chars=2000)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="seccomp and Landlock are Linux's")


def test_output_last_value_and_files_of_its_own_directory() -> None:
    code = "with open('a.txt', 'w') as f:\n    f.write('hi')\nprint(open('a.txt').read())\n2 ** 10"
    assert run_python(code, LIMITS) == "hi\n1024"


def test_error_is_reported_with_the_line_of_the_code() -> None:
    output = run_python("print('before')\nx = 1\nx / 0", LIMITS)
    assert output.startswith("before\nTraceback")
    assert 'File "<tool>", line 3' in output
    assert output.endswith("ZeroDivisionError: division by zero")
    assert "SyntaxError" in run_python("f(", LIMITS)


@pytest.mark.parametrize(
    ("code", "report"),
    [
        ("import os\nwhile True: os.fork()", "not allowed in the sandbox: os.fork"),
        ("import subprocess; subprocess.run(['ls'])", "not allowed in the sandbox: subprocess.Popen"),
        ("import socket; socket.socket()", "not allowed in the sandbox: socket"),
        ("import os; os.kill(os.getppid(), 9)", "not allowed in the sandbox: os.kill"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("x = []\nwhile True: x.append('a' * 10**6)", "MemoryError"),
        ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6)", "File too large"),
    ],
)
def test_hostile_code_is_contained_and_reported(code: str, report: str) -> None:
    assert report in run_python(code, LIMITS)


def test_huge_output_is_cut() -> None:
    output = run_python("while True: print('x' * 1000)", LIMITS)
    assert len(output) < 2200
    assert "characters left out" in output
    assert output.endswith("[stopped: too much output]")


def test_endless_loop_is_stopped_by_its_computing_time() -> None:
    output = run_python("print('begun', flush=True)\nwhile True: pass", SandboxLimits(cpu_s=1, wall_s=60))
    assert output == "begun\n[stopped: more than 1 s of computing]"


def test_sleeping_code_is_stopped_by_the_clock() -> None:
    output = run_python("import time; time.sleep(600)", SandboxLimits(cpu_s=20, wall_s=1))
    assert output == "[stopped: longer than 1 s]"


def test_writing_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    for code in (f"open({str(tmp_path / 'new')!r}, 'w')", f"import os; os.remove({str(tmp_path / 'kept')!r})"):
        assert "PermissionError" in run_python(code, LIMITS)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_environment_variables_of_the_trainer_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    assert "hidden" not in run_python("import os; print(dict(os.environ))", LIMITS)


@linux_only
def test_kernel_refuses_processes_and_sockets_below_python() -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n(libc.fork(), libc.socket(2, 1, 0), libc.kill(1, 0), libc.setsid())"
    )
    assert run_python(code, LIMITS) in (
        "(-1, -1, -1, -1)",
        "PermissionError: not allowed in the sandbox: ctypes.dlopen",
    )
