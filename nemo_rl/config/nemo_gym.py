"""An entry of `env` of type nemo_gym: a stack of NeMo Gym servers, reached or started."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from nemo_rl.config.environment import EnvironmentConfig


class NemoGymConfig(EnvironmentConfig):
    """NeMo Gym's agents run the rollouts of the rows that name them: exactly one of `head_url` and `config_paths`."""

    head_url: str | None = None  # of a stack that runs already, e.g. http://127.0.0.1:11000
    config_paths: list[str] | None = None  # a stack started and stopped by the run: Gym's YAML files
    overrides: dict[str, Any] = Field(default_factory=dict)  # further keys of Gym's configuration; they win
    python: str | None = None  # of the started stack: an interpreter with nemo-gym; None: one made once, in the cache
    start_timeout_s: float = Field(default=600.0, gt=0)  # for all servers to answer
    timeout_s: float = Field(default=480.0, gt=0)  # of one rollout
    max_concurrency: int = Field(default=256, gt=0)  # rollouts at once; fewer where the limit of open files says so
    max_retries: int = Field(default=6, ge=0)  # of a rollout that no server has taken
    retry_backoff_s: float = Field(default=1.0, ge=0)  # before the first retry; doubles, up to 30 s
    port_range_low: int = Field(default=10_001, gt=0, lt=65_536)  # of a started stack's servers
    port_range_high: int = Field(default=20_000, gt=0, lt=65_536)


# NeMo-RL's recipes write Gym's configuration beside its own keys.
SERVER_KINDS = ("responses_api_agents", "responses_api_models", "resources_servers")
GYM_KEYS = frozenset(
    {"default_host", "error_on_almost_servers", "nemo_gym_log_dir", "ray_head_node_address", "use_absolute_ip"}
)


def collect_gym_overrides(config: dict[str, Any]) -> None:
    """Move Gym's own keys and servers to `overrides` in every entry of this type, in place; what stands there wins."""
    entries = config.get("env")
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, dict) and (entry.get("type") or name) == "nemo_gym":
            _move_gym_keys(entry)


def _move_gym_keys(entry: dict[str, Any]) -> None:
    own = [name for name, value in entry.items() if name in GYM_KEYS or (name != "overrides" and _is_server(value))]
    if own and isinstance(entry.setdefault("overrides", {}), dict):
        for name in own:
            entry["overrides"].setdefault(name, entry.pop(name))


def _is_server(value: Any) -> bool:
    return isinstance(value, Mapping) and any(kind in value for kind in SERVER_KINDS)
