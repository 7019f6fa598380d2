"""What agents of `env` need."""

from nemo_rl.config.entry_checks import check_session_timeout, reject_wrappers
from nemo_rl.config.env import AgentConfig
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.nemo_gym import NemoGymConfig
from nemo_rl.errors import ConfigError, suggest_name


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
