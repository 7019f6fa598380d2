"""An entry of `env` of type nemo_gym: a stack of NeMo Gym servers, reached or started."""

from typing import Any

from pydantic import Field

from nemo_rl.config.environment import EnvironmentSection


class NemoGymSection(EnvironmentSection):
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
