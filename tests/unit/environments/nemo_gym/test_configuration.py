"""The configuration files of a NeMo Gym stack, what they leave unset, and the requirements of their servers."""

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_rl.environments.nemo_gym.configuration import (
    POLICY_MODEL_CONFIG,
    check_configuration,
    collect_requirements,
    find_configs,
    find_missing_values,
    read_configuration,
)
from nemo_rl.errors import ConfigError
from tests.unit.environments.nemo_gym.conftest import MATH
from tests.unit.environments.nemo_gym.fake_python import fake_environment

KEY = "env.nemo_gym.config_paths"
JUDGED = """
math:
  resources_servers:
    math: {entrypoint: app.py, judge_model_server: {type: responses_api_models, name: '???'}}
"""
JUDGE = "math.resources_servers.math.judge_model_server.name"
VLLM = """
policy_model:
  responses_api_models:
    vllm_model: {entrypoint: app.py, base_url: "${policy_base_url}", return_token_id_information: false}
"""


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
    configuration = read_configuration([MATH], {}, site_packages, key="env.nemo_gym")
    assert collect_requirements(configuration.merged, site_packages) == ["math-verify==0.8.0", "tiktoken"]


def test_a_server_of_the_users_own_goes_before_gyms(site_packages: Path) -> None:
    own = Path("resources_servers/math")
    own.mkdir(parents=True)
    (own / "requirements.txt").write_text("sympy\n")
    configuration = read_configuration([MATH], {}, site_packages, key="env.nemo_gym")
    assert collect_requirements(configuration.merged, site_packages) == ["sympy", "tiktoken"]


def test_a_required_value_is_asked_for_by_our_key_with_what_it_may_be(site_packages: Path) -> None:
    Path("judged.yaml").write_text(JUDGED)
    with pytest.raises(ConfigError, match=rf"set it, e\.g\. \+\+env\.g\.overrides\.{JUDGE}=") as error:
        read_configuration(["judged.yaml"], {}, site_packages, key="env.g")
    assert error.value.key == f"env.g.overrides.{JUDGE}"
    assert str(error.value).endswith("one of: policy_model")
    given = OmegaConf.to_container(OmegaConf.from_dotlist([f"{JUDGE}=policy_model"]))
    assert isinstance(given, dict)
    read_configuration(["judged.yaml"], given, site_packages, key="env.g")  # pyright: ignore[reportArgumentType]
    Path("env.yaml").write_text(OmegaConf.to_yaml(given))
    read_configuration(["judged.yaml"], {}, site_packages, key="env.g")


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("a: {resources_servers: {a: {level: '???', list: [1, '???']}}}", ["level", "list.1"]),
        ("a: {resources_servers: {a: {level: 1, name: '?', other: null}}}", []),
        ("a: {resources_servers: {a: {level: '???'}}}\nb: {_inherit_from: a}", []),
        ("a: {resources_servers: {a: {level: '???'}}}\nb: {_copy: a.resources_servers}", []),
        ("a: {resources_servers: {a: {level: '???'}}}\nb: '${inherit_from:a}'", []),
        ("a: {_delete_key: resources_servers, resources_servers: {a: {level: '???'}}}", []),
    ],
)
def test_what_gym_fills_in_or_deletes_is_not_missing(text: str, missing: list[str]) -> None:
    assert find_missing_values(yaml.safe_load(text)) == [f"a.resources_servers.a.{name}" for name in missing]


def test_an_agent_that_takes_the_place_of_others_has_no_environment_of_its_own() -> None:
    reference = "{type: resources_servers, name: '???'}"
    text = f"a: {{responses_api_agents: {{mine: {{resources_server: {reference}}}}}}}"
    assert find_missing_values(yaml.safe_load(text)) == []


def test_the_policys_model_server_returns_tokens_whatever_its_file_says(site_packages: Path) -> None:
    Path("vllm_model.yaml").write_text(VLLM)
    found = read_configuration(["vllm_model.yaml"], {}, site_packages, key="env.g")
    model = {"vllm_model": {"return_token_id_information": True}}
    assert found.settings == {"policy_model": {"responses_api_models": model}}
    overrides = {"policy_model": {"responses_api_models": {"vllm_model": {"return_token_id_information": False}}}}
    with pytest.raises(ConfigError, match="must be true: rollouts are trained on their tokens") as error:
        read_configuration(["vllm_model.yaml"], overrides, site_packages, key="env.g")
    assert error.value.key.startswith("env.g.overrides.policy_model.responses_api_models.vllm_model.return_token")


def test_a_model_server_of_gym_that_returns_no_tokens_is_refused(site_packages: Path) -> None:
    Path("openai_model.yaml").write_text("policy_model: {responses_api_models: {openai_model: {entrypoint: app.py}}}")
    assert read_configuration(["openai_model.yaml"], {}, site_packages, key="env.g").settings == {}  # the user's own
    (site_packages / "responses_api_models" / "openai_model").mkdir()
    with pytest.raises(ConfigError, match=f"openai_model, which returns no tokens; use {POLICY_MODEL_CONFIG}"):
        read_configuration(["openai_model.yaml"], {}, site_packages, key="env.g")


def test_files_are_checked_once_gym_is_installed(site_packages: Path, tmp_path: Path) -> None:
    Path("judged.yaml").write_text(JUDGED + VLLM)
    check_configuration("env.g", ["judged.yaml"], {}, str(tmp_path / "own" / "bin" / "python"), None)
    python = fake_environment(tmp_path / "own")
    with pytest.raises(ConfigError, match="judge_model_server"):
        check_configuration("env.g", ["judged.yaml"], {}, str(python), None)
