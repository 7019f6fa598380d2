"""The section and check of `env.<name>.type: agent`: an agent that owns its loop and talks to the gateway."""

from pydantic import Field

from nemo_rl.config.entry_checks import check_agent_runner, reject_wrappers
from nemo_rl.config.environment import AgentRunnerConfig
from nemo_rl.config.kinds import Entry, factory_at
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.errors import ConfigError


class AgentConfig(AgentRunnerConfig):
    """An agent that owns its loop: exactly one of `function` and `command`.

    Its reward is what it returns or reports, or what the environment `scored_by` gives to its last conversation.
    """

    function: str | None = None  # a dotted path: (prompt, base_url, api_key) -> reward, rewards by name, or AgentResult
    command: list[str] | None = None  # run with OPENAI_BASE_URL, OPENAI_API_KEY and the prompt as JSON on its stdin
    # command: environment variables that it inherits, besides PATH, HOME, LANG and TMPDIR
    inherited_variables: list[str] = Field(default_factory=list)
    # command: fields of env_state that it reads; None: all if it rewards itself, none with `scored_by` or `scorers`
    env_state_fields: list[str] | None = None
    in_tasks: bool = False  # function: each run in a Ray task, a process of its own


def check_agent(key: str, section: AgentConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for an agent that cannot run or be scored."""
    if (section.function is None) == (section.command is None):
        both = {"function": section.function, "command": section.command}
        raise ConfigError(key, both, "an agent has either a function or a command")
    if section.command is not None and not "".join(section.command[:1]).strip():
        raise ConfigError(f"{key}.command", section.command, "must begin with the name of a program")
    if section.command is None and section.inherited_variables:
        problem = "a function runs in this process or in Ray's; only with command"
        raise ConfigError(f"{key}.inherited_variables", section.inherited_variables, problem)
    if section.command is None and section.env_state_fields is not None:
        raise ConfigError(
            f"{key}.env_state_fields", section.env_state_fields, "a function reads all; only with command"
        )
    if section.in_tasks and section.function is None:
        raise ConfigError(f"{key}.in_tasks", True, "a command has a process of its own already; allowed: false")
    reject_wrappers(key, section, "agents run one prompt each; allowed: false (see in_tasks)")
    check_agent_runner(key, section, config)


AGENT = Entry(AgentConfig, make=factory_at("nemo_rl.experience.agent_runtime:make_agent"), check=check_agent)
