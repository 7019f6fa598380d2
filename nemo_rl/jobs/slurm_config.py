"""The section `slurm` of `nemo-rl submit`: jobs, their components, the layout of server processes, and its checks."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import Field

from nemo_rl.config.collect import CollectRunConfig, check_sampled
from nemo_rl.config.kinds import Section
from nemo_rl.config.loading import read_config, resolved_yaml
from nemo_rl.config.server import ServerConfig
from nemo_rl.config.value_types import AnyText, Processes
from nemo_rl.errors import ConfigError

SERVER = "slurm.server"  # the key of the section
PLACEHOLDER_ADDRESS = "http://found-in-the-job"  # replaced in each array task by the address of its own servers
# Options of sbatch and srun that the scripts set themselves.
JOB_OPTIONS = ("array", "dependency", "job-name", "output", "error", "nodes", "open-mode", "signal", "parsable", "wrap")
STEP_OPTIONS = ("nodes", "ntasks", "ntasks-per-node", "output", "error", "container-image", "container-mounts")
SHORT_FORMS = {
    "-a": "array",
    "-d": "dependency",
    "-J": "job-name",
    "-o": "output",
    "-e": "error",
    "-N": "nodes",
    "-n": "ntasks",
}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_OPTION = re.compile(r"--(.*[-_])?(key|token|secret|password)", re.IGNORECASE)


class SlurmComponentConfig(Section):
    """One part of the job and the steps that run it. Dependencies belong to the job: `slurm.dependency`."""

    container: str | None = None  # image of the steps, with Slurm's plugin pyxis; None: the node itself
    mounts: list[str] = Field(default_factory=list)  # "/on/the/node:/in/the/container[:ro]"
    environment: dict[str, AnyText] = Field(default_factory=dict)  # variables of these steps only
    working_directory: str | None = None  # None: that of `nemo-rl submit`, or the container's own
    srun_args: list[AnyText] = Field(default_factory=list)  # further arguments of srun


class SlurmServerConfig(SlurmComponentConfig):
    """OpenAI-compatible servers that an array task starts for its collection, served at one address."""

    model: str | None = None  # a Hugging Face name or a directory; None: part of `command`
    program: list[AnyText] | None = Field(default=None, min_length=1)  # before model and flags; None: `vllm serve`
    args: list[AnyText] = Field(default_factory=list)  # further arguments of `program`
    command: list[AnyText] | None = Field(default=None, min_length=1)  # another server; {host} and {port} are filled in
    tensor_parallel_size: int = Field(default=1, gt=0)  # GPUs of a replica on each of its nodes
    num_replicas: Processes = 1  # copies of the model in an array task
    nodes_per_replica: int = Field(default=1, gt=0)  # above 1: pipeline stages of vLLM, one per node
    num_tasks: int | None = Field(default=None, gt=0)  # server processes; None: as few as possible
    balance: Literal["auto", "vllm", "router"] = (
        "auto"  # what distributes requests: vLLM's data parallelism or `nemo-rl route`
    )
    health_path: str = "/health"  # answers 200 once the server is up
    start_timeout_s: int = Field(default=1800, gt=0)  # until all servers of a task are up


class SlurmCollectionConfig(SlurmComponentConfig):
    """`nemo-rl collect`."""

    num_tasks: int = Field(default=1, gt=0)  # processes that share the servers; each collects its own chunk


class SlurmAggregationConfig(SlurmComponentConfig):
    """`nemo-rl merge` and `nemo-rl profile`, in a job of their own after all collections have succeeded."""

    enabled: bool = True  # false: merge and profile by hand
    num_tasks: Literal[1] = 1  # one writer
    allow_partial: bool = False  # merge and profile once all tasks have ended, even if some failed
    profile_args: list[AnyText] = Field(default_factory=list)  # further arguments of `nemo-rl profile`
    partition: str | None = None  # None: the collection's
    qos: str | None = None  # None: the collection's
    time: str | None = None  # None: the collection's
    sbatch_args: list[AnyText] = Field(
        default_factory=list
    )  # further arguments of sbatch; the collection's do not apply


class SlurmConfig(Section):
    """The jobs; None leaves a value to Slurm's defaults."""

    job_name: str = Field(default="nemo-rl", pattern=r"^[\w.+-]+$")  # as squeue shows it
    partition: str | None = None  # sbatch --partition
    account: str | None = None  # sbatch --account
    qos: str | None = None  # sbatch --qos
    time: str | None = None  # time limit of one array task, in Slurm's format: "04:00:00"
    nodes: int = Field(default=1, gt=0)  # nodes per array task
    gpus: int | None = Field(default=None, gt=0)  # GPUs per node
    sbatch_args: list[AnyText] = Field(default_factory=list)  # further arguments of sbatch
    dependency: str | None = None  # dependency of the array: "afterok:1234"
    num_chunks: int = Field(default=1, gt=0)  # the array has one task per chunk and seed
    max_running: int | None = Field(default=None, gt=0)  # array tasks that run at the same time
    requeue: bool = True  # after a node failure or a preemption; the task then completes what is missing
    requeue_s_before_end: int | None = Field(
        default=None, gt=0
    )  # seconds before the time limit at which a task requeues itself
    directory: str | None = None  # directory of scripts and logs; None: slurm/ in the output directory
    setup: str = ""  # shell lines at the start of the job, on its first node: "module load cuda"
    program: list[AnyText] | None = Field(
        default=None, min_length=1
    )  # command of nemo-rl; None: this Python's, or `nemo-rl` in a container
    server: SlurmServerConfig | None = None  # None: `nemo-rl collect` starts its own engine or uses server.address
    collection: SlurmCollectionConfig = SlurmCollectionConfig.with_defaults()
    aggregation: SlurmAggregationConfig = SlurmAggregationConfig.with_defaults()


