"""`slurm`: what no job can be made of, and how server processes stand on the nodes."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nemo_rl.errors import ConfigError
from nemo_rl.jobs.slurm_config import ServerLayout, SlurmConfig, SlurmServerConfig, check_slurm, server_layout

MODEL = {"model": "m"}
COMMAND = {"command": ["serve", "{port}"]}


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({"sbatch_args": ["--array=0-3"]}, "slurm.sbatch_args = '--array=0-3': is set by the script"),
        ({"sbatch_args": ["-N2"]}, "slurm.sbatch_args = '-N2': is set by the script"),
        ({"sbatch_args": ["--comment", "two words"]}, "'two words': must begin with -"),
        ({"sbatch_args": ["--comment=a\nrm -rf /"]}, "must be one line of text"),
        ({"partition": "a\nb"}, "slurm.partition = 'a\\nb': must be one line of text"),
        ({"collection": {"srun_args": ["--dependency=afterok:1"]}}, "a dependency is the job's: set slurm.dependency"),
        ({"aggregation": {"sbatch_args": ["-d", "-x"]}}, "a dependency is the job's"),
        ({"collection": {"mounts": ["/a:/b"]}}, "slurm.collection.mounts = ['/a:/b']: only a container has mounts"),
        ({"collection": {"container": "i", "mounts": ["/a"]}}, "must be /on/the/node:/in/the/container"),
        ({"collection": {"environment": {"A-B": "x"}}}, "slurm.collection.environment.A-B"),
        ({"requeue": False, "requeue_s_before_end": 60}, "slurm.requeue_s_before_end = 60: needs slurm.requeue: true"),
        ({"nodes": 2}, "slurm.nodes = 2: slurm.collection.num_tasks = 1 does not fill them evenly"),
        ({"server": {}}, "exactly one of slurm.server.model and slurm.server.command"),
        ({"server": {**MODEL, **COMMAND}}, "exactly one of"),
        ({"server": {"command": ["serve"]}}, "must say {port} somewhere"),
        ({"server": {**COMMAND, "tensor_parallel_size": 2}}, "slurm.server.tensor_parallel_size = 2: belongs to"),
        ({"server": {**COMMAND, "balance": "vllm"}}, "are spread by our router"),
        ({"server": {**COMMAND, "num_replicas": 4, "num_tasks": 2}}, "slurm.server.num_tasks = 2"),
        ({"server": {**MODEL, "health_path": "health"}}, "slurm.server.health_path"),
        ({"nodes": 2, "server": MODEL}, "slurm.nodes = 2: 1 server processes do not fill them evenly"),
        ({"server": {**MODEL, "num_replicas": 3, "num_tasks": 2}}, "must divide slurm.server.num_replicas = 3"),
        ({"server": {**MODEL, "nodes_per_replica": 2}}, "x slurm.server.nodes_per_replica = 2"),
        (
            {"nodes": 4, "server": {**MODEL, "nodes_per_replica": 2, "num_replicas": 2, "balance": "vllm"}},
            "slurm.server.balance = 'vllm': replicas over several nodes are spread by our router",
        ),
    ],
)
def test_what_no_job_can_be_made_of_names_its_key(slurm: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_slurm(SlurmConfig.model_validate(slurm))
    assert expected in str(error.value)


@pytest.mark.parametrize("words", [["--api-key", "sk-1"], ["--api-key=sk-1"], ["--hf-token=sk-1"]])
def test_a_secret_is_no_argument_and_is_not_shown(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="give it as a variable") as error:
        check_slurm(SlurmConfig.model_validate({"server": {**MODEL, "args": words}}))
    assert "sk-1" not in str(error.value)


@pytest.mark.parametrize("component", ["server", "collection", "aggregation"])
def test_image_that_is_not_in_its_directory_is_refused(component: str, tmp_path: Path) -> None:
    def check(container: object) -> None:
        parts = {"server": MODEL, "collection": {}, "aggregation": {}}
        values = {component: {**parts[component], "container": str(container)}}
        check_slurm(SlurmConfig.model_validate(values))

    image = tmp_path / "image.sqsh"
    with pytest.raises(ConfigError, match=f"no such image in {tmp_path}") as error:
        check(image)
    assert error.value.key == f"slurm.{component}.container"
    image.touch()
    for container in (image, "/lustre/of/the/cluster/image.sqsh", "nvcr.io#nvidia/pytorch:25.10-py3", "docker://a/b"):
        check(container)


def test_dependencies_are_no_key_of_a_component() -> None:
    for name in ("server", "collection", "aggregation"):
        with pytest.raises(ValidationError, match="dependency"):
            SlurmConfig.model_validate({name: {"dependency": "afterok:1"}})
    check_slurm(SlurmConfig.model_validate({"dependency": "afterok:1"}))


@pytest.mark.parametrize(
    ("nodes", "server", "expected"),
    [
        (1, {}, ServerLayout(1, 1, 1, 1, "data")),
        (1, {"num_replicas": 8}, ServerLayout(1, 1, 8, 1, "data")),
        (2, {"num_replicas": 8}, ServerLayout(2, 1, 4, 2, "data")),
        (2, {"num_replicas": 8, "num_tasks": 4}, ServerLayout(4, 2, 2, 4, "data")),
        (2, {"num_replicas": 8, "balance": "router"}, ServerLayout(8, 4, 1, 1, "data")),
        (2, {"num_replicas": 8, "num_tasks": 2, "balance": "router"}, ServerLayout(2, 1, 4, 1, "data")),
        (2, {"nodes_per_replica": 2}, ServerLayout(2, 1, 1, 2, "pipeline")),
        (6, {"nodes_per_replica": 2, "num_replicas": 3}, ServerLayout(6, 1, 1, 2, "pipeline")),
    ],
)
def test_server_processes_fill_the_nodes(nodes: int, server: dict[str, Any], expected: ServerLayout) -> None:
    layout = server_layout(SlurmServerConfig.model_validate({**MODEL, **server}), nodes)
    assert layout == expected
    assert layout.needs_router == (layout.num_tasks > layout.tasks_per_group)


def test_replicas_of_another_server_are_behind_our_router() -> None:
    layout = server_layout(SlurmServerConfig.model_validate({**COMMAND, "num_replicas": 2}), 2)
    assert (layout.num_groups, layout.needs_router, layout.tasks_per_node) == (2, True, 1)
