"""Programs that try to leave the sandbox, under each set of its layers: none gets out, and no byte stays.

A set that the machine does not have is skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.environments.sandbox import WITHOUT_VARIABLE
from tests.contracts import sandbox_escapes
from tests.support.quick import quick

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


@dataclass(frozen=True)
class Configuration:
    """Layers to do without, and the user."""

    without: str = ""
    is_other_user: bool = False
    holds: tuple[str, ...] = ()  # layers that the machine must have, or the configuration is skipped
    lacks: tuple[str, ...] = ()


CONFIGURATIONS = {
    "root": Configuration("bubblewrap", holds=("Landlock", "private file system")),
    "other-user": Configuration("bubblewrap", True, holds=("Landlock", "private file system")),
    "bubblewrap": Configuration(holds=("bubblewrap",)),
    "without-landlock": Configuration("bubblewrap,landlock", holds=("private file system",), lacks=("Landlock",)),
    "other-user-without-landlock": Configuration(
        "bubblewrap,landlock", True, holds=("private file system",), lacks=("Landlock",)
    ),
    "without-namespaces": Configuration("bubblewrap,namespaces", holds=("Landlock",), lacks=("private file system",)),
    "other-user-without-namespaces": Configuration(
        "bubblewrap,namespaces", True, holds=("Landlock",), lacks=("private file system",)
    ),
    "without-both": Configuration("bubblewrap,landlock,namespaces", True, lacks=("Landlock", "private file system")),
}


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", quick(CONFIGURATIONS, ["root", "other-user", "bubblewrap", "without-namespaces"]))
def test_no_attempt_gets_out_and_nothing_stays(name: str, tmp_path: Path) -> None:
    configuration = CONFIGURATIONS[name]
    if configuration.is_other_user and os.getuid() != 0:
        pytest.skip("only root can become another user")
    prefix = command_as_other_user(tmp_path) if configuration.is_other_user else []
    answer = try_everything(prefix, configuration.without)
    layers = answer["isolation"].partition("; not covered")[0]
    if missing := [layer for layer in configuration.holds if layer not in layers]:
        pytest.skip(f"this machine lacks {', '.join(missing)}: {answer['isolation']}")
    assert not [layer for layer in configuration.lacks if layer in layers]
    assert answer["user"] == (OTHER_USER if configuration.is_other_user else os.getuid())
    assert answer["escaped"] == {}
    num_without_layer = len(sandbox_escapes.ON_FILES) if configuration == CONFIGURATIONS["without-both"] else 0
    assert answer["tried"] == len(sandbox_escapes.ATTEMPTS) - num_without_layer


def try_everything(prefix: list[str], without: str) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-m", "tests.contracts.sandbox_escapes"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {WITHOUT_VARIABLE: without, "PYTHONPATH": path, "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_there_are_many_attempts() -> None:
    parts = (sandbox_escapes.CALLS, sandbox_escapes.PROGRAMS, sandbox_escapes.ALONE, sandbox_escapes.ENDLESS)
    assert len(sandbox_escapes.ATTEMPTS) == sum(map(len, parts)) >= 390  # no name twice
