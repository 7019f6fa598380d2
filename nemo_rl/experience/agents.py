"""The section and check of `env.<name>.type: agent`: an agent that owns its loop and talks to the gateway."""

from nemo_rl.config.entry_checks import check_agent_runner, reject_wrappers
from nemo_rl.config.kinds import Entry, factory_at
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.environments.harness import HarnessConfig, check_harness
from nemo_rl.errors import ConfigError


class AgentConfig(HarnessConfig):
    """An agent that owns its loop: exactly one of `function` and `command`.

    A command without {prompt} and {prompt_file} reads the prompt as JSON from its standard input. The reward is what
    the agent returns or reports, or what the environment `scored_by` gives to its last conversation.
    """

    function: str | None = None  # a dotted path: (prompt, base_url, api_key) -> reward, rewards by name, or AgentResult
    # command without {prompt}: fields of env_state that it reads; None: all if it rewards itself, none with `scored_by`
    # or `scorers`
    env_state_fields: list[str] | None = None
    in_tasks: bool = False  # function: each run in a Ray task, a process of its own


def check_agent(key: str, section: AgentConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for an agent that cannot run or be scored."""
    if (section.function is None) == (section.command is None):
        both = {"function": section.function, "command": section.command}
        raise ConfigError(key, both, "an agent has either a function or a command")
    if section.command is None:
        _check_function(key, section)
    else:
        _check_command(key, section, config)
    if section.in_tasks and section.function is None:
        raise ConfigError(f"{key}.in_tasks", True, "a command has a process of its own already; allowed: false")
    reject_wrappers(key, section, "agents run one prompt each; allowed: false (see in_tasks)")
    check_agent_runner(key, section, config)


def _check_function(key: str, section: AgentConfig) -> None:
    """Raise ConfigError for keys of a command."""
    problem = "a function runs in this process or in Ray's; only with command"
    for name in ("inherited_variables", "variables", "files"):
        if value := getattr(section, name):
            raise ConfigError(f"{key}.{name}", value, problem)
    if section.env_state_fields is not None:
        raise ConfigError(
            f"{key}.env_state_fields", section.env_state_fields, "a function reads all; only with command"
        )


def _check_command(key: str, section: AgentConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for a command that cannot start, and for a harness without a reward."""
    assert section.command is not None
    if not "".join(section.command[:1]).strip():
        raise ConfigError(f"{key}.command", section.command, "must begin with the name of a program")
    check_harness(key, section)
    if not section.is_harness:
        return
    if section.env_state_fields is not None:
        problem = "a command with {prompt} or {prompt_file} reads nothing else"
        raise ConfigError(f"{key}.env_state_fields", section.env_state_fields, problem)
    if section.scored_by is None and not section.scorers and config.gateway.token_env is None:
        problem = "such a command reports no reward; name an environment, or scorers, or gateway.token_env for a grader"
        raise ConfigError(f"{key}.scored_by", None, problem)


AGENT = Entry(AgentConfig, make=factory_at("nemo_rl.experience.agent_runtime:make_agent"), check=check_agent)