class SlurmTrainingConfig(Section):
    """The job of a training command; None leaves a value to Slurm's defaults."""

    job_name: str = Field(default="nemo-rl", pattern=r"^[\w.+-]+$")  # as squeue shows it
    partition: str | None = None  # sbatch --partition
    account: str | None = None  # sbatch --account
    qos: str | None = None  # sbatch --qos
    time: str | None = None  # time limit in Slurm's format: "04:00:00"
    gpus: int | None = Field(default=None, gt=0)  # GPUs of the node
    sbatch_args: list[AnyText] = Field(default_factory=list)  # further arguments of sbatch
    dependency: str | None = None  # "afterok:1234"
    requeue: bool = True  # after a node failure, a preemption or the time limit; the job then resumes
    save_s_before_end: int = Field(default=300, gt=0)  # seconds before the time limit at which it saves and is requeued
    restarts: int = Field(default=10, ge=0)  # restarts by `nemo-rl run` in each start of the job
    directory: str | None = None  # directory of script, checkpoints and logs; None: slurm_runs/0001, ...
    setup: str = ""  # shell lines at the start of the job: "module load cuda"
    program: list[AnyText] | None = Field(default=None, min_length=1)  # command of nemo-rl; None: this Python's


class SubmitTrainingConfig(Section):
    """The overrides before `--` of `nemo-rl submit ... -- COMMAND`."""

    slurm: SlurmTrainingConfig = SlurmTrainingConfig.with_defaults()


def check_slurm_training(slurm: SlurmTrainingConfig) -> None:
    """Raise ConfigError for the first value that makes no valid job."""
    for name in ("partition", "account", "qos", "time", "dependency", "directory"):
        _check_one_line(f"slurm.{name}", getattr(slurm, name))
    for argument in slurm.sbatch_args:
        _check_one_line("slurm.sbatch_args", argument)
    _check_arguments("slurm.sbatch_args", slurm.sbatch_args, JOB_OPTIONS)


def _check_one_line(key: str, value: str | None) -> None:
    if value is not None and (not value.isprintable() or not value):
        raise ConfigError(key, value, "must be one line of text")


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """Server processes, numbered node by node as Slurm numbers the tasks of a step."""

    num_tasks: int  # processes on all nodes of the job
    tasks_per_node: int
    replicas_per_task: int
    tasks_per_group: int  # processes that share one vLLM address; the first of each group listens
    parallelism: str  # within a group: "data" or "pipeline"

    @property
    def num_groups(self) -> int:
        return self.num_tasks // self.tasks_per_group

    @property
    def needs_router(self) -> bool:
        return self.num_groups > 1


def server_layout(server: SlurmServerConfig, num_nodes: int) -> ServerLayout:
    """Return the layout; raises ConfigError if replicas and processes do not fill the nodes evenly.

    Example: 8 replicas on 2 nodes are 2 processes of 4 replicas that form one group by vLLM's data parallelism; with
    `balance: router` they are 8 processes in 8 groups, served by `nemo-rl route`.
    """
    if server.nodes_per_replica > 1:
        return _make_multi_node_layout(server, num_nodes)
    is_one_group = server.command is None and server.balance != "router"
    default = min(num_nodes, server.num_replicas) if is_one_group else server.num_replicas
    num_tasks = server.num_tasks or default
    if server.num_replicas % num_tasks:
        problem = f"must divide {SERVER}.num_replicas = {server.num_replicas}"
        raise ConfigError(f"{SERVER}.num_tasks", num_tasks, problem)
    if num_tasks % num_nodes:
        problem = f"{num_tasks} server processes do not fill them evenly ({SERVER}.num_replicas, {SERVER}.num_tasks)"
        raise ConfigError("slurm.nodes", num_nodes, problem)
    tasks_per_group = num_tasks if is_one_group else 1
    return ServerLayout(
        num_tasks, num_tasks // num_nodes, server.num_replicas // num_tasks, tasks_per_group, parallelism="data"
    )


