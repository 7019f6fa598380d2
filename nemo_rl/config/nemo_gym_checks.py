"""What entries of `env` of type nemo_gym need."""

from urllib.parse import urlsplit

from nemo_rl.config.entry_checks import check_session_timeout, reject_wrappers
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.nemo_gym import NemoGymConfig
from nemo_rl.errors import ConfigError


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
