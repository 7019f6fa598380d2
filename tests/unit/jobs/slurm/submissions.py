"""Submissions that the tests of scripts begin from."""

import sys
from pathlib import Path
from typing import Any

from nemo_rl.jobs.collection_scripts import Submission
from nemo_rl.jobs.slurm_config import SlurmConfig


def submission(directory: Path = Path("/out"), *, seeds: tuple[int, ...] = (0,), **slurm: Any) -> Submission:
    section = SlurmConfig.model_validate(slurm)
    return Submission(
        slurm=section,
        seeds=seeds,
        output_dir=directory,
        directory=directory / "slurm" / "0001",
        working_directory=directory,
        python=sys.executable,
        missing=tuple(range(len(seeds) * section.num_chunks)),
    )


SERVER = {"model": "org/model"}
EVERYTHING: dict[str, Any] = {
    "job_name": "eval-1",
    "partition": "gpu",
    "account": "me",
    "qos": "high",
    "time": "04:00:00",
    "nodes": 2,
    "gpus": 8,
    "sbatch_args": ["--exclusive", "--comment=it's #1, isn't it"],
    "dependency": "afterok:12",
    "num_chunks": 4,
    "max_running": 3,
    "requeue_s_before_end": 90,
    "setup": "module load cuda\nulimit -n 65536",
    "server": {
        **SERVER,
        "container": "docker://server:1",
        "mounts": ["/models:/models:ro"],
        "environment": {"HF_TOKEN": "a secret's value"},
        "working_directory": "/work",
        "args": ["--max-model-len", "8192"],
        "tensor_parallel_size": 2,
        "num_replicas": 8,
        "start_timeout_s": 600,
    },
    "collection": {"container": "docker://ours:2", "environment": {"A": "1"}, "num_tasks": 2},
    "aggregation": {"partition": "cpu", "environment": {"B": "2"}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "no server": {},
    "one server": {"server": SERVER},
    "replicas on a node": {"server": {**SERVER, "num_replicas": 4, "tensor_parallel_size": 2}},
    "replicas on nodes": {"nodes": 2, "server": {**SERVER, "num_replicas": 4}},
    "replicas behind our router": {"nodes": 2, "server": {**SERVER, "num_replicas": 4, "balance": "router"}},
    "a replica over nodes": {"nodes": 2, "server": {**SERVER, "nodes_per_replica": 2, "tensor_parallel_size": 8}},
    "replicas over nodes": {"nodes": 4, "server": {**SERVER, "nodes_per_replica": 2, "num_replicas": 2}},
    "another server": {"server": {"command": ["serve", "--listen={host}:{port}"], "num_replicas": 2}},
    "everything": EVERYTHING,
}