def _make_multi_node_layout(server: SlurmServerConfig, num_nodes: int) -> ServerLayout:
    """Return one process per node, each with a part of a replica."""
    if server.balance == "vllm" and server.num_replicas > 1:
        raise ConfigError(f"{SERVER}.balance", "vllm", "replicas over several nodes are spread by our router")
    num_tasks = server.num_replicas * server.nodes_per_replica
    if num_tasks != num_nodes:
        raise ConfigError(
            "slurm.nodes", num_nodes, f"must be {SERVER}.num_replicas x {SERVER}.nodes_per_replica = {num_tasks}"
        )
    if server.num_tasks not in (None, num_tasks):
        raise ConfigError(f"{SERVER}.num_tasks", server.num_tasks, f"must be {num_tasks}: one on each node")
    return ServerLayout(num_tasks, 1, 1, server.nodes_per_replica, parallelism="pipeline")


def check_slurm(slurm: SlurmConfig) -> None:
    """Raise ConfigError for the first value that makes no valid job."""
    for key, value in _directive_values(slurm):
        _check_one_line(key, value)
    if slurm.requeue_s_before_end and not slurm.requeue:
        raise ConfigError("slurm.requeue_s_before_end", slurm.requeue_s_before_end, "needs slurm.requeue: true")
    for key, arguments in _sbatch_arguments(slurm):
        _check_arguments(key, arguments, JOB_OPTIONS)
    components = {"collection": slurm.collection, "aggregation": slurm.aggregation, "server": slurm.server}
    for name, component in components.items():
        if component is not None:
            _check_component(f"slurm.{name}", component)
    if slurm.server is not None:
        _check_server(slurm.server, slurm.nodes)
    elif slurm.collection.num_tasks % slurm.nodes:
        problem = f"slurm.collection.num_tasks = {slurm.collection.num_tasks} does not fill them evenly"
        raise ConfigError("slurm.nodes", slurm.nodes, problem)


def _sbatch_arguments(slurm: SlurmConfig) -> Iterator[tuple[str, list[str]]]:
    yield "slurm.sbatch_args", slurm.sbatch_args
    yield "slurm.aggregation.sbatch_args", slurm.aggregation.sbatch_args


def _directive_values(slurm: SlurmConfig) -> Iterator[tuple[str, str]]:
    """Yield the values written to #SBATCH lines, in which no quoting can carry a line break."""
    for name in ("partition", "account", "qos", "time", "dependency", "directory"):
        if (value := getattr(slurm, name)) is not None:
            yield f"slurm.{name}", value
    for name in ("partition", "qos", "time"):
        if (value := getattr(slurm.aggregation, name)) is not None:
            yield f"slurm.aggregation.{name}", value
    for key, arguments in _sbatch_arguments(slurm):
        yield from ((key, argument) for argument in arguments)


def _check_arguments(key: str, arguments: Sequence[str], reserved_options: Sequence[str]) -> None:
    for argument in arguments:
        if not argument.startswith("-"):
            raise ConfigError(key, argument, "must begin with -; a value follows its option: --name=value")
        option = argument.split("=")[0]
        name = option.removeprefix("--") if option.startswith("--") else SHORT_FORMS.get(option[:2])
        if name == "dependency":
            raise ConfigError(key, argument, "a dependency is the job's: set slurm.dependency")
        if name in reserved_options:
            raise ConfigError(key, argument, "is set by the script, from other keys of `slurm`")


def _check_component(key: str, component: SlurmComponentConfig) -> None:
    _check_arguments(f"{key}.srun_args", component.srun_args, STEP_OPTIONS)
    for name, value in component.environment.items():
        if not VARIABLE.fullmatch(name):
            raise ConfigError(f"{key}.environment.{name}", "(not shown)", "is no name of a variable")
        if "\0" in value:
            raise ConfigError(f"{key}.environment.{name}", "(not shown)", "holds a zero byte")
    image = Path(component.container or "")
    if image.is_absolute() and image.parent.is_dir() and not image.exists():
        raise ConfigError(f"{key}.container", component.container, f"no such image in {image.parent}")
    if component.mounts and component.container is None:
        raise ConfigError(f"{key}.mounts", component.mounts, f"only a container has mounts: set {key}.container")
    for mount in component.mounts:
        parts = mount.split(":")
        if len(parts) not in (2, 3) or "," in mount or not all(parts):
            raise ConfigError(f"{key}.mounts", mount, "must be /on/the/node:/in/the/container, perhaps with :ro")


