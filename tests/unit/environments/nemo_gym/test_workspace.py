"""Gym's configuration files, what their servers need, and the folder that a stack runs in."""

import stat
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_rl.environments.nemo_gym.workspace import (
    POLICY_MODEL_CONFIG,
    GymPython,
    collect_requirements,
    find_configs,
    write_workspace,
)
from nemo_rl.errors import ConfigError

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


def test_the_folder_has_keys_nobody_else_may_read_and_an_environment_a_server(site_packages: Path) -> None:
    Path("env.yaml").write_text("judge_key: secret\npolicy_model_name: mine\n")
    Path("resources_servers/own").mkdir(parents=True)
    prefix = site_packages.parent / "environment"
    prefix.mkdir()
    folder = site_packages.parent / "run" / "nemo_gym"
    python = GymPython(prefix / "bin" / "python", (3, 12), prefix, site_packages)
    for _ in range(2):  # a resumed run finds its folder
        write_workspace(folder, python, {"policy_model_name": "policy", "config_paths": [MATH]})
    written = OmegaConf.load(folder / "env.yaml")
    assert (written.judge_key, written.policy_model_name, written.skip_venv_if_present) == ("secret", "policy", True)
    assert stat.S_IMODE((folder / "env.yaml").stat().st_mode) == 0o600
    for server in ("resources_servers/math", "resources_servers/own", "responses_api_models/vllm_model"):
        assert (Path(written.uv_venv_dir) / server / ".venv").resolve() == prefix
    assert (folder / "resources_servers" / "own").is_dir()
