"""What every entry of `env` has; the types of entries: env.py and nemo_gym.py."""

from pydantic import Field

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
