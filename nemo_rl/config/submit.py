"""`slurm` of `nemo-rl submit`: the job, and what its three components run in."""

from typing import Literal

from pydantic import Field

from nemo_rl.config.section import Section


class SlurmComponentConfig(Section):
    """A part of the job: the steps that run it. Dependencies are the job's (`slurm.dependency`), never a part's."""

    container: str | None = None  # image of the steps, with Slurm's plugin pyxis; None: the node itself
    mounts: list[str] = Field(default_factory=list)  # "/on/the/node:/in/the/container[:ro]"
    environment: dict[str, str] = Field(default_factory=dict)  # variables of these steps alone
    working_directory: str | None = None  # None: where `nemo-rl submit` was called, or the container's own
    srun_args: list[str] = Field(default_factory=list)  # further arguments of srun


class SlurmServerConfig(SlurmComponentConfig):
    """OpenAI-compatible servers that an array task starts for its collection, behind one address."""

    model: str | None = None  # a Hugging Face name or a folder; None: `command` knows it
    program: list[str] | None = Field(default=None, min_length=1)  # before model and flags; None: `vllm serve`
    args: list[str] = Field(default_factory=list)  # further arguments of `program`
    command: list[str] | None = Field(default=None, min_length=1)  # another server; {host} and {port} are filled in
    tensor_parallel_size: int = Field(default=1, gt=0)  # GPUs of a replica on each of its nodes
    num_replicas: int = Field(default=1, gt=0)
    nodes_per_replica: int = Field(default=1, gt=0)  # over 1: pipeline stages of vLLM, one a node
    num_tasks: int | None = Field(default=None, gt=0)  # server processes; None: as few as there can be
    balance: Literal["auto", "vllm", "router"] = "auto"  # who spreads requests: vLLM's data parallelism or our router
    health_path: str = "/health"  # answers 200 once the server is up
    start_timeout_s: int = Field(default=1800, gt=0)


class SlurmCollectionConfig(SlurmComponentConfig):
    """`nemo-rl collect`."""

    num_tasks: int = Field(default=1, gt=0)  # processes that share the servers; each has a chunk of its own


class SlurmAggregationConfig(SlurmComponentConfig):
    """`nemo-rl merge` and `nemo-rl profile`, a job of their own after all collections have gone well."""

    enabled: bool = True
    num_tasks: Literal[1] = 1  # one writer
    allow_partial: bool = False  # merge and profile what there is once all tasks have ended, in whatever way
    profile_args: list[str] = Field(default_factory=list)  # further arguments of `nemo-rl profile`
    partition: str | None = None  # None: that of the collection, as for qos and time
    qos: str | None = None
    time: str | None = None
    sbatch_args: list[str] = Field(default_factory=list)  # those of the collection are not taken


class SlurmConfig(Section):
    """The jobs. What is None is left to Slurm's defaults."""

    job_name: str = Field(default="nemo-rl", pattern=r"^[\w.+-]+$")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None  # of one array task, in Slurm's form: "04:00:00"
    nodes: int = Field(default=1, gt=0)  # of one array task
    gpus: int | None = Field(default=None, gt=0)  # of a node
    sbatch_args: list[str] = Field(default_factory=list)  # further arguments of sbatch
    dependency: str | None = None  # of the array: "afterok:1234"
    num_chunks: int = Field(default=1, gt=0)  # the array has a task for each of them and each seed
    max_running: int | None = Field(default=None, gt=0)  # array tasks at once
    requeue: bool = True  # after a node's failure or a preemption; the task then runs what is missing
    requeue_s_before_end: int | None = Field(default=None, gt=0)  # before the time limit a task requeues itself
    directory: str | None = None  # of scripts and logs; None: slurm/ in the output directory
    setup: str = ""  # shell lines at the start of the job, on its first node: "module load cuda"
    program: list[str] | None = Field(default=None, min_length=1)  # None: this Python's, in a container `nemo-rl`
    server: SlurmServerConfig | None = None  # None: `nemo-rl collect` has its own engine, or server.address
    collection: SlurmCollectionConfig = SlurmCollectionConfig()
    aggregation: SlurmAggregationConfig = SlurmAggregationConfig()
