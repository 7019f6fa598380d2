"""What every entry of `env` has; the types of entries: env.py and nemo_gym.py."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.kinds import Entry, factory_at
from nemo_rl.config.section import Section


class BatchingConfig(Section):
    """Collect the items of many pipelined rollouts into one call."""

    enabled: bool = False
    max_batch_size: int = Field(default=64, gt=0)
    max_wait_ms: float = Field(default=20.0, ge=0)
    max_queue_size: int = Field(default=100_000, gt=0)  # items waiting; more have to wait for room
    max_calls: int | None = Field(default=None, gt=0)  # at once; items gather while so many run. None: any number


class RemoteConfig(Section):
    """Run the environment in Ray actors."""

    enabled: bool = False
    num_actors: int = Field(default=1, gt=0)
    max_concurrency: int = Field(default=16, gt=0)  # calls at once in each


class EnvironmentConfig(Section):
    """What every environment has."""

    type: str | None = None
    timeout_s: float = Field(default=120.0, gt=0)  # of one call
    batching: BatchingConfig = BatchingConfig()
    remote: RemoteConfig = RemoteConfig()
    scorers: list[str] = Field(default_factory=list)  # entries of `scorers` that add their rewards at the end


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


class MathEnvironmentConfig(EnvironmentConfig):
    """Answers compared as mathematics."""

    num_workers: int = Field(default=2, gt=0)  # processes
    verify_timeout_s: float = Field(default=10.0, gt=0)  # of one answer


class ReasoningGymEnvironmentConfig(EnvironmentConfig):
    """Answers scored by reasoning_gym's own verifiers; the prompt's state names the task."""

    num_workers: int = Field(default=0, ge=0)  # processes; 0: a thread
    partial_credit: bool = False  # False: 1 for a full score, else 0
    require_stop: bool = False  # an answer cut by its token limit scores 0


class SlidingPuzzleEnvironmentConfig(EnvironmentConfig):
    """A game of several turns: slide tiles until they are in order."""

    move_reward: float = 0.0
    invalid_move_penalty: float = 0.0


class ToolsEnvironmentConfig(EnvironmentConfig):
    """A calculator and Python in a sandbox, then the final answer."""

    tools: list[Literal["calculator", "python"]] = Field(default_factory=lambda: ["calculator"])
    num_workers: int = Field(default=2, gt=0)  # tool processes at once
    cpu_s: float = Field(default=2.0, gt=0)
    wall_s: float = Field(default=5.0, gt=0)
    memory_bytes: int = Field(default=512 * 1024 * 1024, gt=0)
    max_output_chars: int = Field(default=4096, gt=0)


class AgentConfig(EnvironmentConfig):
    """An agent that owns its loop: exactly one of `function` and `command`. Its reward is what it returns or posts, or
    what the environment `scored_by` gives to its last conversation. `timeout_s` bounds one run."""

    function: str | None = None  # a dotted path: (prompt, base_url, api_key) -> reward, rewards by name, or AgentResult
    command: list[str] | None = None  # run with OPENAI_BASE_URL, OPENAI_API_KEY and the prompt as JSON in its input
    scored_by: str | None = None  # another entry of `env`
    max_concurrency: int = Field(default=64, gt=0)  # runs at once
    in_tasks: bool = False  # function: each run in a Ray task, a process of its own


class RewardModelEnvironmentConfig(EnvironmentConfig):
    """One turn whose rewards are those of its `scorers` alone."""


class CustomEnvironmentConfig(EnvironmentConfig):
    """A class or a function by dotted path, with the arguments it is made with."""

    kwargs: dict[str, Any] = Field(default_factory=dict)


MATH = Entry(MathEnvironmentConfig, make=factory_at("nemo_rl.environments.math:MathEnvironment"))
REASONING_GYM = Entry(
    ReasoningGymEnvironmentConfig, make=factory_at("nemo_rl.environments.reasoning_gym:ReasoningGymEnvironment")
)
SLIDING_PUZZLE = Entry(
    SlidingPuzzleEnvironmentConfig, make=factory_at("nemo_rl.environments.sliding_puzzle:SlidingPuzzleEnvironment")
)
TOOLS = Entry(ToolsEnvironmentConfig, make=factory_at("nemo_rl.environments.tools:ToolsEnvironment"))
REWARD_MODEL = Entry(
    RewardModelEnvironmentConfig, make=factory_at("nemo_rl.environments.reward_model:RewardModelEnvironment")
)
AGENT = Entry(AgentConfig, make=factory_at("nemo_rl.launch.dependencies:make_agent"))
NEMO_GYM = Entry(NemoGymConfig, make=factory_at("nemo_rl.launch.dependencies:open_nemo_gym"))
