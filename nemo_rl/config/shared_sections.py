"""Sections about the run itself: `rollout`, `weight_sync`, `checkpointing`, `logger`, `cluster`, `gateway`."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from nemo_rl.config.images import GatewayImagesConfig
from nemo_rl.config.kinds import Section
from nemo_rl.config.registries import LOGGERS
from nemo_rl.config.value_types import AnyText, Delay, Port, Processes, Seconds

SECRET_NAME = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
START_S = 300.0
LOAD_BYTES_PER_S = 100e6  # a network disk that several processes read at once
DOWNLOAD_S = 3600.0  # allowed for downloading a model


def start_limit_s(model_path: str) -> float:
    """Return the time that a process may take to start and load a model.

    Example: 14B parameters in bfloat16 are 29.5 GB of files: 300 + 295 s.
    """
    size = weight_bytes(model_path)
    return START_S + (DOWNLOAD_S if size is None else size / LOAD_BYTES_PER_S)


def weight_bytes(model_path: str) -> int | None:
    """Return the size of a model's weight files, in a directory or in the Hugging Face cache; None: not here."""
    from huggingface_hub.constants import HF_HUB_CACHE  # here: most uses of the configuration need no hub

    directory = Path(model_path)
    if not directory.is_dir():
        directory = Path(HF_HUB_CACHE) / f"models--{model_path.replace('/', '--')}" / "blobs"
        files = list(directory.glob("*"))
    else:
        files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    return sum(file.stat().st_size for file in files) if files else None


class RolloutBoundsConfig(Section):
    """Bounds on retries and waits."""

    max_retries: int = Field(default=2, ge=0)  # retries of a generation request, with backoff
    retry_backoff_s: Delay = 0.5  # before the first retry; doubles
    stall_timeout_s: Seconds = 600.0  # longest time without any progress
    trajectory_selection: Literal["all", "longest"] = "all"  # which of an agent's histories are kept and trained on


def require_token_ids(write_token_columns: bool, info: ValidationInfo) -> bool:
    """Refuse columns of tokens that are not written."""
    if write_token_columns and not info.data.get("write_token_ids", True):
        raise ValueError("needs write_token_ids: true")
    return write_token_columns


class RolloutConfig(RolloutBoundsConfig):
    """Bounds of training: also on failures, and what is written to disk."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)  # share of a step's rollouts; above it the run stops
    min_group_size: int = Field(default=2, gt=0)  # survivors that a group needs to be trained on
    # prompts begun / prompts of a step, which takes the first complete; above 1.5 most steps would await deferred ones
    oversample: float = Field(default=1.0, ge=1, le=1.5)
    write_rollouts: bool = True  # rollouts/*.jsonl in the run directory
    write_token_ids: bool = False  # also the token ids of every message
    write_token_columns: bool = False  # with write_token_ids, also what the engine decided per token, compressed
    write_thumbnails: bool = False  # rollouts/images/<digest>.webp, small copies of images for the viewer

    _check_columns = field_validator("write_token_columns")(require_token_ids)


class WeightSyncConfig(Section):
    """`weight_sync`: how the policy's weights reach the engines, and how a refit is verified."""

    transport: str = "auto"  # an entry of WEIGHT_TRANSPORTS, or a dotted path; auto: by the layout
    # LoRA: a refit brings the adapter merged into whole weights, or alone, as a further version beside the base model;
    # auto: separate if rollouts are collected while the policy trains and nothing forbids it, else merged
    adapter: Literal["auto", "merged", "separate"] = "auto"
    verify: bool = False  # after every refit; the first one is always verified
    # mean difference of a log-prob; None: 1e-4 in float32, 5e-3 in float32 on CUDA, else 0.1
    verify_tolerance: float | None = Field(default=None, gt=0)
    num_probe_prompts: int = Field(default=8, gt=0)  # each with 32 sampled tokens


