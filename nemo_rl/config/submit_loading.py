"""The configuration of `nemo-rl submit`: that of `nemo-rl collect`, and `slurm`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_rl.config.collect import CollectRunConfig, ServerConfig, quote_seeds
from nemo_rl.config.collect_checks import check_sampled
from nemo_rl.config.loading import read_config, resolved_yaml, translate_nemo_rl_keys
from nemo_rl.config.submit import SlurmConfig
from nemo_rl.config.submit_checks import check_slurm
from nemo_rl.errors import ConfigError

PLACEHOLDER_ADDRESS = "http://found-in-the-job"  # each array task puts its own in its place


class SubmitRunConfig(CollectRunConfig):
    """`nemo-rl submit`: what a recipe may say."""

    slurm: SlurmConfig = SlurmConfig()


def load_submit_config(path: Path, overrides: Sequence[str] = ()) -> SubmitRunConfig:
    """The configuration of a recipe with overrides in Hydra's grammar; raises ConfigError for all that is wrong."""
    config = read_config(SubmitRunConfig, path, quote_seeds(overrides), prepare=_prepare)
    check_slurm(config.slurm)
    if config.collect.chunk is not None:
        raise ConfigError("collect.chunk", config.collect.chunk, "the array has all chunks: set slurm.num_chunks")
    check_sampled(config)
    return config


def collect_yaml(config: SubmitRunConfig) -> str:
    """What the jobs give to `nemo-rl collect`: without `slurm`, and without the seeds, of which each job has its own.

    The output directory is absolute, since a container may begin elsewhere.
    """
    values = OmegaConf.to_container(OmegaConf.create(resolved_yaml(config)), resolve=False)
    assert isinstance(values, dict)
    del values["slurm"], values["collect"]["seeds"], values["collect"]["chunk"]
    values["collect"]["output_dir"] = str(Path(config.collect.output_dir).absolute())
    return OmegaConf.to_yaml(OmegaConf.create(values))


def _prepare(resolved: dict[str, Any]) -> None:
    """As for a collection; where the job starts the servers, their address is filled in, in place."""
    translate_nemo_rl_keys(resolved)
    slurm, server = resolved.get("slurm"), resolved.setdefault("server", {})
    if not (isinstance(slurm, dict) and slurm.get("server") and isinstance(server, dict)):
        return
    if server.get("address") is not None:
        raise ConfigError("server.address", server["address"], "slurm.server starts servers of the job's own; set one")
    for name in server.keys() & ServerConfig.model_fields.keys() - {"address", *ServerConfig.OF_ADDRESS}:
        problem = "is of an engine in the collection's own process; slurm.server starts servers beside it"
        raise ConfigError(f"server.{name}", server[name], problem)
    server["address"] = PLACEHOLDER_ADDRESS
