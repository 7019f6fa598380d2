"""The section `server` of a collection: a running server, or the engine that is started for it."""

from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from nemo_rl.config.kinds import Section


class ServerConfig(Section):
    """`server`: a running server at `address`, or an engine that is started for the collection."""

    # A server that speaks OpenAI's API; several addresses are replicas.
    address: str | list[str] | None = None  # http://host:port, with or without /v1
    model: str | None = None  # its name on the server, None: the only one; or one of `adapters`
    api_key_env: str | None = None  # the environment variable that holds the key
    # completions: token ids in, token ids out (vLLM). chat: messages, which the server renders itself.
    api: Literal["auto", "completions", "chat"] = "auto"
    requests_per_minute: float | None = Field(default=None, gt=0)  # sent to the server at most; None: no limit
    tokens_per_minute: float | None = Field(default=None, gt=0)  # prompts and responses; None: no limit

    # The engine; errors beside `address`.
    backend: str = "vllm"  # an entry of ENGINES; hf: transformers, slow and exactly repeatable
    tensor_parallel_size: int = Field(default=1, gt=0)  # GPUs of one copy of the model
    data_parallel_size: int = Field(default=1, gt=0)  # copies of the model, by vLLM's own data parallelism
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)  # share of a GPU's memory for weights and KV cache
    kv_cache_memory_bytes: int | None = Field(default=None, gt=0)  # None on CUDA: by utilization; on a CPU: 512 MiB
    max_model_len: int | None = Field(default=None, gt=0)  # None: policy.max_total_sequence_length
    max_num_seqs: int | None = Field(default=None, gt=0)  # None: 256
    enforce_eager: bool | None = None  # None: true on a CPU, false on CUDA
    enable_prefix_caching: bool = True  # reuse the KV cache of tokens that several requests begin with
    # LoRA adapters in peft's format, by the names that calls give them: directories beside the engine's base model,
    # which is policy.model_name. Rollouts are sampled under `model`.
    adapters: dict[str, str] = Field(default_factory=dict)
    trust_remote_code: bool = False  # run Python code that comes with the model
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)  # handed to vLLM's engine arguments as they are

    OF_ADDRESS: ClassVar[tuple[str, ...]] = ("model", "api_key_env", "api", "requests_per_minute", "tokens_per_minute")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The server's addresses; empty if an engine is started."""
        if self.address is None:
            return ()
        return (self.address,) if isinstance(self.address, str) else tuple(self.address)

    @property
    def misplaced(self) -> tuple[str, ...]:
        """Keys that were set without effect: an engine's beside an address, a server's without one."""
        engine_keys = tuple(name for name in type(self).model_fields if name not in ("address", *self.OF_ADDRESS))
        wrong = self._without_effect if self.address is None else engine_keys
        return tuple(name for name in wrong if name in self.model_fields_set)

    @property
    def _without_effect(self) -> tuple[str, ...]:
        """Keys without effect on an engine."""
        return tuple(name for name in self.OF_ADDRESS if name != "model" or not self.adapters)

    def without_adapters(self) -> "ServerConfig":
        """Return the section of the base model alone."""
        kept = self.model_fields_set - {"adapters", "model"}
        return type(self)(**{name: getattr(self, name) for name in kept})

    @model_serializer(mode="wrap")
    def _serialize_relevant_keys(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys without effect, so that a resolved recipe can be read again."""
        written = values(self)
        of_engine = written.keys() - set(self._without_effect)
        kept = {"address", *self.OF_ADDRESS} if self.address is not None else of_engine
        return {name: value for name, value in written.items() if name in kept}