class CheckpointingConfig(Section):
    enabled: bool = False  # write checkpoints
    checkpoint_dir: str | None = None  # None: checkpoints/ in the run directory
    metric_name: str | None = None  # "val:accuracy", "train:reward"; None: keep the newest
    higher_is_better: bool = True  # whether a higher metric_name is better
    keep_top_k: int | None = Field(default=3, gt=0)  # None: all
    save_period: int = Field(default=10, gt=0)  # steps
    save_optimizer: bool = True  # false: a resumed run starts optimizer and schedule afresh
    max_failed_saves: int = Field(default=5, ge=0)  # failed saves in a row, e.g. on a full disk, that end the run
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

    project: str = "nemo-rl"  # the W&B project
    name: str | None = None  # the run's name in W&B; None: logger.run_name
    entity: str | None = None  # the W&B user or team; None: that of the key
    tags: list[str] = Field(default_factory=list)  # the run's tags in W&B, after those of logger.tags
    group: str | None = None  # the group of runs in W&B that this one belongs to


class WandbLoggerConfig(WandbConfig, MetricsLoggerConfig):
    """W&B as one of `logger.loggers`."""

    notes: str | None = None  # a sentence on the run in W&B


class TraceConfig(Section):
    """`logger.trace`: spans of steps, rollouts and engines on one timeline, in trace.json.gz of the run's directory."""

    enabled: bool = False  # write spans of the run
    otlp_endpoint: str | None = None  # also sent there, by OTLP over HTTP: http://collector:4318/v1/traces

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        if url is not None and not re.match(r"https?://[^/\s]+/", url):
            raise ValueError("an address such as http://collector:4318/v1/traces, with its path")
        return url


class ProfileConfig(Section):
    """`logger.profile`: torch profiles of chosen steps, in profiles/ of the run's directory and in its trace."""

    steps: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)  # training steps; each makes a large file