def _check_server(server: SlurmServerConfig, num_nodes: int) -> None:
    if (server.model is None) == (server.command is None):
        problem = f"exactly one of {SERVER}.model and {SERVER}.command must be set"
        raise ConfigError(f"{SERVER}.model", server.model, problem)
    _check_no_secret(f"{SERVER}.args", server.args)
    _check_no_secret(f"{SERVER}.command", server.command or ())
    if not server.health_path.startswith("/") or not server.health_path.isprintable() or " " in server.health_path:
        raise ConfigError(f"{SERVER}.health_path", server.health_path, "must be a path that begins with /")
    if server.command is not None:
        _check_command(server, server.command)
    server_layout(server, num_nodes)


def _check_no_secret(key: str, words: Sequence[str]) -> None:
    """Refuse secrets in commands, which are part of the script and visible in the node's process list."""
    for word in words:
        option = word.split("=")[0]
        if SECRET_OPTION.fullmatch(option):
            problem = "a secret is no argument; give it as a variable in slurm.server.environment (vLLM: VLLM_API_KEY)"
            raise ConfigError(key, option, problem)


def _check_command(server: SlurmServerConfig, command: Sequence[str]) -> None:
    vllm_fields = {name: SlurmServerConfig.model_fields[name] for name in ("program", "args", "tensor_parallel_size")}
    vllm_fields["nodes_per_replica"] = SlurmServerConfig.model_fields["nodes_per_replica"]
    for name, field in vllm_fields.items():
        value = getattr(server, name)
        if value != field.get_default(call_default_factory=True):
            raise ConfigError(f"{SERVER}.{name}", value, f"belongs to {SERVER}.model; {SERVER}.command is whole")
    if server.balance == "vllm":
        raise ConfigError(f"{SERVER}.balance", "vllm", f"replicas of {SERVER}.command are spread by our router")
    if server.num_tasks not in (None, server.num_replicas):
        problem = f"a process of {SERVER}.command is one replica, and {SERVER}.num_replicas = {server.num_replicas}"
        raise ConfigError(f"{SERVER}.num_tasks", server.num_tasks, problem)
    if not any("{port}" in word for word in command):
        raise ConfigError(f"{SERVER}.command", command, "must say {port} somewhere: it is found on the node")


class SubmitRunConfig(CollectRunConfig):
    """The configuration of `nemo-rl submit`."""

    slurm: SlurmConfig = SlurmConfig.with_defaults()


def load_submit_config(path: Path, overrides: Sequence[str] = ()) -> SubmitRunConfig:
    """Load the configuration of a recipe with overrides in Hydra's grammar; raises ConfigError."""
    config = read_config(SubmitRunConfig, path, overrides, family="collect", prepare=_prepare)
    check_slurm(config.slurm)
    if config.collect.chunk is not None:
        raise ConfigError("collect.chunk", config.collect.chunk, "the array has all chunks: set slurm.num_chunks")
    check_sampled(config)
    return config


def collect_yaml(config: SubmitRunConfig) -> str:
    """Return the configuration that the jobs pass to `nemo-rl collect`: without `slurm`, and without seeds, which
    differ between jobs.

    The output directory is absolute: a container may start in another directory.
    """
    values = OmegaConf.to_container(OmegaConf.create(resolved_yaml(config)), resolve=False)
    assert isinstance(values, dict)
    del values["slurm"], values["collect"]["seeds"], values["collect"]["chunk"]
    values["collect"]["output_dir"] = str(Path(config.collect.output_dir).absolute())
    return OmegaConf.to_yaml(OmegaConf.create(values))


def _prepare(resolved: dict[str, Any]) -> None:
    """Fill in a placeholder address, in place, if the job starts the servers."""
    slurm, server = resolved.get("slurm"), resolved.setdefault("server", {})
    if not (isinstance(slurm, dict) and slurm.get("server") and isinstance(server, dict)):
        return
    if server.get("address") is not None:
        raise ConfigError("server.address", server["address"], "slurm.server starts servers of the job's own; set one")
    for name in server.keys() & ServerConfig.model_fields.keys() - {"address", *ServerConfig.OF_ADDRESS}:
        problem = "is of an engine in the collection's own process; slurm.server starts servers beside it"
        raise ConfigError(f"server.{name}", server[name], problem)
    server["address"] = PLACEHOLDER_ADDRESS
