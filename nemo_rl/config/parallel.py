"""`dtensor_cfg` and `megatron_cfg`: which backend computes a model of the run, and over how many ranks."""

from pydantic import Field

from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.section import Section


class DTensorConfig(Section):
    """FSDP2, and tensor parallelism by DTensor."""

    enabled: bool = True
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    tensor_parallel_size: int = Field(default=1, gt=0)  # ranks that share every layer; divides the heads
    # Ranks that share the samples and the weights. None: all of the model's GPUs; on a CPU 1.
    data_parallel_size: int | None = Field(default=None, gt=0)


class ParallelModelConfig(Section):
    """A model on ranks of the backend that is enabled."""

    dtensor_cfg: DTensorConfig = DTensorConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()  # before dtensor_cfg

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share every layer."""
        if self.megatron_cfg.enabled:
            return self.megatron_cfg.tensor_model_parallel_size
        return self.dtensor_cfg.tensor_parallel_size

    @property
    def pipeline_parallel_size(self) -> int:
        """Stages, each with some of the layers."""
        return self.megatron_cfg.pipeline_model_parallel_size if self.megatron_cfg.enabled else 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model between them; they work on the same samples."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int | None:
        """None: all of the model's GPUs, on a CPU 1."""
        return (self.megatron_cfg if self.megatron_cfg.enabled else self.dtensor_cfg).data_parallel_size