class LoggerConfig(Section):
    """`logger`: where metrics go, and what the terminal shows."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"  # level of nemo_rl's own log records
    log_dir: str = "runs"  # a run's directory is made in it: exp_001, exp_002, ...
    run_name: str | None = None  # the run's name in run.json, viewer and W&B; None: that of its directory
    tags: list[str] = Field(default_factory=list)  # words by which the run is found, also in W&B
    notes: str | None = None  # a sentence on the run, also in W&B
    wandb_enabled: bool = False  # offline if no key is set
    tensorboard_enabled: bool = False  # event files of TensorBoard in the run directory
    progress: bool = True  # the display in the terminal
    num_val_samples_to_print: int = Field(default=3, ge=0)  # conversations of each validation shown in the log
    train_samples_period: int = Field(default=0, ge=0)  # steps between two tables of training rollouts; 0: none
    monitor_gpus: bool = True  # log the use of this node's GPUs with each step, if nvidia-smi shows some
    rollout_details: int = Field(default=1, ge=0)  # groups of a step whose tokens rollouts/details.jsonl describes
    wandb: WandbConfig = WandbConfig.with_defaults()
    trace: TraceConfig = TraceConfig()
    profile: ProfileConfig = ProfileConfig()
    loggers: Annotated[dict[str, SerializeAsAny[MetricsLoggerConfig]], LOGGERS] = Field(default_factory=dict)

    @property
    def enabled(self) -> dict[str, MetricsLoggerConfig]:
        """Return the sections of the enabled loggers by name; `jsonl` always, and those of `loggers`."""
        enabled: dict[str, MetricsLoggerConfig] = {"jsonl": MetricsLoggerConfig(type="jsonl")}
        if self.wandb_enabled:
            own = self.wandb.model_dump()
            shared = {"name": own["name"] or self.run_name, "tags": [*self.tags, *own["tags"]], "notes": self.notes}
            enabled["wandb"] = WandbLoggerConfig(type="wandb", **own | shared)
        if self.tensorboard_enabled:
            enabled["tensorboard"] = MetricsLoggerConfig(type="tensorboard")
        return enabled | self.loggers


class ClusterConfig(Section):
    """The machines of a run; one process without Ray if that suffices."""

    gpus_per_node: int = Field(default=1, ge=0)  # GPUs that the run uses on each node; without meaning on a CPU
    num_nodes: int = Field(default=1, gt=0)  # nodes that the run uses
    gpu_memory_gb: float | None = Field(default=None, gt=0)  # GPU of the memory plan; None: as detected, else 80
    address: str | None = None  # a running Ray cluster, or "auto"; None: RAY_ADDRESS, else a local one if needed
    # variables of every process of the run, set before it starts; None: the value of the driver's environment
    env_vars: dict[str, AnyText | None] = Field(default_factory=dict)
    # time until all workers and engines are placed and answer; None: 300 s, and a second for each 100 MB of weights
    start_timeout_s: Seconds | None = None

    @field_validator("env_vars")
    @classmethod
    def _check_secrets(cls, values: dict[str, str | None]) -> dict[str, str | None]:
        for name, value in values.items():
            if value and SECRET_NAME.search(name):
                problem = f"the value of {name} is a secret, and config.yaml and the loggers would show it"
                raise ValueError(f"{problem}; allowed: null, which is {name} of the environment that starts the run")
        return values

    @property
    def environment(self) -> dict[str, str]:
        """Return `env_vars`, with this process's own values for those that are None, if it has them."""
        values = {name: os.environ.get(name) if value is None else value for name, value in self.env_vars.items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def placement_limit_s(self) -> float:
        """Return the time for nodes and devices to be available."""
        return self.start_timeout_s or START_S

    def start_limit_s(self, model_path: str) -> float:
        """Return the time for a model's workers or engine to answer."""
        return self.start_timeout_s or start_limit_s(model_path)


class GatewayConfig(Section):
    """`gateway`: the OpenAI-compatible server that agents call; started if an environment is an agent."""

    num_servers: Processes = 1  # HTTP servers that share the sessions, all in the driver's process
    host: str = "127.0.0.1"  # the address that the servers listen on; 0.0.0.0: all, for agents on other machines
    port: Port = 0  # port of the first server; 0: a free one, as for all others
    # the environment variable that holds the run's key, which opens sessions and posts rewards; None: a random key
    token_env: str | None = None
    allowed_hosts: list[str] = Field(default_factory=list)  # names by which clients reach it, besides this machine's
    tool_parser: str | None = "hermes"  # how tool calls are read from sampled text; None: agents without tools
    reasoning_parser: str | None = None  # how thinking is read from sampled text; think: <think> tags; None: not at all
    # responses of training under a client's json_schema, regex or grammar; untrained: served, with mask 0
    guided_calls: Literal["refused", "untrained"] = "refused"
    # requests that demand a call of a tool (tool_choice: required); auto: served as if they left it to the policy;
    # guided: the engine masks every other token, subject to guided_calls
    forced_tool_choice: Literal["refused", "auto", "guided"] = "refused"
    # requests whose tool_choice is none; hidden: their prompt has no tools, so that they begin a new chain
    tool_choice_none: Literal["shown", "hidden"] = "shown"
    # a conversation that has filled the context: 400, or an empty answer with finish_reason "length"
    full_context: Literal["error", "length"] = "error"
    session_ttl_s: Seconds = 3600.0  # until an unused session is closed
    max_sessions: int = Field(default=10_000, gt=0)  # open sessions of rollouts over all servers; opening more is 429
    max_client_sessions: int = Field(default=1000, ge=0)  # open sessions that clients opened; further ones get 429
    max_captured_mib: int = Field(default=512, gt=0)  # per server: records of NeMo Gym's token capture, in MiB
    images: GatewayImagesConfig = Field(default_factory=GatewayImagesConfig)  # images in requests, if the policy sees
    max_queued_calls: int = Field(default=10_000, ge=0)  # calls per server that wait; further ones get 429
    queue_timeout_s: Seconds = 300.0  # longest wait of a call; then it gets 429
