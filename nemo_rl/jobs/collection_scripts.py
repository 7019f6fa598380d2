"""The two batch scripts of a collection: an array that collects, and a job after it that merges and profiles."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

from nemo_rl.jobs.slurm_config import ServerLayout, SlurmComponentConfig, SlurmConfig, SlurmServerConfig, server_layout

CONTAINER_PROGRAM = ("nemo-rl",)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
HIDDEN = "(hidden)"
UNUSED = "# shellcheck disable=SC2034  # some settings are read only by the steps"
LOOPBACK, ALL_ADDRESSES = "127.0.0.1", "0.0.0.0"

Setting: TypeAlias = str | int | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Submission:
    """Array task `i` collects chunk `i % num_chunks` of seed number `i // num_chunks`."""

    slurm: SlurmConfig
    seeds: tuple[int, ...]
    output_dir: Path  # absolute path of the collection
    directory: Path  # absolute path for scripts, configuration, environments and logs
    working_directory: Path  # default for components outside of containers
    python: str  # interpreter with nemo_rl, outside of containers
    missing: tuple[int, ...]  # unfinished array tasks
    engine_args: tuple[str, ...] = ()  # make `vllm serve` sample as the collection's own engine does

    @property
    def num_tasks(self) -> int:
        return len(self.seeds) * self.slurm.num_chunks

    @property
    def layout(self) -> ServerLayout | None:
        server = self.slurm.server
        return None if server is None else server_layout(server, self.slurm.nodes)

    @property
    def components(self) -> Mapping[str, SlurmComponentConfig]:
        parts = {
            "server": self.slurm.server,
            "collection": self.slurm.collection,
            "aggregation": self.slurm.aggregation,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def collect_config(self) -> Path:
        return self.directory / "collect.yaml"

    @property
    def collection_script(self) -> Path:
        return self.directory / "collect.sbatch"

    @property
    def aggregation_script(self) -> Path:
        return self.directory / "aggregate.sbatch"

    def environment_file(self, name: str) -> Path:
        return self.directory / f"{name}.env"

    def program(self, component: SlurmComponentConfig) -> tuple[str, ...]:
        """Return the words that call `nemo-rl` in the component's steps."""
        if self.slurm.program is not None:
            return tuple(self.slurm.program)
        return CONTAINER_PROGRAM if component.container else (self.python, "-m", "nemo_rl")


