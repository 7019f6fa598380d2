"""Programs that try to leave the sandbox, as root and as another user, with and without Landlock: none gets out."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.environments.sandbox import WITHOUT_VARIABLE
from tests.contracts import sandbox_escapes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp, Landlock and namespaces are Linux's")

ROOT = Path(__file__).parents[2]
OTHER_USER = 54321
# Makes the interpreter readable where it lies in a directory of root's alone: in a mount namespace of the test.
SHOW_INTERPRETER = """
set -e
mount --make-rprivate /
if [ ! -x "$2" ] || ! setpriv --reuid=$1 --regid=$1 --clear-groups test -r "$2"; then
  mkdir -p "$3/kept"; mount --bind "$2" "$3/kept"; mount -t tmpfs -o mode=755 none /root
  mkdir -p "$2"; mount --bind "$3/kept" "$2"
fi
shift 3; exec "$@"
"""


def command_as_other_user(tmp_path: Path) -> list[str]:
    """Return the prefix that runs a command as OTHER_USER; needs root, unshare and setpriv."""
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("needs unshare and setpriv")
    drop = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    installation = os.path.realpath(sys.base_prefix)
    return ["unshare", "-m", "sh", "-c", SHOW_INTERPRETER, "sh", str(OTHER_USER), installation, str(tmp_path), *drop]


def try_everything(prefix: list[str], without: str) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-m", "tests.contracts.sandbox_escapes"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {WITHOUT_VARIABLE: without, "PYTHONPATH": path, "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_there_are_many_attempts() -> None:
    assert len(sandbox_escapes.ATTEMPTS) == len(sandbox_escapes.CALLS) + len(sandbox_escapes.PROGRAMS) >= 130


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("without", ["bubblewrap", "bubblewrap,landlock"], ids=["landlock", "without-landlock"])
@pytest.mark.parametrize("user", ["own", "other"])
def test_no_attempt_gets_out(user: str, without: str, tmp_path: Path) -> None:
    if user == "other" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    answer = try_everything(command_as_other_user(tmp_path) if user == "other" else [], without)
    if any("neither Landlock nor namespaces" in gap for gap in answer["gaps"]):
        pytest.skip(f"this machine has no layer for files: {answer['isolation']}")
    assert answer["user"] == (OTHER_USER if user == "other" else os.getuid())
    assert ("Landlock" in answer["isolation"]) == ("landlock" not in without)
    assert answer["escaped"] == {}
    assert answer["tried"] >= 130


@pytest.mark.timeout(1300)
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_no_attempt_gets_out_of_bubblewrap() -> None:
    answer = try_everything([], "")
    assert "bubblewrap" in answer["isolation"]
    assert answer["escaped"] == {}
