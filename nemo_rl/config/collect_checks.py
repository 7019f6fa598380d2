"""What a collection or an evaluation needs beyond the schema: either a server's options or an engine's."""

from nemo_rl.config.checks import check_rollouts
from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.errors import ConfigError


def check_sampled(config: SampledRunConfig) -> None:
    """Raise ConfigError for the first combination that cannot run."""
    check_rollouts(config)
    _check_server(config)
    _check_logger(config)


def _check_server(config: SampledRunConfig) -> None:
    server = config.server
    for name in server.misplaced:
        problem = "is of a server that runs already: set server.address"
        if server.address is not None:
            problem = "is of an engine that is started here; server.address names one that runs already"
        raise ConfigError(f"server.{name}", getattr(server, name), problem)
    if server.address is not None and not server.addresses:
        raise ConfigError("server.address", server.address, "must name a server")
    for address in server.addresses:
        if not address.startswith(("http://", "https://")):
            raise ConfigError("server.address", address, "must begin with http:// or https://")
    if server.backend == "hf":
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if (value := getattr(server, name)) > 1:
                raise ConfigError(f"server.{name}", value, "the hf backend is one process; allowed: 1")
        if server.vllm_kwargs:
            raise ConfigError("server.vllm_kwargs", server.vllm_kwargs, "needs backend: vllm")
    total, longest = config.policy.max_total_sequence_length, server.max_model_len
    if longest is not None and longest < total:
        raise ConfigError(
            "server.max_model_len", longest, f"must be at least policy.max_total_sequence_length = {total}"
        )


def _check_logger(config: SampledRunConfig) -> None:
    for name in ("wandb_enabled", "tensorboard_enabled"):
        if getattr(config.logger, name):
            raise ConfigError(f"logger.{name}", True, "metrics are logged by training alone; allowed: false")
