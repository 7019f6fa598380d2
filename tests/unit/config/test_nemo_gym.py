"""Entries of `env` of type nemo_gym: what is checked, and where NeMo-RL's way of writing them goes."""

from pathlib import Path

import pytest

from nemo_rl.environments.nemo_gym.entry import NemoGymConfig
from nemo_rl.errors import ConfigError
from tests.unit.config.conftest import Load

HEAD = "head_url: 'http://127.0.0.1:11000'"


def entry(text: str) -> str:
    return "++env.gym={type: nemo_gym, " + text + "}"


@pytest.fixture(autouse=True)
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed Gym its files are not checked; those named here do not exist."""
    monkeypatch.setenv("NEMO_RL_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["++env.nemo_gym={}"], "env.nemo_gym", "either reached by head_url or started"),
        ([entry(HEAD + ", config_paths: [a.yaml]")], "env.gym", "either reached by head_url or started"),
        ([entry("config_paths: []")], "env.gym.config_paths", "must name a file"),
        ([entry("head_url: '127.0.0.1:11000'")], "env.gym.head_url", "must be an address"),
        ([entry("head_url: 'http://'")], "env.gym.head_url", "must be an address"),
        ([entry(HEAD + ", overrides: {a: 1}")], "env.gym.overrides", "runs already"),
        ([entry(HEAD + ", python: /usr/bin/python3")], "env.gym.python", "runs already"),
        ([entry(HEAD + ", version: 0.7.0")], "env.gym.version", "runs already"),
        ([entry("config_paths: [a.yaml], version: latest")], "env.gym.version", "pattern"),
        ([entry("config_paths: [a.yaml], python: p, version: 0.7.0")], "env.gym.version", "has a nemo-gym of its own"),
        ([entry(HEAD + ", timeout_s: 600")], "env.gym.timeout_s", "below rollout.stall_timeout_s = 600"),
        ([entry(HEAD), "gateway.session_ttl_s=60"], "env.gym.timeout_s", "below gateway.session_ttl_s = 60"),
        ([entry(HEAD + ", port_range_low: 20001")], "env.gym.port_range_low", "at most port_range_high = 20000"),
        ([entry(HEAD + ", batching: {enabled: true}")], "env.gym.batching.enabled", "allowed: false"),
        ([entry(HEAD + ", remote: {enabled: true}")], "env.gym.remote.enabled", "allowed: false"),
        ([entry(HEAD + ", max_concurency: 3")], "env.gym.max_concurency", "did you mean env.gym.max_concurrency"),
        (
            [entry(HEAD), "++env.asker={type: agent, function: 'mine:ask', scored_by: gym}"],
            "env.asker.scored_by",
            "no entry of env that is an environment",
        ),
    ],
)
def test_stacks_that_cannot_be_had_are_refused(load: Load, overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load("", *overrides)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "text", [HEAD, HEAD + ", timeout_s: 599", "config_paths: [a.yaml], python: p, overrides: {a: 1}"]
)
def test_stacks_that_can_be_had_are_not(load: Load, text: str) -> None:
    load("", entry(text))


def test_servers_and_keys_of_gym_beside_ours_become_overrides(load: Load) -> None:
    config = load(
        """
        env:
          nemo_gym:
            config_paths: [a.yaml]
            use_absolute_ip: true
            judge: {responses_api_models: {vllm_model: {max_tokens: 7}}}
            overrides: {math: {resources_servers: {math: {level: 2}}}}
        """
    )
    section = config.env["nemo_gym"]
    assert isinstance(section, NemoGymConfig)
    assert section.overrides == {
        "use_absolute_ip": True,
        "judge": {"responses_api_models": {"vllm_model": {"max_tokens": 7}}},
        "math": {"resources_servers": {"math": {"level": 2}}},
    }


def test_overrides_of_one_kind_of_server_stay_as_they_are(load: Load) -> None:
    """A mapping of free keys is no server, whatever its keys are called."""
    text = "config_paths: [a.yaml], overrides: {resources_servers: {a: 1}}"
    section = load("", entry(text)).env["gym"]
    assert isinstance(section, NemoGymConfig)
    assert section.overrides == {"resources_servers": {"a": 1}}
