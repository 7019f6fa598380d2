"""`server.adapters`: the adapters that a collection's engine holds from its start, each a version of its weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.errors import ConfigError, WeightSyncError
from nemo_rl.generation.engines import AdapterSlots
from nemo_rl.interfaces import Generation, HoldsAdapters
from nemo_rl.launch.model_files import adapter_directory, adapter_ranks
from nemo_rl.weight_sync.adapters import AdapterTarget

if TYPE_CHECKING:
    import torch

    from nemo_rl.interfaces import WeightUse

ResultT = TypeVar("ResultT")


def adapter_slots(config: SampledRunConfig) -> AdapterSlots | None:
    """Return the room that an engine needs for the adapters; None without any."""
    ranks = adapter_ranks(config)
    return AdapterSlots(max(ranks.values()), len(ranks)) if ranks else None


def adapter_versions(config: SampledRunConfig) -> dict[str, int]:
    """Return the weight version of each adapter by name; that of `server.model` is the newest, hence the default."""
    names = sorted(config.server.adapters, key=lambda name: name == config.server.model)
    return {name: version for version, name in enumerate(names, start=1)}


async def load_adapters(config: SampledRunConfig, generation: Generation) -> None:
    """Load all adapters into the engine; raises ConfigError for those that its model has no layers for."""
    from nemo_rl.weight_sync.shared_memory import SharedMemory  # loads torch

    for name, version in adapter_versions(config).items():
        assert isinstance(generation, HoldsAdapters)  # checked with the configuration
        directory, transport = config.server.adapters[name], SharedMemory()
        source = AdapterOfFiles(directory)
        try:
            await transport.deliver(source, AdapterTarget(generation), await transport.stage(source), version)
        except WeightSyncError as error:
            raise ConfigError(f"server.adapters.{name}", directory, str(error)) from error
        finally:
            transport.close()


class AdapterOfFiles:
    """The source of an adapter's tensors in peft's files, B with its scale."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    async def run_with_weights(self, use: "WeightUse[ResultT]") -> ResultT:
        return use(self._tensors())

    async def run_on_all_ranks(self, use: "WeightUse[ResultT]") -> Sequence[ResultT]:
        return [use(self._tensors())]

    def _tensors(self) -> list[tuple[str, "torch.Tensor"]]:
        from nemo_rl.policy.adapter_files import read_adapter, scaled_tensors  # loads torch

        tensors, described = read_adapter(adapter_directory(self._directory))
        return list(scaled_tensors(tensors.items(), described.scale))
