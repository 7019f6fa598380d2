"""What one call of `nemo-rl submit` is about: everything that the scripts are made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.config.server_layout import ServerLayout, server_layout
from nemo_rl.config.submit import SlurmComponentConfig, SlurmConfig

CONTAINER_PROGRAM = ("nemo-rl",)


@dataclass(frozen=True, slots=True)
class Submission:
    """Array task `i` collects chunk `i % num_chunks` of seed number `i // num_chunks`."""

    slurm: SlurmConfig
    seeds: tuple[int, ...]
    output_dir: Path  # of the collection; absolute
    directory: Path  # of this submission: scripts, configuration, environments, logs; absolute
    working_directory: Path  # of components that name none and run in no container
    python: str  # the interpreter that has nemo_rl outside of containers
    missing: tuple[int, ...]  # array tasks that are not done
    engine_args: tuple[str, ...] = ()  # of `vllm serve`, so that it samples as the collection's own engine would

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
        """How `nemo-rl` is called in the component's steps."""
        if self.slurm.program is not None:
            return tuple(self.slurm.program)
        return CONTAINER_PROGRAM if component.container else (self.python, "-m", "nemo_rl")
