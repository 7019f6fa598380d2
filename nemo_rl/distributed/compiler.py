"""The C compiler and the Python headers of this machine, with which Triton builds what launches its GPU kernels."""

import os
import shutil
import sysconfig
from pathlib import Path

COMPILERS = ("gcc", "clang")  # in Triton's order; the variable CC goes first
INSTALL_COMPILER = "apt-get install gcc"
INSTALL_HEADERS = "apt-get install python3-dev, or a Python of uv (uv python install)"


def compiler_problem() -> str | None:
    """Return what Triton (3.7, runtime/build.py) would not find on this machine, and how it is installed; else None."""
    wanted = (os.environ["CC"],) if "CC" in os.environ else COMPILERS
    if not any(map(shutil.which, wanted)):
        tried = f"CC={wanted[0]}" if "CC" in os.environ else " or ".join(wanted)
        return f"Triton needs a C compiler for GPU kernels, and there is no {tried}: {INSTALL_COMPILER}"
    header = _include_directory() / "Python.h"
    if not header.is_file():
        return f"Triton needs Python's headers for GPU kernels, and there is no {header}: {INSTALL_HEADERS}"
    return None


def _include_directory() -> Path:
    """Return the directory of Python's headers; Debian's default scheme names one that its packages do not use."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
