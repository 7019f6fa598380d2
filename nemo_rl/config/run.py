"""Sections about the run itself: `rollout`, `weight_sync`, `checkpointing`, `logger`, `cluster`, `gateway`."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny

from nemo_rl.config.registries import LOGGERS
from nemo_rl.config.section import Section


class RolloutBoundsConfig(Section):
    """Bounds on retries and waits."""

    max_retries: int = Field(default=2, ge=0)  # of one generation request, with backoff
    retry_backoff_s: float = Field(default=0.5, ge=0)  # before the first retry; doubles
    stall_timeout_s: float = Field(default=600.0, gt=0)  # without any progress
    trajectory_selection: Literal["all", "longest"] = "all"  # of an agent's histories: which are kept and trained on


class RolloutConfig(RolloutBoundsConfig):
    """Bounds of training: also on failures, and what is written to disk."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)  # of a step's rollouts; above it the run stops
    min_group_size: int = Field(default=2, gt=0)  # survivors that a group needs to be trained on
    write_rollouts: bool = True  # rollouts/*.jsonl in the run directory
    write_token_ids: bool = False


class WeightSyncConfig(Section):
    """`weight_sync`: how the policy's weights reach the engines, and how a refit is verified."""

    transport: str = "auto"  # an entry of WEIGHT_TRANSPORTS, or a dotted path; auto: by the layout
    verify: bool = False  # after every refit; the first one is always verified
    verify_tolerance: float | None = Field(default=None, gt=0)  # of a log-prob; None: 1e-4 in float32, else 0.1
    num_probe_prompts: int = Field(default=4, gt=0)


class CheckpointingConfig(Section):
    enabled: bool = False
    checkpoint_dir: str | None = None  # None: checkpoints/ in the run directory
    metric_name: str | None = None  # "val:accuracy", "train:reward"; None: keep the newest
    higher_is_better: bool = True
    keep_top_k: int | None = Field(default=3, gt=0)  # None: all
    save_period: int = Field(default=10, gt=0)  # steps
    save_optimizer: bool = True
    # [DD:]HH:MM:SS after start
    checkpoint_must_save_by: str | None = Field(default=None, pattern=r"^\d+:\d\d:\d\d(:\d\d)?$")


class MetricsLoggerConfig(Section):
    """Base of the sections of loggers, which record a run's metrics."""

    type: str | None = None  # the name of an entry, or a dotted path; None: the logger's own name


class CustomLoggerConfig(MetricsLoggerConfig):
    """A logger of your own, by dotted path."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # arguments after run_dir and config


class WandbConfig(Section):
    """`logger.wandb`: the W&B run."""

    project: str = "nemo-rl"
    name: str | None = None
    entity: str | None = None
    tags: list[str] = Field(default_factory=list)


class WandbLoggerConfig(WandbConfig, MetricsLoggerConfig):
    """W&B as one of `logger.loggers`."""


class LoggerConfig(Section):
    """`logger`: where metrics go, and what the terminal shows."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"  # of nemo_rl's own log records
    log_dir: str = "runs"  # a run's directory is made in it: exp_001, exp_002, ...
    wandb_enabled: bool = False  # offline where no key is set
    tensorboard_enabled: bool = False
    progress: bool = True  # the display in the terminal
    num_val_samples_to_print: int = Field(default=3, ge=0)
    wandb: WandbConfig = WandbConfig()
    loggers: Annotated[dict[str, SerializeAsAny[MetricsLoggerConfig]], LOGGERS] = Field(default_factory=dict)

    @property
    def enabled(self) -> dict[str, MetricsLoggerConfig]:
        """Return the sections of the enabled loggers by name; `jsonl` always, and those of `loggers`."""
        enabled: dict[str, MetricsLoggerConfig] = {"jsonl": MetricsLoggerConfig(type="jsonl")}
        if self.wandb_enabled:
            enabled["wandb"] = WandbLoggerConfig(type="wandb", **self.wandb.model_dump())
        if self.tensorboard_enabled:
            enabled["tensorboard"] = MetricsLoggerConfig(type="tensorboard")
        return enabled | self.loggers


class ClusterConfig(Section):
    """The machines of a run; one process without Ray where that suffices."""

    gpus_per_node: int = Field(default=1, ge=0)
    num_nodes: int = Field(default=1, gt=0)
    address: str | None = None  # of a running Ray cluster, or "auto"; None: RAY_ADDRESS, else a local one if needed
    start_timeout_s: float = Field(default=300.0, gt=0)  # for all workers and engines to be placed and to answer


class GatewayConfig(Section):
    """`gateway`: the OpenAI-compatible server that agents call; started where an environment is an agent."""

    num_servers: int = Field(default=1, gt=0)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, lt=65536)  # of the first server; 0: a free one, as all others have
    token: str | None = None  # None: a random one where host is not a loopback address
    tool_parser: str | None = "hermes"
    reasoning_parser: str | None = None
    session_ttl_s: float = Field(default=3600.0, gt=0)
    max_sessions: int = Field(default=10_000, gt=0)
