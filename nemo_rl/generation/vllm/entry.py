"""The engine `vllm`: its section of `policy.generation`, its checks and its start. Loads neither vLLM nor torch."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.kinds import Entry, Section
from nemo_rl.config.policy import GenerationConfig, SamplingConfig
from nemo_rl.distributed.devices import Device, vllm_devices
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.config.collect import ServerConfig
    from nemo_rl.config.layout import Layout
    from nemo_rl.config.master import TrainingRunConfig
    from nemo_rl.generation.engines import EngineModel
    from nemo_rl.interfaces import Generation


IN_PROCESS_KEY = "policy.generation.vllm_cfg.in_process"
PARALLEL_ARGUMENTS = {  # of vLLM, which may start processes
    "data_parallel_size",
    "distributed_executor_backend",
    "pipeline_parallel_size",
    "tensor_parallel_size",
}


class VllmConfig(Section):
    """`policy.generation.vllm_cfg`, under NeMo-RL's names."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: policy.precision
    tensor_parallel_size: int = Field(default=1, gt=0)  # GPUs of one engine
    # share of a GPU's memory for weights and KV cache; without meaning on a CPU
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    kv_cache_memory_bytes: int | None = Field(default=None, gt=0)  # None on CUDA: by utilization; on a CPU: 512 MiB
    max_model_len: int | None = Field(default=None, gt=0)  # None: policy.max_total_sequence_length
    max_num_seqs: int | None = Field(default=None, gt=0)  # None on CUDA: vLLM's choice for the device; on a CPU: 256
    enforce_eager: bool | None = None  # None: true on a CPU, false on CUDA
    enable_prefix_caching: bool = True  # reuse the KV cache of tokens that several requests begin with
    enable_sleep_mode: bool | None = None  # None: true where the trainer shares the engine's CUDA device
    # on a thread of the driver's process, CPU only; None: true where it takes turns with the trainer on one CPU
    in_process: bool | None = None
    # without CPU time of the engine's processes while they owe a pause, refit, sleep or wake; then it counts as dead
    stall_timeout_s: float = Field(default=60.0, gt=0)
    seed_requests: bool | None = None  # a seed for each request: repeatable samples; None: true on a CPU, not on CUDA

    def seeds_requests(self, device: str) -> bool:
        """Return whether each request has a seed of its own; on CUDA each then costs a kernel a token."""
        return device == "cpu" if self.seed_requests is None else self.seed_requests


class VllmGenerationConfig(GenerationConfig):
    """`policy.generation` with `backend: vllm`."""

    GPUS_PER_ENGINE_KEY: ClassVar[str] = "policy.generation.vllm_cfg.tensor_parallel_size"
    CAN_GUIDE: ClassVar[bool] = True

    vllm_cfg: VllmConfig = VllmConfig.with_defaults()
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)  # passed to vLLM's engine arguments as they are

    @property
    def gpus_per_engine(self) -> int:
        """Return the number of GPUs of one engine."""
        return self.vllm_cfg.tensor_parallel_size

    @property
    def num_workers(self) -> int:
        """Return the number of processes that compute one engine's model."""
        sizes = {"tensor_parallel_size": self.vllm_cfg.tensor_parallel_size, **self.vllm_kwargs}
        parallel = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return math.prod(size for name in parallel if isinstance(size := sizes.get(name), int))  # vLLM refuses others

    @property
    def max_model_len(self) -> int | None:
        """Return the context length that the section asks for; None: the policy's."""
        return self.vllm_cfg.max_model_len

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices that the installed build of vLLM runs on."""
        return vllm_devices()

    @property
    def can_sleep(self) -> bool:
        """Return whether the engine may leave its device's memory to the trainer."""
        return self.vllm_cfg.enable_sleep_mode is not False

    @property
    def shares_process(self) -> bool:
        """Return whether the engine is on a thread of the process that starts it."""
        return self.vllm_cfg.in_process is True or self.runs_in_driver

    def dtype(self, policy_precision: str) -> str:
        """Return the precision that the engine computes in."""
        return policy_precision if self.vllm_cfg.precision == "auto" else self.vllm_cfg.precision

    @classmethod
    def from_server(cls, server: "ServerConfig", sampling: SamplingConfig) -> GenerationConfig:
        """Return the section of an engine that `nemo-rl collect` starts for itself."""
        parallel = {"data_parallel_size": server.data_parallel_size} if server.data_parallel_size > 1 else {}
        trusted = {"trust_remote_code": True} if server.trust_remote_code else {}
        return cls(
            **sampling.model_dump(),
            backend=server.backend,
            vllm_cfg=VllmConfig(
                tensor_parallel_size=server.tensor_parallel_size,
                gpu_memory_utilization=server.gpu_memory_utilization,
                kv_cache_memory_bytes=server.kv_cache_memory_bytes,
                max_model_len=server.max_model_len,
                max_num_seqs=server.max_num_seqs,
                enforce_eager=server.enforce_eager,
                enable_prefix_caching=server.enable_prefix_caching,
                enable_sleep_mode=False,
                seed_requests=True,  # the same seed gives the same collection
            ),
            vllm_kwargs={**parallel, **trusted, **server.vllm_kwargs},
        )

    def check_layout(self, layout: "Layout", *, collects_in_background: bool) -> None:
        """Raise ConfigError where the engine samples while the policy trains, and could not give it its memory."""
        if collects_in_background and layout.device == "cuda" and not layout.is_split and self.can_sleep:
            raise ConfigError(
                "policy.generation.vllm_cfg.enable_sleep_mode",
                self.vllm_cfg.enable_sleep_mode,
                "rollouts are collected during training, and a colocated engine would sleep then; allowed: false, "
                "or policy.generation.colocated.enabled: false",
            )
        if self.vllm_cfg.in_process and (layout.device == "cuda" or layout.needs_cluster):
            problem = f"the engine would run in a worker on {layout.device}; allowed: false, or one process on a CPU"
            raise ConfigError(IN_PROCESS_KEY, True, problem)

    def for_layout(self, layout: "Layout", *, samples_beside_training: bool) -> "VllmGenerationConfig":
        """Return the section with `vllm_cfg.in_process` set: true where engine and trainer take turns on one CPU.

        vLLM binds the memory of its process to one NUMA node, so a machine with several keeps a process for it.
        """
        if self.vllm_cfg.in_process is not None:
            return self
        in_process = (
            layout.device == "cpu"
            and not layout.needs_cluster
            and not samples_beside_training
            and not self.in_actor
            and self.vllm_cfg.tensor_parallel_size == 1
            and not self.vllm_kwargs.keys() & PARALLEL_ARGUMENTS
            and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "1"
            and num_memory_nodes() <= 1
        )
        return self.model_copy(update={"vllm_cfg": self.vllm_cfg.model_copy(update={"in_process": in_process})})


