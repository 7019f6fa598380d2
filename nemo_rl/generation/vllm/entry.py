"""The engine `vllm`: its section of `policy.generation` and its checks. Loads neither vLLM nor torch."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.kinds import Entry, Section, factory_at
from nemo_rl.config.policy import GenerationConfig, SamplingConfig
from nemo_rl.config.value_types import Seconds
from nemo_rl.distributed.devices import Device, vllm_devices
from nemo_rl.errors import ConfigError
from nemo_rl.generation.vllm.architectures import own_architectures

if TYPE_CHECKING:
    from nemo_rl.config.layout import Layout
    from nemo_rl.config.master import TrainingRunConfig
    from nemo_rl.config.server import ServerConfig


IN_PROCESS_KEY = "policy.generation.vllm_cfg.in_process"
PARALLEL_ARGUMENTS = {  # arguments by which vLLM may start processes
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
    enable_sleep_mode: bool | None = None  # None: true if the trainer shares the engine's CUDA device
    # run it on a thread of the driver's process, CPU only; None: true if it takes turns with the trainer on one CPU
    in_process: bool | None = None
    # it counts as dead if its processes use no CPU time for so long while they owe a pause, refit, sleep or wake
    stall_timeout_s: Seconds = 60.0
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
    def holds_adapters(self) -> bool:
        """Return true: vLLM samples under several adapters at once."""
        return True

    @property
    def shares_process(self) -> bool:
        """Return whether the engine is on a thread of the process that starts it."""
        return self.vllm_cfg.in_process is True or self.runs_in_driver

    def dtype(self, policy_precision: str) -> str:
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
        """Raise ConfigError if the engine samples while the policy trains, and could not give it its memory."""
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
        if layout.device == "cpu":
            check_speculation(self.vllm_kwargs)

    def for_layout(self, layout: "Layout", *, samples_beside_training: bool) -> "VllmGenerationConfig":
        """Return the section with `vllm_cfg.in_process` set: true if engine and trainer take turns on one CPU.

        vLLM binds the memory of its process to one NUMA node, so a machine with several keeps a process for it.
        """
        if self.vllm_cfg.in_process is not None:
            return self
        from nemo_rl.distributed.machine import num_memory_nodes  # imports asyncio, which --help does not need

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

    def for_model(self, architectures: Sequence[str]) -> "VllmGenerationConfig":
        """Return the section with `vllm_cfg.in_process` false for a model that vLLM runs with transformers' classes.

        vLLM wraps these classes for its compilation, after which the policy of the same process cannot compute.
        """
        uses_transformers = self.vllm_kwargs.get("model_impl") == "transformers"
        if self.runs_in_driver or (not uses_transformers and own_architectures().issuperset(architectures)):
            return self
        if self.vllm_cfg.in_process:
            model = ", ".join(architectures)
            problem = f"vLLM runs {model} with transformers' classes, which the policy would share; allowed: false"
            raise ConfigError(IN_PROCESS_KEY, True, problem)
        return self.model_copy(update={"vllm_cfg": self.vllm_cfg.model_copy(update={"in_process": False})})


def check_speculation(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that make vLLM's CPU engine sample from another distribution than the model's.

    Its stand-in for the kernel that expands temperatures over drafted tokens (vLLM 0.32, utils/cpu_triton_utils.py)
    writes into a copy: samples follow memory that was never written, and a third of their log-probs are NaN.
    """
    if (value := arguments.get("speculative_config")) is not None:
        problem = "vLLM's CPU engine samples from a wrong distribution with it; allowed: none, or a GPU"
        raise ConfigError("policy.generation.vllm_kwargs.speculative_config", value, problem)


def check_vllm(key: str, section: VllmGenerationConfig, config: "TrainingRunConfig") -> None:
    """Raise ConfigError for a context that cannot hold the policy's sequences."""
    total = config.policy.max_total_sequence_length
    if section.max_model_len is not None and section.max_model_len < total:
        problem = f"must be at least policy.max_total_sequence_length = {total}"
        raise ConfigError(f"{key}.vllm_cfg.max_model_len", section.max_model_len, problem)
    check_routes(key, section, config)
    if not section.vllm_cfg.in_process:
        return
    if section.in_actor or (section.num_replicas or 1) > 1 or section.vllm_cfg.tensor_parallel_size > 1:
        problem = "engines in actors, and several processes of one engine, are not in the driver's; allowed: false"
        raise ConfigError(IN_PROCESS_KEY, True, problem)
    if parallel := sorted(section.vllm_kwargs.keys() & PARALLEL_ARGUMENTS):
        raise ConfigError(IN_PROCESS_KEY, True, f"vllm_kwargs.{parallel[0]} needs processes; allowed: false")
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1":
        raise ConfigError(IN_PROCESS_KEY, True, "VLLM_ENABLE_V1_MULTIPROCESSING=1 asks for a process; allowed: false")


def check_routes(key: str, section: VllmGenerationConfig, config: "TrainingRunConfig") -> None:
    """Raise ConfigError for engines whose first worker does not see the routes of every token and layer."""
    split = sorted(section.vllm_kwargs.keys() & {"data_parallel_size", "pipeline_parallel_size"})
    if config.policy.router_replay.records and split:
        problem = f"policy.router_replay.enabled is true, which needs whole engines; allowed: no {split[0]}"
        raise ConfigError(f"{key}.vllm_kwargs.{split[0]}", section.vllm_kwargs[split[0]], problem)


VLLM = Entry(VllmGenerationConfig, make=factory_at("nemo_rl.generation.vllm.start:make_vllm"), check=check_vllm)
