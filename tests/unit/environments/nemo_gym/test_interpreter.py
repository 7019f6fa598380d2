"""The Python of a NeMo Gym stack: the user's own, or an environment in the cache."""

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_rl.environments.nemo_gym import interpreter
from nemo_rl.environments.nemo_gym.interpreter import base_interpreters, find_gym_python, resolve_gym_python
from nemo_rl.errors import ConfigError
from tests.contracts import real_gym
from tests.unit.environments.nemo_gym.fake_python import fake_environment, fake_uv


@pytest.fixture
def bin_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory with programs beside the system's; nothing is cached, and pyenv has nothing."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("NEMO_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(interpreter.sys, "executable", str(tmp_path / "no" / "python"))  # nor a uv beside it
    return directory


def test_a_python_by_path_is_taken_as_it_is(tmp_path: Path) -> None:
    found = resolve_gym_python(str(fake_environment(tmp_path / "own", minor=13, gym="0.7.0")))
    assert (found.gym_version, found.prefix, found.is_virtual) == ("0.7.0", tmp_path / "own", True)
    assert found.site_packages == tmp_path / "own" / "site-packages"


def test_a_relative_path_of_a_python_is_that_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = fake_environment(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    assert resolve_gym_python("own/bin/python").python == python


def test_a_python_that_will_not_do_is_named(tmp_path: Path) -> None:
    cases = {
        str(tmp_path / "nothing"): "not an interpreter",
        str(tmp_path): "not an interpreter",
        "/bin/false": "does not run as a Python interpreter",
        str(fake_environment(tmp_path / "bare", minor=11, gym=None)): "is Python 3.11.18 without nemo-gym, which needs",
    }
    for path, said in cases.items():
        with pytest.raises(ConfigError, match=said) as error:
            resolve_gym_python(path, key="env.gym.python")
        assert (error.value.key, error.value.value) == ("env.gym.python", path)


def test_an_environment_is_made_once_by_many_at_once(bin_directory: Path, tmp_path: Path) -> None:
    log = fake_uv(bin_directory)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: resolve_gym_python(None), range(4)))
    directory = tmp_path / "cache" / "nemo_gym" / "0.4.0"
    assert {each.prefix for each in found} == {directory}
    commands = [line.split() for line in log.read_text().splitlines()]
    assert [command[0] for command in commands] == ["venv", "pip"]
    assert "--relocatable" in commands[0]
    assert commands[1][-4:-1] == ["--exclude-newer", "2026-11-15T00:00:00Z", "-r"]
    assert Path(commands[1][-1]).read_text() == "nemo-gym==0.4.0\n"
    assert not directory.with_name("0.4.0.making").exists()


def test_each_set_of_requirements_has_an_environment_of_its_own(bin_directory: Path) -> None:
    log = fake_uv(bin_directory)
    plain, math = resolve_gym_python(None), resolve_gym_python(None, ["sympy", "math-verify"])
    assert resolve_gym_python(None, ["math-verify", "sympy", "sympy"]).prefix == math.prefix != plain.prefix
    assert len(log.read_text().splitlines()) == 4
    assert math.prefix.with_name(math.prefix.name + ".txt").read_text() == "nemo-gym==0.4.0\nmath-verify\nsympy\n"


def test_a_failed_installation_leaves_no_environment_and_says_why(bin_directory: Path, tmp_path: Path) -> None:
    fake_uv(bin_directory, fails=True)
    with pytest.raises(ConfigError, match="no such package; nobody has it") as error:
        resolve_gym_python(None, key="env.gym.python")
    assert error.value.key == "env.gym.python"
    assert not (tmp_path / "cache" / "nemo_gym" / "0.4.0").exists()
    fake_uv(bin_directory)
    assert resolve_gym_python(None).gym_version == "0.4.0"


def test_an_installation_ends_in_its_time_and_so_does_the_wait_for_another(bin_directory: Path, tmp_path: Path) -> None:
    fake_uv(bin_directory, hangs=True)
    with pytest.raises(ConfigError, match=r"creating an environment with nemo-gym failed: .*timed out"):
        resolve_gym_python(None, timeout_s=1.0)
    with (tmp_path / "cache" / "nemo_gym" / "0.4.0.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process still holds"):
            resolve_gym_python(None, timeout_s=0.1)


def test_tests_of_real_servers_are_skipped_once_an_installation_was_too_slow(
    bin_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = fake_uv(bin_directory, hangs=True)
    (bin_directory / "python3.12").symlink_to(fake_environment(bin_directory / "base"))
    monkeypatch.setattr(real_gym, "INSTALL_TIMEOUT_S", 1.0)
    tried = []
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match=r"NeMo Gym 0\.4\.1 is not available: .*timed out"):
            real_gym.gym_environment("0.4.1")  # no other test's version
        tried.append(log.read_text())
    assert tried[0] == tried[1]


def test_an_environment_that_has_lost_its_python_is_made_again(bin_directory: Path) -> None:
    log = fake_uv(bin_directory)
    python = resolve_gym_python(None).python
    python.unlink()
    assert resolve_gym_python(None).python == python
    assert len(log.read_text().splitlines()) == 4


def test_without_uv_the_key_is_named(bin_directory: Path) -> None:
    with pytest.raises(ConfigError, match="needs uv on PATH") as error:
        resolve_gym_python(None)
    assert error.value.key == "env.nemo_gym.python"


def test_pythons_of_path_and_pyenv_are_found_if_new_enough(bin_directory: Path, tmp_path: Path) -> None:
    for prefix, minor, link in (("a", 12, "python3.12"), ("b", 11, "python3.13")):
        (bin_directory / link).symlink_to(fake_environment(tmp_path / prefix, minor=minor))
    in_pyenv = fake_environment(tmp_path / "pyenv" / "versions" / "3.12.1")
    fake_environment(tmp_path / "pyenv" / "versions" / "3.11.7", minor=11)
    for micro in (0, 14):
        fake_environment(tmp_path / "pyenv" / "versions" / f"3.13.{micro}", minor=13, micro=micro)
    found = list(base_interpreters())
    assert found[0] == str(bin_directory / "python3.12")
    assert str(in_pyenv) in found
    assert str(bin_directory / "python3.13") not in found
    versions = tmp_path / "pyenv" / "versions"
    newest = {str(versions / f"3.13.{micro}" / "bin" / "python") for micro in (0, 14)}
    assert newest <= {*found}
    for gym_version in ("0.5.0", "0.7.0", "1.0.0"):
        assert newest & {*base_interpreters(gym_version)} == {str(versions / "3.13.14" / "bin" / "python")}
        assert str(in_pyenv) not in base_interpreters(gym_version)


def test_an_environment_of_another_version_is_made_with_a_python_that_it_installs_on(
    bin_directory: Path, tmp_path: Path
) -> None:
    log = fake_uv(bin_directory)
    newer = fake_environment(tmp_path / "pyenv" / "versions" / "3.13.18", minor=13)
    assert find_gym_python(None, "0.7.0") is None
    found = resolve_gym_python(None, version="0.7.0")
    assert found.prefix == tmp_path / "cache" / "nemo_gym" / "0.7.0"
    assert found.prefix.with_name("0.7.0.txt").read_text() == "nemo-gym==0.7.0\n"
    assert str(newer) in log.read_text().splitlines()[0].split()
    assert find_gym_python(None, "0.7.0") == found
    assert find_gym_python(None, None) is None
    newer.unlink()
    resolve_gym_python(None, version="0.6.0")
    assert ">=3.13.14,<3.14" in log.read_text().splitlines()[2].split()
