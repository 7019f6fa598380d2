"""Rules that hold for every entry of `env` and `scorers`, and for `reward_model`; each entry's own check is run too."""

import importlib.util
from collections.abc import Mapping

from nemo_rl.config.environment import (
    AgentRunnerConfig,
    BatchedScorerConfig,
    EndpointScorerConfig,
    EnvironmentConfig,
    ModelScorerConfig,
    RolloutRunnerConfig,
)
from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.registries import ENVIRONMENTS, SCORERS
from nemo_rl.errors import ConfigError, suggest_name


def check_environments(config: RolloutRunConfig) -> None:
    """Raise ConfigError for the first entry of `env` that cannot run."""
    for name, section in config.env.items():
        key = f"env.{name}"
        for scorer in section.scorers:
            if scorer not in config.scorers:
                raise ConfigError(f"{key}.scorers", scorer, "no entry of scorers", known=config.scorers)
        entry = ENVIRONMENTS.entry(section.type or name, key=f"{key}.type")
        if entry.check is not None:
            entry.check(key, section, config)


def check_scorers(config: RolloutRunConfig) -> None:
    """Raise ConfigError for the first entry of `scorers` that cannot score or is not used, and for its placement."""
    used = {name for section in config.env.values() for name in section.scorers}
    for name, section in config.scorers.items():
        key = f"scorers.{name}"
        if name not in used:
            raise ConfigError(key, section.type, "never used; name it in env.<name>.scorers")
        if isinstance(section, BatchedScorerConfig):
            check_timeout(key, section.timeout_s, {"rollout.stall_timeout_s": config.rollout.stall_timeout_s})
        if isinstance(section, EndpointScorerConfig):
            _check_base_urls(key, section)
        entry = SCORERS.entry(section.type or name, key=f"{key}.type")
        if entry.check is not None:
            entry.check(key, section, config)
    _check_placement(config)


def check_agent_runner(key: str, section: AgentRunnerConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for wrappers, for `scored_by` that names no environment, and for a deadline beyond a limit."""
    reject_wrappers(key, section, "agents run one prompt each; allowed: false")
    environments = [name for name, other in config.env.items() if not isinstance(other, RolloutRunnerConfig)]
    if section.scored_by is not None and section.scored_by not in environments:
        problem = f"no entry of env that is an environment{suggest_name(section.scored_by, environments)}"
        raise ConfigError(f"{key}.scored_by", section.scored_by, problem)
    check_session_timeout(key, section.timeout_s, config)


def require_package(key: str, value: str, package: str, extra: str) -> None:
    """Raise ConfigError unless `package` can be imported; `extra` is the optional dependency that installs it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(key, value, f"needs the package {package}: install nemo-rl[{extra}]")


def check_call_timeout(key: str, call_timeout_s: float, timeout_s: float) -> None:
    """Raise ConfigError for a deadline of one request that is not below the rollout's."""
    if call_timeout_s >= timeout_s:
        raise ConfigError(f"{key}.call_timeout_s", call_timeout_s, f"must be below {key}.timeout_s = {timeout_s:g}")


def check_session_timeout(key: str, timeout_s: float, config: RolloutRunConfig) -> None:
    """Raise ConfigError for a rollout deadline at which the watchdog or the gateway would have given up already."""
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
    """Raise ConfigError for an entry that supports neither batching nor other processes; `problem` says why."""
    enabled = {
        "batching.enabled": section.batching.enabled,
        "remote.enabled": section.remote.enabled,
        "isolated": section.isolated,
    }
    for part, is_enabled in enabled.items():
        if is_enabled:
            raise ConfigError(f"{key}.{part}", True, problem)


def _check_base_urls(key: str, section: EndpointScorerConfig) -> None:
    for url in section.base_urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{key}.base_urls", url, "must begin with http:// or https://")


def _check_placement(config: RolloutRunConfig) -> None:
    """Raise ConfigError for a pool without GPUs, and for counts without a pool."""
    placement = config.reward_model
    if placement.enable and not any(isinstance(section, ModelScorerConfig) for section in config.scorers.values()):
        raise ConfigError("reward_model.enable", True, "there is no scorer of type reward_model")
    sizes = {"n_gpus_per_node": placement.n_gpus_per_node, "nnodes": placement.nnodes}
    for key, value in sizes.items():
        if placement.enable_resource_pool and value <= 0:
            problem = "a resource pool needs at least 1 (or enable_resource_pool: false)"
            raise ConfigError(f"reward_model.{key}", value, problem)
        if value < 0:
            raise ConfigError(f"reward_model.{key}", value, "must be 0 or more")
    is_async = isinstance(config, TrainingRunConfig) and config.algorithm.background.enabled
    if placement.shares_device and is_async:
        problem = "allowed: true, since the engine never sleeps while rollouts are collected in the background"
        raise ConfigError("reward_model.enable_resource_pool", False, problem)
    if placement.enable_resource_pool and not placement.enable:
        raise ConfigError("reward_model.enable_resource_pool", True, "needs reward_model.enable: true")
