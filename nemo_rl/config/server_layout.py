"""How the server processes of a Slurm job stand on its nodes, and who spreads requests over them."""

from dataclasses import dataclass

from nemo_rl.config.submit import SlurmServerConfig
from nemo_rl.errors import ConfigError

KEY = "slurm.server"


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """Processes are numbered node by node, as Slurm numbers the tasks of a step."""

    num_tasks: int  # processes, over all nodes of the job
    tasks_per_node: int
    replicas_per_task: int
    tasks_per_group: int  # processes behind one address of vLLM's; the first of each group listens
    parallelism: str  # of a group: "data" or "pipeline"

    @property
    def num_groups(self) -> int:
        return self.num_tasks // self.tasks_per_group

    @property
    def needs_router(self) -> bool:
        return self.num_groups > 1


def server_layout(server: SlurmServerConfig, num_nodes: int) -> ServerLayout:
    """Raises ConfigError for replicas and processes that do not fill the nodes evenly.

    Example: 8 replicas on 2 nodes are 2 processes of 4 replicas, one group by vLLM's data parallelism; with
    `balance: router` they are 8 processes and 8 groups behind our router.
    """
    if server.nodes_per_replica > 1:
        return _make_multi_node_layout(server, num_nodes)
    is_one_group = server.command is None and server.balance != "router"
    default = min(num_nodes, server.num_replicas) if is_one_group else server.num_replicas
    num_tasks = server.num_tasks or default
    if server.num_replicas % num_tasks:
        raise ConfigError(f"{KEY}.num_tasks", num_tasks, f"must divide {KEY}.num_replicas = {server.num_replicas}")
    if num_tasks % num_nodes:
        problem = f"{num_tasks} server processes do not fill them evenly ({KEY}.num_replicas, {KEY}.num_tasks)"
        raise ConfigError("slurm.nodes", num_nodes, problem)
    tasks_per_group = num_tasks if is_one_group else 1
    return ServerLayout(
        num_tasks, num_tasks // num_nodes, server.num_replicas // num_tasks, tasks_per_group, parallelism="data"
    )


def _make_multi_node_layout(server: SlurmServerConfig, num_nodes: int) -> ServerLayout:
    """One process a node, each with a part of a replica."""
    if server.balance == "vllm" and server.num_replicas > 1:
        raise ConfigError(f"{KEY}.balance", "vllm", "replicas over several nodes are spread by our router")
    num_tasks = server.num_replicas * server.nodes_per_replica
    if num_tasks != num_nodes:
        raise ConfigError(
            "slurm.nodes", num_nodes, f"must be {KEY}.num_replicas x {KEY}.nodes_per_replica = {num_tasks}"
        )
    if server.num_tasks not in (None, num_tasks):
        raise ConfigError(f"{KEY}.num_tasks", server.num_tasks, f"must be {num_tasks}: one on each node")
    return ServerLayout(num_tasks, 1, 1, server.nodes_per_replica, parallelism="pipeline")
