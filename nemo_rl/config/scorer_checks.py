"""What `scorers`, `env.<name>.scorers` and `reward_model` need of each other."""

from nemo_rl.config.entry_checks import check_timeout
from nemo_rl.config.env import RewardModelEnvironmentConfig
from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.scorers import BatchedScorerConfig, EndpointScorerConfig, JudgeScorerConfig, RewardModelScorerConfig
from nemo_rl.errors import ConfigError


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