def format_environment(variables: Mapping[str, str]) -> str:
    """Format the shell assignments that the script sources for the steps of one component."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())


def format_redacted_environment(variables: Mapping[str, str]) -> str:
    """Format the assignments; hide passwords in URLs and the values of variables that are named like secrets."""
    shown = {name: HIDDEN if SECRET.search(name) else redact_passwords(value) for name, value in variables.items()}
    return format_environment(shown)


def redact_passwords(text: str) -> str:
    """Hide the credentials in URLs.

    Example: "http://me:pw@proxy" becomes "http://(hidden)@proxy".
    """
    return re.sub(r"(://)[^/@\s]+@", rf"\1{HIDDEN}@", text)


def srun_command(
    submission: Submission,
    component: SlurmComponentConfig,
    *,
    job_nodes: int,
    num_nodes: int = 1,
    tasks_per_node: int = 1,
) -> tuple[str, ...]:
    """Return an `srun` command that shares the job's resources with other steps and ends with the first failed task.

    A step uses the first `num_nodes` nodes of the job.
    """
    words = ["srun", "--overlap", "--overcommit", "--kill-on-bad-exit=1", f"--nodes={num_nodes}"]
    words += [f"--ntasks={num_nodes * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}"]
    words += ["--relative=0"] if num_nodes < job_nodes else []
    words += ["--label"] if num_nodes * tasks_per_node > 1 else []
    words += _placement_options(submission, component)
    return (*words, *component.srun_args)


def _placement_options(submission: Submission, component: SlurmComponentConfig) -> Sequence[str]:
    """Return the options that place a step in the node's file system or in a container's."""
    if component.container is None:
        return [f"--chdir={component.working_directory or submission.working_directory}"]
    words = [
        f"--container-image={component.container}",
        f"--container-mounts={','.join(_mounts(submission, component))}",
    ]
    if component.working_directory:
        words.append(f"--container-workdir={component.working_directory}")
    if component.environment:  # these win over the image's own
        words.append(f"--container-env={','.join(component.environment)}")
    return words


def _mounts(submission: Submission, component: SlurmComponentConfig) -> list[str]:
    """Return the component's mounts, and those of the collection's directories that it does not mount itself."""
    mounts = list(component.mounts)
    targets = {mount.split(":")[1].rstrip("/") for mount in mounts}
    for path in (submission.output_dir, submission.directory):
        if not any(str(parent) in targets for parent in (path, *path.parents)):
            mounts.append(f"{path}:{path}")
            targets.add(str(path))
    return mounts


def collection_script(submission: Submission) -> str:
    """Return the script of one array task: start servers, wait for them, collect."""
    parts = ["waiting", "job", "gpus", "collecting"]
    settings = _collection_settings(submission)
    if submission.slurm.server is not None and submission.layout is not None:
        parts += ["serving", "servers", *(["routing"] if submission.layout.needs_router else [])]
        settings |= _server_settings(submission, submission.slurm.server, submission.layout)
    body = [_settings(settings), *map(shell_source, parts), _setup(submission), "run_task"]
    return _script(_collection_directives(submission), body)


def aggregation_script(submission: Submission) -> str:
    """Return the script that merges, then profiles; a failed step ends the job."""
    component = submission.slurm.aggregation
    program, run = submission.program(component), srun_command(submission, component, job_nodes=1)
    collection = (str(submission.output_dir), "--seeds", ",".join(map(str, submission.seeds)))
    merge = ("merge", *collection, *(["--allow-partial"] if component.allow_partial else []))
    steps = [
        f"(in_environment {shlex.join([_environment(submission, 'aggregation'), *run, *program, *words])})"
        for words in (merge, ("profile", *collection, *component.profile_args))
    ]
    return _script(_aggregation_directives(submission), [shell_source("job"), _setup(submission), "\n".join(steps)])


def _setup(submission: Submission) -> str:
    """Return the user's setup lines, without `set -u`: environment managers read unset variables."""
    return f"set +u\n{submission.slurm.setup}\nset -u" if submission.slurm.setup.strip() else ""


def _script(directives: Sequence[str], body: Sequence[str]) -> str:
    lines = [f"#SBATCH {shlex.quote(directive)}" for directive in directives]
    head = ["#!/usr/bin/env bash", "# Written by nemo-rl submit.", *lines, UNUSED, "set -euo pipefail"]
    return "\n".join(head) + "\n\n" + "\n\n".join(part.strip("\n") for part in body if part.strip()) + "\n"


