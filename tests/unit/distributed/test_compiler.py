"""The compiler and headers that Triton will look for, on machines that have or lack them."""

import sysconfig
from pathlib import Path

import pytest
from triton.runtime.build import compile_module_from_src

from nemo_rl.distributed import compiler
from nemo_rl.distributed.compiler import compiler_problem

MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with gcc and headers: its one directory of programs, which also holds Python.h."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    program = tmp_path / "gcc"
    program.touch(mode=0o755)
    return tmp_path


def test_a_machine_with_either_compiler_and_headers_has_no_problem(sound: Path) -> None:
    assert compiler_problem() is None
    (sound / "gcc").rename(sound / "clang")
    assert compiler_problem() is None


def test_a_missing_compiler_is_named_with_its_package(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "icx")
    assert "there is no CC=icx: apt-get install gcc" in (compiler_problem() or "")
    monkeypatch.delenv("CC")
    (sound / "gcc").unlink()
    assert "there is no gcc or clang: apt-get install gcc" in (compiler_problem() or "")


def test_missing_headers_are_named_with_their_package(sound: Path) -> None:
    (sound / "Python.h").unlink()
    assert f"there is no {sound}/Python.h: apt-get install python3-dev" in (compiler_problem() or "")


def test_debians_headers_are_where_its_packages_put_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    assert compiler._include_directory() == Path(sysconfig.get_paths("posix_prefix")["include"])


@pytest.mark.skipif(compiler_problem() is not None, reason="no compiler here")
def test_triton_itself_builds_where_no_problem_is_found_and_fails_where_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert compile_module_from_src(MODULE, "probe").__name__ == "probe"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compiler_problem() is not None
    with pytest.raises(RuntimeError, match="C compiler"):
        compile_module_from_src(MODULE, "probe")
