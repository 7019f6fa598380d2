"""A Python with nemo-gym, and a uv that installs it, as scripts: nothing is installed, and the stack is a stand-in."""

import sys
from pathlib import Path

import tests.unit.environments.nemo_gym as here

STAND_IN = Path(here.__file__).with_name("stand_in.py")
REAL = sys.executable  # tests hide it
PYTHON = """#!/bin/sh
prefix=$(dirname "$(dirname "$0")")
if [ "$1" = -I ]; then
    echo "[[3, {minor}, {micro}], {gym}, \\"$prefix\\", \\"$prefix/site-packages\\"]"
else
    exec {real} -I {stand_in}
fi
"""
UV = """#!{real}
import sys, time
from pathlib import Path
Path({log!r}).open("a").write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "venv":
    (Path(sys.argv[-1]) / "bin").mkdir(parents=True)
    (Path(sys.argv[-1]) / "bin" / "activate").touch()
elif {hangs}:
    time.sleep(60)
elif {fails}:
    sys.exit("no such package\\nnobody has it")
else:
    python = Path(sys.argv[sys.argv.index("--python") + 1])
    python.write_text({python!r})
    python.chmod(0o755)
"""


def fake_environment(prefix: Path, *, minor: int = 12, micro: int = 18, gym: str | None = "0.4.0") -> Path:
    """The interpreter of an environment; what it starts is stand_in.py."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "site-packages").mkdir()
    (prefix / "bin" / "activate").touch()
    return _script(prefix / "bin" / "python", _python(minor=minor, micro=micro, gym=gym))


def fake_uv(directory: Path, *, fails: bool = False, hangs: bool = False) -> Path:
    """The log of a uv in `directory`, which makes environments as `fake_environment` does, fails to, or hangs."""
    log = directory / "uv.log"
    _script(directory / "uv", UV.format(real=REAL, log=str(log), fails=fails, hangs=hangs, python=_python()))
    return log


def _python(*, minor: int = 12, micro: int = 18, gym: str | None = "0.4.0") -> str:
    text = f'\\"{gym}\\"' if gym else "null"
    return PYTHON.format(minor=minor, micro=micro, gym=text, real=REAL, stand_in=STAND_IN)


def _script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file
