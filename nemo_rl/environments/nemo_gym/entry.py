"""The entry `nemo_gym` of `env`: its section and its check; client.py runs it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from nemo_rl.config.entry_checks import check_reward_range, check_session_timeout, reject_wrappers
from nemo_rl.config.environment import RolloutRunnerConfig
from nemo_rl.config.kinds import Entry, factory_at
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.value_types import Delay, Seconds
from nemo_rl.environments.nemo_gym.configuration import SERVER_KINDS, check_configuration
from nemo_rl.errors import ConfigError

# Keys of Gym's own configuration, which NeMo-RL's recipes write next to those of the section.
GYM_KEYS = frozenset(
    {
        "allow_openai_version_skew",
        "allow_unsupported_pairing",
        "cache_dir",
        "default_host",
        "dry_run",
        "environment_server_routes",
        "error_on_agent_without_environment_server",
        "error_on_almost_servers",
        "global_aiohttp_client_request_debug",
        "global_aiohttp_connector_limit",
        "global_aiohttp_connector_limit_per_host",
        "model_endpoint_readiness_timeout_seconds",
        "nemo_gym_log_dir",
        "observability_enabled",
        "ray_head_node_address",
        "results_dir",
        "server_spinup_timeout_seconds",
        "skip_venv_if_present",
        "skip_verification",
        "skip_verification_reward",
        "telemetry",
        "token_id_capture",
        "use_absolute_ip",
        "uv_cache_dir",
        "uv_lock_timeout_seconds",
        "uv_pip_set_python",
        "uv_venv_dir",
    }
)


class NemoGymConfig(RolloutRunnerConfig):
    """A NeMo Gym stack, whose agents run the rows that name them. Requires either `head_url` or `config_paths`."""

    has_stack: ClassVar[bool] = True

    head_url: str | None = None  # address of a running stack, e.g. http://127.0.0.1:11000
    config_paths: list[str] | None = None  # Gym's YAML files, of a stack that the run starts and stops
    overrides: dict[str, Any] = Field(default_factory=dict)  # further keys of Gym's configuration; they take precedence
    python: str | None = None  # an interpreter with nemo-gym, for a started stack; None: an environment in the cache
    version: str | None = Field(
        default=None, pattern=r"^\d+\.\d+\.\d+$"
    )  # nemo-gym's, in that environment; None: 0.4.0
    start_timeout_s: Seconds = 600.0  # time until all servers respond
    timeout_s: Seconds = 480.0  # per rollout
    server_timeout_s: Seconds = 300.0  # started stack: a server silent for longer ends the run
    max_concurrency: int = Field(default=256, gt=0)  # concurrent rollouts; fewer if the open-file limit requires it
    max_retries: int = Field(default=6, ge=0)  # attempts to resend a rollout that no server has accepted
    retry_backoff_s: Delay = 1.0  # before the first retry; doubles, up to 30 s
    port_range_low: int = Field(default=10_001, gt=0, lt=65_536)  # ports of a started stack's servers
    port_range_high: int = Field(default=20_000, gt=0, lt=65_536)  # the highest port

    @model_validator(mode="before")
    @classmethod
    def _move_gym_keys(cls, data: Any) -> Any:
        """Move Gym's own keys and servers to `overrides`; what is there already takes precedence."""
        if not isinstance(data, dict) or not isinstance(overrides := data.get("overrides") or {}, Mapping):
            return data
        own = {name: value for name, value in data.items() if name in cls.model_fields or not _is_gym_key(name, value)}
        moved = {name: value for name, value in data.items() if name not in own}
        return {**own, "overrides": {**moved, **overrides}} if moved else data


def check_nemo_gym(key: str, section: NemoGymConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for a stack that can neither be reached nor started."""
    _check_stack(key, section)
    check_session_timeout(key, section.timeout_s, config)
    check_reward_range(key, section)
    if section.port_range_low > section.port_range_high:
        low, high = section.port_range_low, section.port_range_high
        raise ConfigError(f"{key}.port_range_low", low, f"must be at most port_range_high = {high}")
    reject_wrappers(key, section, "NeMo Gym runs one row each; allowed: false")


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The policy as a stack's model server calls it."""

    base_url: str | list[str]  # ends with /v1; several take turns
    api_key: str
    model_name: str


def _is_gym_key(name: str, value: Any) -> bool:
    """Return whether a key is one of Gym's own, or names one of its servers."""
    return name in GYM_KEYS or (
        isinstance(value, Mapping) and any(kind in value for kind in (*SERVER_KINDS, "_inherit_from"))
    )


def _check_stack(key: str, section: NemoGymConfig) -> None:
    if (section.head_url is None) == (section.config_paths is None):
        both = {"head_url": section.head_url, "config_paths": section.config_paths}
        raise ConfigError(key, both, "a stack is either reached by head_url or started from config_paths")
    if section.config_paths is not None and not section.config_paths:
        raise ConfigError(f"{key}.config_paths", [], "must name a file of NeMo Gym's configuration")
    if section.head_url is None:
        assert section.config_paths is not None
        if section.python is not None and section.version is not None:
            raise ConfigError(f"{key}.version", section.version, f"{key}.python has a nemo-gym of its own; remove one")
        check_configuration(key, section.config_paths, section.overrides, section.python, section.version)
        return
    parts = urlsplit(section.head_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}.head_url", section.head_url, "must be an address such as http://127.0.0.1:11000")
    for name, value in (("overrides", section.overrides), ("python", section.python), ("version", section.version)):
        if value:
            raise ConfigError(f"{key}.{name}", value, "only for a stack that the run starts; this one runs already")


NEMO_GYM = Entry(
    NemoGymConfig, make=factory_at("nemo_rl.environments.nemo_gym.client:open_gym_client"), check=check_nemo_gym
)
