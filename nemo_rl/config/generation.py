"""`policy.generation`: the engine and how it samples, under NeMo-RL's names."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.section import Section


class VllmConfig(Section):
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: policy.precision
    tensor_parallel_size: int = Field(default=1, gt=0)
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    kv_cache_memory_bytes: int | None = Field(default=None, gt=0)  # None on CUDA: by utilization; on a CPU: 512 MiB
    max_model_len: int | None = Field(default=None, gt=0)  # None: policy.max_total_sequence_length
    max_num_seqs: int | None = Field(default=None, gt=0)  # None: 256
    enforce_eager: bool | None = None  # None: true on a CPU, false on CUDA
    enable_prefix_caching: bool = True
    enable_sleep_mode: bool | None = None  # None: true where the trainer shares the engine's CUDA device
    seed_requests: bool = True  # a seed for each request: repeatable samples, at a cost in the sampler


class ResourcesConfig(Section):
    """GPUs of the engines alone, taken from those of `cluster`."""

    gpus_per_node: int | None = Field(default=None, gt=0)  # None: all of these nodes
    num_nodes: int | None = Field(default=None, gt=0)  # None: they stand on the policy's nodes


class ColocatedConfig(Section):
    enabled: bool = True  # trainer and engine share their devices
    resources: ResourcesConfig = ResourcesConfig()  # where they do not


class SamplingConfig(Section):
    """How responses are sampled, whatever the engine."""

    max_new_tokens: int | None = Field(default=None, gt=0)  # of one response; None: up to max_total_sequence_length
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, gt=0)
    stop_token_ids: list[int] | None = None  # beside the tokenizer's end-of-sequence token
    stop_strings: list[str] | None = None
    ignore_eos: bool = False  # sample on to the token limit, whatever is sampled; for measurements
    timeout_s: float = Field(default=600.0, gt=0)  # of one request


class GenerationConfig(SamplingConfig):
    """The engine of a training run beside it."""

    backend: Literal["vllm", "hf"] = "vllm"
    in_actor: bool = False  # vllm: in a Ray actor, a process of its own; several replicas always are
    num_replicas: int | None = Field(default=None, gt=0)  # engines; None: as many as their GPUs hold, on a CPU 1
    vllm_cfg: VllmConfig = VllmConfig()
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)  # handed to vLLM's engine arguments as they are
    colocated: ColocatedConfig = ColocatedConfig()
