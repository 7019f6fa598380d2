"""Code that computes, and code that attacks."""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.environments import sandbox
from nemo_rl.environments.sandbox import SandboxLimits, run_python

LIMITS = SandboxLimits(cpu_s=20, wall_s=60, memory_bytes=128 * 1024 * 1024, max_output_chars=2000)
FULL = "[stopped: more than 67108864 bytes or 4096 files]"
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


@pytest.fixture(params=["", "namespaces", "landlock,namespaces"], ids=["all-layers", "without-view", "limits-only"])
def temporary_files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the parent of the sandbox's directories, in which nothing may stay."""
    monkeypatch.setenv(sandbox.WITHOUT_VARIABLE, f"bubblewrap,{request.param}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox.isolation.cache_clear()
    yield tmp_path
    sandbox.isolation.cache_clear()


@linux_only
@pytest.mark.parametrize(
    "code",
    [
        "at = os.path.basename(os.getcwd())\nfor n in range(9): os.makedirs(f'{at}-{n}/x/y'); fill(f'{at}-{n}/x/f')",
        "for n in range(9): os.makedirs(f'{n}/{n}/{n}'); fill(f'{n}/{n}/{n}/f')",
        "import ctypes; libc = ctypes.CDLL(None)\nfor n in range(3000): libc.mkdir(b'd', 0o700); libc.chdir(b'd')\n"
        "libc.write(libc.open(b'f', 0o101, 0o600), bytes(1 << 20), 1 << 20)",  # a path too long for Python
        "os.makedirs('a/b'); fill('a/b/f'); os.umask(0o777); os.mkdir('a/b/c'); os.mkdir('c')",
        "os.mkdir(b'\\xff\\n-rf'); fill(b'\\xff\\n-rf/' + b'\\xfe' * 255)",
    ],
    ids=["guessed-names", "same-names", "deep", "no-access", "bytes"],
)
def test_nothing_that_the_code_leaves_stays(code: str, temporary_files: Path) -> None:
    prelude = "import os\ndef fill(name):\n    with open(name, 'wb') as file: file.write(bytes(1 << 20))\n"
    output = run_python(f"{prelude}{code}\nprint('done')", LIMITS)
    assert output.removesuffix(FULL).strip() in ("done", "")  # a directory that cannot be measured counts as full
    assert list(temporary_files.iterdir()) == []


@linux_only
@pytest.mark.parametrize("what", ["bytes", "files"])
def test_all_files_together_are_bounded(what: str, temporary_files: Path) -> None:
    content, most = ("bytes(4 << 20)", 5000) if what == "bytes" else ("b''", 300_000)
    code = f"for n in range({most}):\n    with open(str(n), 'wb') as file: file.write({content})\nprint('unbounded')"
    output = run_python(code, LIMITS)
    assert "unbounded" not in output
    assert "No space left on device" in output or output == FULL
    assert list(temporary_files.iterdir()) == []


@linux_only
def test_what_cannot_be_removed_is_logged_with_its_size_and_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refuse(root: str) -> None:
        raise PermissionError(13, "refused")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(sandbox, "_remove_tree", refuse)
        with sandbox.temporary_directory() as home:
            Path(home, "file").write_bytes(bytes(8192))
    assert f"cannot remove {home} ([Errno 13] refused): 8192 bytes in 1 files stay" in caplog.text
    assert os.path.exists(home)
    with sandbox.temporary_directory():
        pass
    assert list(tmp_path.iterdir()) == []


@linux_only
def test_flags_that_the_code_sets_on_its_output_do_not_reach_the_trainer() -> None:
    code = "import os, ctypes\nprint('shown', flush=True)\nctypes.CDLL(None).fcntl(1, 4, os.O_DIRECT)"
    assert run_python(code, LIMITS) == "shown\n-1"  # refused
    with sandbox._output_file() as (writer, reader):
        os.write(writer, b"text")
        os.set_blocking(writer, False)
        assert os.get_blocking(reader)
        assert os.pread(reader, 10, 0) == b"text"
