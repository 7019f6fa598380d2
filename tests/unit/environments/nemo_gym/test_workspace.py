"""The configuration files, requirements, directory and Python environment of a NeMo Gym stack."""

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_rl.environments.nemo_gym import workspace
from nemo_rl.environments.nemo_gym.workspace import (
    POLICY_MODEL_CONFIG,
    GymPython,
    base_interpreters,
    collect_requirements,
    find_configs,
    resolve_gym_python,
    write_workspace,
)
from nemo_rl.errors import ConfigError
from tests.unit.environments.nemo_gym.fake_python import fake_environment, fake_uv

KEY = "env.nemo_gym.config_paths"
MATH = "resources_servers/math/configs/math.yaml"


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gym as it is installed, and an empty current directory."""
    root = tmp_path / "site-packages"
    files = {
        MATH: "math: {resources_servers: {math: {entrypoint: app.py}}}",
        POLICY_MODEL_CONFIG: "policy_model: {responses_api_models: {vllm_model: {entrypoint: app.py}}}",
        "resources_servers/math/requirements.txt": "-e nemo-gym[dev] @ ../../\n# why\nmath-verify==0.8.0 # pinned\n\n",
        "environment_servers/legacy_agent/requirements.txt": "-e nemo-gym[dev] @ ../../\n",
        "responses_api_models/vllm_model/pyproject.toml": '[project]\ndependencies = ["nemo-gym[dev]", "tiktoken"]\n',
        "resources_servers/other/requirements.txt": "torch\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return root


def test_the_policys_model_is_added_where_no_file_has_one(site_packages: Path) -> None:
    assert list(find_configs([MATH], site_packages, key=KEY)) == [MATH, POLICY_MODEL_CONFIG]
    Path("own.yaml").write_text("policy_model: {responses_api_models: {mine: {}}}")
    assert list(find_configs([MATH, "own.yaml"], site_packages, key=KEY)) == [MATH, str(Path.cwd() / "own.yaml")]


def test_files_named_by_files_are_found_once(site_packages: Path) -> None:
    Path("mix.yaml").write_text(f"config_paths: [{MATH}, {POLICY_MODEL_CONFIG}, {MATH}, mix.yaml]")
    found = find_configs(["mix.yaml"], site_packages, key=KEY)
    assert list(found) == [str(Path.cwd() / "mix.yaml"), MATH, POLICY_MODEL_CONFIG]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("a: [", "cannot be read"),
        ("[1]", "must hold a mapping"),
    ],
)
def test_a_file_that_is_none_is_named(site_packages: Path, text: str | None, said: str) -> None:
    if text is not None:
        Path("wrong.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        find_configs([MATH, "wrong.yaml"], site_packages, key=KEY)
    assert (error.value.key, error.value.value) == (KEY, "wrong.yaml")


def test_only_what_configured_servers_need_beside_gym_is_required(site_packages: Path) -> None:
    configs = find_configs([MATH], site_packages, key=KEY).values()
    assert collect_requirements(configs, site_packages) == ["math-verify==0.8.0", "tiktoken"]


def test_a_server_of_the_users_own_goes_before_gyms(site_packages: Path) -> None:
    own = Path("resources_servers/math")
    own.mkdir(parents=True)
    (own / "requirements.txt").write_text("sympy\n")
    configs = find_configs([MATH], site_packages, key=KEY).values()
    assert collect_requirements(configs, site_packages) == ["sympy", "tiktoken"]


def test_the_directory_has_keys_nobody_else_may_read_and_an_environment_a_server(site_packages: Path) -> None:
    Path("env.yaml").write_text("judge_key: secret\npolicy_model_name: mine\n")
    Path("resources_servers/own").mkdir(parents=True)
    prefix = site_packages.parent / "environment"
    prefix.mkdir()
    directory = site_packages.parent / "run" / "nemo_gym"
    for used in (site_packages, prefix):  # a resumed run finds its directory, made with another Python
        python = GymPython(used / "bin" / "python", (3, 12), used, site_packages)
        write_workspace(directory, python, {"policy_model_name": "policy", "config_paths": [MATH]})
    written = OmegaConf.load(directory / "env.yaml")
    assert (written.judge_key, written.policy_model_name, written.skip_venv_if_present) == ("secret", "policy", True)
    assert stat.S_IMODE((directory / "env.yaml").stat().st_mode) == 0o600
    servers = ("resources_servers/math", "resources_servers/own", "responses_api_models/vllm_model")
    for server in (*servers, "environment_servers/legacy_agent"):
        assert (Path(written.uv_venv_dir) / server / ".venv").resolve() == prefix
    assert (directory / "resources_servers" / "own").is_dir()


@pytest.fixture
def bin_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory with programs beside the system's; nothing is cached, and pyenv has nothing."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("NEMO_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workspace.sys, "executable", str(tmp_path / "no" / "python"))  # nor a uv beside it
    return directory


def test_a_python_by_path_is_taken_as_it_is(tmp_path: Path) -> None:
    found = resolve_gym_python(str(fake_environment(tmp_path / "own", minor=13)))
    assert (found.version, found.prefix, found.is_virtual) == ((3, 13), tmp_path / "own", True)
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
        str(fake_environment(tmp_path / "old", minor=11)): "is Python 3.11; NeMo Gym needs 3.12",
        str(fake_environment(tmp_path / "bare", gym=None)): "has no nemo-gym",
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
    assert resolve_gym_python(None).version == (3, 12)


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
    found = list(base_interpreters())
    assert found[0] == str(bin_directory / "python3.12")
    assert found[-1] == str(in_pyenv)
    assert str(bin_directory / "python3.13") not in found


def test_nothing_of_gym_is_needed_to_import_ours() -> None:
    code = (
        "import sys, nemo_rl.environments.nemo_gym.client, nemo_rl.environments.nemo_gym.stack\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('nemo_gym', 'torch', 'ray', 'vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
