"""Cross-field checks of `env`, `scorers` and `reward_model`."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from nemo_rl.config.environment import AgentConfig, EnvironmentConfig, NemoGymConfig, RewardModelEnvironmentConfig
from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.scorers import BatchedScorerConfig, EndpointScorerConfig, JudgeScorerConfig, RewardModelScorerConfig
from nemo_rl.errors import ConfigError, suggest_name


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


def check_agents(config: RolloutRunConfig) -> None:
    """Raise ConfigError for the first agent that cannot run."""
    agents = {name: section for name, section in config.env.items() if isinstance(section, AgentConfig)}
    for name, section in agents.items():
        _check_entry_point(f"env.{name}", section)
        _check_scorer(f"env.{name}", section, config)
        check_session_timeout(f"env.{name}", section.timeout_s, config)


def _check_entry_point(key: str, section: AgentConfig) -> None:
    if (section.function is None) == (section.command is None):
        both = {"function": section.function, "command": section.command}
        raise ConfigError(key, both, "an agent has either a function or a command")
    if section.command is not None and not section.command:
        raise ConfigError(f"{key}.command", [], "must name a program")
    if section.in_tasks and section.function is None:
        raise ConfigError(f"{key}.in_tasks", True, "a command has a process of its own already; allowed: false")
    reject_wrappers(key, section, "agents run one prompt each; allowed: false (see in_tasks)")


def _check_scorer(key: str, section: AgentConfig, config: RolloutRunConfig) -> None:
    scorer = section.scored_by
    if scorer is None:
        return
    environments = [name for name, other in config.env.items() if not isinstance(other, AgentConfig | NemoGymConfig)]
    if scorer not in environments:
        problem = f"no entry of env that is an environment{suggest_name(scorer, environments)}"
        raise ConfigError(f"{key}.scored_by", scorer, problem)


def check_nemo_gym(config: RolloutRunConfig) -> None:
    """Raise ConfigError for the first stack that can neither be reached nor started."""
    for name, section in config.env.items():
        if isinstance(section, NemoGymConfig):
            _check_stack(f"env.{name}", section)
            _check_limits(f"env.{name}", section, config)


def _check_stack(key: str, section: NemoGymConfig) -> None:
    if (section.head_url is None) == (section.config_paths is None):
        both = {"head_url": section.head_url, "config_paths": section.config_paths}
        raise ConfigError(key, both, "a stack is either reached by head_url or started from config_paths")
    if section.config_paths is not None and not section.config_paths:
        raise ConfigError(f"{key}.config_paths", [], "must name a file of NeMo Gym's configuration")
    if section.head_url is None:
        return
    parts = urlsplit(section.head_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}.head_url", section.head_url, "must be an address such as http://127.0.0.1:11000")
    for name, value in (("overrides", section.overrides), ("python", section.python)):
        if value:
            raise ConfigError(f"{key}.{name}", value, "is for a stack that is started; this one runs already")


def _check_limits(key: str, section: NemoGymConfig, config: RolloutRunConfig) -> None:
    check_session_timeout(key, section.timeout_s, config)
    if section.port_range_low > section.port_range_high:
        low, high = section.port_range_low, section.port_range_high
        raise ConfigError(f"{key}.port_range_low", low, f"must be at most port_range_high = {high}")
    reject_wrappers(key, section, "NeMo Gym runs one row each; allowed: false")


def check_scorers(config: RolloutRunConfig) -> None:
    """Raise ConfigError for the first scorer that cannot score, or environment that has none it needs."""
    used = {name for section in config.env.values() for name in section.scorers}
    for task, section in config.env.items():
        for name in section.scorers:
            if name not in config.scorers:
                raise ConfigError(f"env.{task}.scorers", name, "no entry of scorers", known=config.scorers)
        if isinstance(section, RewardModelEnvironmentConfig) and not section.scorers:
            raise ConfigError(f"env.{task}.scorers", [], "its rewards are those of scorers: must name one or more")
    for name, section in config.scorers.items():
        if name not in used:
            raise ConfigError(f"scorers.{name}", section.type, "nobody asks it; name it in env.<name>.scorers")
        limits = {"rollout.stall_timeout_s": config.rollout.stall_timeout_s}
        if isinstance(section, BatchedScorerConfig):
            check_timeout(f"scorers.{name}", section.timeout_s, limits)
        if isinstance(section, EndpointScorerConfig):
            _check_endpoint(name, section)
    _check_placement(config)


def _check_endpoint(name: str, section: EndpointScorerConfig) -> None:
    for url in section.base_urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"scorers.{name}.base_urls", url, "must begin with http:// or https://")
    if isinstance(section, JudgeScorerConfig):
        low, high = section.min_score, section.max_score
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"scorers.{name}.min_score", low, f"must be below max_score = {high:g}")


def _check_placement(config: RolloutRunConfig) -> None:
    """verl's keys: a pool of its own has GPUs; without one nothing is counted."""
    placement = config.reward_model
    models = [name for name, section in config.scorers.items() if isinstance(section, RewardModelScorerConfig)]
    if placement.enable and not models:
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
        problem = "allowed: true, since the engine never sleeps between rollouts that are collected in the background"
        raise ConfigError("reward_model.enable_resource_pool", False, problem)
    if placement.enable_resource_pool and not placement.enable:
        raise ConfigError("reward_model.enable_resource_pool", True, "needs reward_model.enable: true")