def num_memory_nodes() -> int:
    """Return the number of NUMA nodes of this machine, 0 where the kernel does not tell."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))


def check_vllm(key: str, section: VllmGenerationConfig, config: "TrainingRunConfig") -> None:
    """Raise ConfigError for a context that cannot hold the policy's sequences."""
    total = config.policy.max_total_sequence_length
    if section.max_model_len is not None and section.max_model_len < total:
        problem = f"must be at least policy.max_total_sequence_length = {total}"
        raise ConfigError(f"{key}.vllm_cfg.max_model_len", section.max_model_len, problem)
    if not section.vllm_cfg.in_process:
        return
    if section.in_actor or (section.num_replicas or 1) > 1 or section.vllm_cfg.tensor_parallel_size > 1:
        problem = "engines in actors, and several processes of one engine, are not in the driver's; allowed: false"
        raise ConfigError(IN_PROCESS_KEY, True, problem)
    if parallel := sorted(section.vllm_kwargs.keys() & PARALLEL_ARGUMENTS):
        raise ConfigError(IN_PROCESS_KEY, True, f"vllm_kwargs.{parallel[0]} needs processes; allowed: false")
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1":
        raise ConfigError(IN_PROCESS_KEY, True, "VLLM_ENABLE_V1_MULTIPROCESSING=1 asks for a process; allowed: false")


async def make_vllm(
    section: VllmGenerationConfig, model: "EngineModel", *, slots: Sequence[Any], start_timeout_s: float
) -> "Generation":
    """Start the engine in this process, or its replicas in actors, served by a router.

    `model.trust_remote_code` is ignored: vLLM has it among its `vllm_kwargs`. Raises ConfigError for settings that vLLM
    refuses, GenerationError when it does not start.
    """
    # Imported here: vLLM takes seconds, and Ray one, which a run without them need not wait.
    slots_or_none = list(slots) or [None] * (section.num_replicas or 1)
    count = len(slots_or_none)
    if count == 1 and slots_or_none[0] is None and not section.in_actor:
        from nemo_rl.generation.vllm.engine import VllmGeneration

        return await VllmGeneration.create(section, model, start_timeout_s=start_timeout_s)

    from nemo_rl.generation.router import MAX_REPLICAS, ReplicatedGeneration, start_engines
    from nemo_rl.generation.vllm.actor import VllmActorGeneration

    async def start(index: int) -> "Generation":
        slot = slots_or_none[index % count]  # a CPU takes more engines than were configured, a GPU none
        num_replicas = max(count, index + 1)
        return await VllmActorGeneration.create(
            section, model, slot=slot, num_replicas=num_replicas, start_timeout_s=start_timeout_s
        )

    limit = count if model.device == "cuda" else MAX_REPLICAS
    return ReplicatedGeneration(await start_engines(start, count), restart=start, max_replicas=limit)


VLLM = Entry(VllmGenerationConfig, make=make_vllm, check=check_vllm)
