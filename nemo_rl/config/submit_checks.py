"""Which values of `slurm` no job can be made of; dependencies are the job's alone."""

import re
from collections.abc import Iterator, Sequence

from nemo_rl.config.server_layout import server_layout
from nemo_rl.config.submit import SlurmComponentConfig, SlurmConfig, SlurmServerConfig
from nemo_rl.errors import ConfigError

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


def check_slurm(slurm: SlurmConfig) -> None:
    """Raise ConfigError for the first thing that no job can be made of."""
    for key, value in _directive_values(slurm):
        if not value.isprintable() or not value:
            raise ConfigError(key, value, "must be one line of text")
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
    """What stands in lines that bash takes for comments, so that no quoting can carry a line break."""
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
    if component.mounts and component.container is None:
        raise ConfigError(f"{key}.mounts", component.mounts, f"only a container has mounts: set {key}.container")
    for mount in component.mounts:
        parts = mount.split(":")
        if len(parts) not in (2, 3) or "," in mount or not all(parts):
            raise ConfigError(f"{key}.mounts", mount, "must be /on/the/node:/in/the/container, perhaps with :ro")


def _check_server(server: SlurmServerConfig, num_nodes: int) -> None:
    key = "slurm.server"
    if (server.model is None) == (server.command is None):
        raise ConfigError(f"{key}.model", server.model, f"exactly one of {key}.model and {key}.command must be set")
    _check_no_secret(f"{key}.args", server.args)
    _check_no_secret(f"{key}.command", server.command or ())
    if not server.health_path.startswith("/") or not server.health_path.isprintable() or " " in server.health_path:
        raise ConfigError(f"{key}.health_path", server.health_path, "must be a path that begins with /")
    if server.command is not None:
        _check_command(server, server.command)
    server_layout(server, num_nodes)


def _check_no_secret(key: str, words: Sequence[str]) -> None:
    """Commands stand in the script, and are seen by whoever lists the node's processes."""
    for word in words:
        option = word.split("=")[0]
        if SECRET_OPTION.fullmatch(option):
            problem = "a secret is no argument; give it as a variable in slurm.server.environment (vLLM: VLLM_API_KEY)"
            raise ConfigError(key, option, problem)


def _check_command(server: SlurmServerConfig, command: Sequence[str]) -> None:
    key = "slurm.server"
    vllm_fields = {name: SlurmServerConfig.model_fields[name] for name in ("program", "args", "tensor_parallel_size")}
    vllm_fields["nodes_per_replica"] = SlurmServerConfig.model_fields["nodes_per_replica"]
    for name, field in vllm_fields.items():
        value = getattr(server, name)
        if value != field.get_default(call_default_factory=True):
            raise ConfigError(f"{key}.{name}", value, f"belongs to {key}.model; {key}.command is whole")
    if server.balance == "vllm":
        raise ConfigError(f"{key}.balance", "vllm", f"replicas of {key}.command are spread by our router")
    if server.num_tasks not in (None, server.num_replicas):
        problem = f"a process of {key}.command is one replica, and {key}.num_replicas = {server.num_replicas}"
        raise ConfigError(f"{key}.num_tasks", server.num_tasks, problem)
    if not any("{port}" in word for word in command):
        raise ConfigError(f"{key}.command", command, "must say {port} somewhere: it is found on the node")
