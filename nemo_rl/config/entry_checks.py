"""What entries of `env` and `scorers` have in common, whatever their kind."""

from collections.abc import Mapping

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.errors import ConfigError


def check_session_timeout(key: str, timeout_s: float, config: RolloutRunConfig) -> None:
    """A rollout that others run ends before the watchdog, and before the gateway forgets its session."""
    limits = {
        "rollout.stall_timeout_s": config.rollout.stall_timeout_s,
        "gateway.session_ttl_s": config.gateway.session_ttl_s,
    }
    check_timeout(key, timeout_s, limits)


def check_timeout(key: str, timeout_s: float, limits: Mapping[str, float]) -> None:
    """Raise ConfigError for `<key>.timeout_s` that is not below each of the limits, which are seconds by key."""
    for name, limit in limits.items():
        if timeout_s >= limit:
            raise ConfigError(f"{key}.timeout_s", timeout_s, f"must be below {name} = {limit:g}")


def reject_wrappers(key: str, section: EnvironmentConfig, problem: str) -> None:
    """Raise ConfigError for an entry that can be neither batched nor put into actors; `problem` says why."""
    for part, enabled in (("batching", section.batching.enabled), ("remote", section.remote.enabled)):
        if enabled:
            raise ConfigError(f"{key}.{part}.enabled", True, problem)