def _collection_directives(submission: Submission) -> list[str]:
    slurm = submission.slurm
    at_once = f"%{slurm.max_running}" if slurm.max_running else ""
    words = [f"--job-name={slurm.job_name}", f"--array={_ranges(submission.missing)}{at_once}"]
    words += [f"--nodes={slurm.nodes}", f"--output={_logs(submission)}/collect-%a.log", "--open-mode=append"]
    words += ["--requeue" if slurm.requeue else "--no-requeue"]
    words += _options({"signal": f"B:USR1@{slurm.requeue_s_before_end}" if slurm.requeue_s_before_end else None})
    words += _options({"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "time": slurm.time})
    words += _options({"gpus-per-node": slurm.gpus, "dependency": slurm.dependency})
    return [*words, *slurm.sbatch_args]


def _aggregation_directives(submission: Submission) -> list[str]:
    slurm, own = submission.slurm, submission.slurm.aggregation
    words = [f"--job-name={slurm.job_name}-aggregate", "--nodes=1", "--ntasks=1"]
    words += [f"--output={_logs(submission)}/aggregate.log", "--open-mode=append"]
    words += _options({"partition": own.partition or slurm.partition, "account": slurm.account})
    words += _options({"qos": own.qos or slurm.qos, "time": own.time or slurm.time})
    return [*words, *own.sbatch_args]


def _logs(submission: Submission) -> str:
    """Return the log directory for Slurm's file name patterns, in which %% is a literal %."""
    return str(submission.directory / "logs").replace("%", "%%")


def _options(values: Mapping[str, str | int | None]) -> Iterator[str]:
    return (f"--{name}={value}" for name, value in values.items() if value is not None)


def _collection_settings(submission: Submission) -> dict[str, Setting]:
    slurm, own = submission.slurm, submission.slurm.collection
    has_servers = slurm.server is not None
    num_nodes = 1 if has_servers else slurm.nodes
    tasks_per_node = own.num_tasks // num_nodes
    return {
        "job_dir": str(submission.directory),
        "seeds": submission.seeds,
        "num_chunks": slurm.num_chunks,
        "has_servers": int(has_servers),
        "collection_tasks": own.num_tasks,
        "collection_tasks_per_node": 1 if has_servers else tasks_per_node,  # they share the node's GPUs
        "collection_environment": _environment(submission, "collection"),
        "collection_step": _step(submission, own, num_nodes, tasks_per_node),
        "collect_command": (*submission.program(own), "collect", "--config", str(submission.collect_config)),
    }


def _server_settings(submission: Submission, server: SlurmServerConfig, layout: ServerLayout) -> dict[str, Setting]:
    num_nodes = submission.slurm.nodes
    all_listen_on_first_node = layout.num_groups == 1 or num_nodes == 1
    settings: dict[str, Setting] = {
        "start_timeout_s": server.start_timeout_s,
        "health_path": server.health_path,
        "listen_host": LOOPBACK if all_listen_on_first_node else ALL_ADDRESSES,
        "num_groups": layout.num_groups,
        "tasks_per_group": layout.tasks_per_group,
        "tasks_per_node": layout.tasks_per_node,
        "replicas_per_task": layout.replicas_per_task,
        "parallelism": "none" if server.command else layout.parallelism,
        "server_environment": _environment(submission, "server"),
        "server_step": _step(submission, server, num_nodes, layout.tasks_per_node),
        "server_command": tuple(server.command) if server.command else vllm_command(submission, server, layout),
    }
    if layout.needs_router:
        own = submission.slurm.collection
        settings |= {"router_step": _step(submission, own, 1, 1), "router_command": (*submission.program(own), "route")}
    return settings


def _step(
    submission: Submission, component: SlurmComponentConfig, num_nodes: int, tasks_per_node: int
) -> tuple[str, ...]:
    return srun_command(
        submission, component, job_nodes=submission.slurm.nodes, num_nodes=num_nodes, tasks_per_node=tasks_per_node
    )


def vllm_command(submission: Submission, server: SlurmServerConfig, layout: ServerLayout) -> tuple[str, ...]:
    """Return the command that all server processes share; the node adds addresses and ranks."""
    assert server.model is not None
    vllm = "vllm" if server.container else str(Path(submission.python).with_name("vllm"))
    words = [*(server.program or (vllm, "serve")), server.model, *submission.engine_args]
    words += ["--tensor-parallel-size", str(server.tensor_parallel_size)] if server.tensor_parallel_size > 1 else []
    if layout.parallelism == "pipeline":
        words += ["--pipeline-parallel-size", str(layout.tasks_per_group), "--nnodes", str(layout.tasks_per_group)]
    elif (replicas := layout.tasks_per_group * layout.replicas_per_task) > 1:
        words += ["--data-parallel-size", str(replicas), "--data-parallel-size-local", str(layout.replicas_per_task)]
    return (*words, *server.args)


def _environment(submission: Submission, name: str) -> str:
    return str(submission.environment_file(name)) if submission.components[name].environment else ""


def _settings(settings: Mapping[str, Setting]) -> str:
    return "\n".join(f"{name}={_value(value)}" for name, value in settings.items())


def _value(value: Setting) -> str:
    if isinstance(value, str | int):
        return shlex.quote(str(value))
    return f"({' '.join(_quote(str(word)) for word in value)})"


def _quote(word: str) -> str:
    """Quote a word; also one with commas, which shellcheck takes for a mistaken separator."""
    quoted = shlex.quote(word)
    return f"'{word}'" if "," in word and quoted == word else quoted


def shell_source(name: str) -> str:
    return (files("nemo_rl.jobs") / "shell" / f"{name}.sh").read_text()


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges.

    Example: 0, 1, 2, 5 gives "0-2,5".
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
