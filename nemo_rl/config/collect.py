"""The configurations of `nemo-rl collect` and `nemo-rl eval`: a model only sampled from, and its scores."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from nemo_rl.config.checks import check_rollouts
from nemo_rl.config.data import InputDataConfig
from nemo_rl.config.kinds import Section
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.policy import GenerationConfig, SamplingConfig
from nemo_rl.config.registries import ENGINES
from nemo_rl.config.run import RolloutBoundsConfig
from nemo_rl.errors import ConfigError

HIGHEST_ATTEMPTS = 254  # the store counts attempts in one byte


class CollectConfig(Section):
    """`collect`: which rollouts, and where they are stored."""

    output_dir: str  # a restart with the same directory resumes
    seeds: int | str | list[int] = 0  # of the samples: "0,2,5..7"; one file each
    num_repeats: int = Field(default=1, gt=0)  # rollouts per task and seed
    limit: int | None = Field(default=None, gt=0)  # tasks at most, from the start of the input
    chunk: str | None = None  # "2/4": every 4th task from task 2 on; 0/4 to 3/4 make up the whole. None: all tasks
    concurrency: int = Field(default=64, gt=0)  # rollouts at once
    max_attempts: int = Field(default=3, ge=1, le=HIGHEST_ATTEMPTS)  # of a rollout that fails, over all starts
    max_failures_in_a_row: int = Field(default=100, gt=0)  # above it the collection stops: something is broken
    max_rollout_turns: int = Field(default=1, gt=0)  # of the conversation with an environment
    write_token_ids: bool = False  # of every message, with log-probs where sampled

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(self.seeds) if isinstance(self.seeds, list) else parse_seeds(str(self.seeds))

    @property
    def chunk_index_and_count(self) -> tuple[int, int] | None:
        return None if self.chunk is None else parse_chunk(self.chunk)

    @field_validator("seeds")
    @classmethod
    def _validate_seeds(cls, seeds: int | str | list[int]) -> int | str | list[int]:
        if not isinstance(seeds, list):
            parse_seeds(str(seeds))
        elif not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise ValueError("must be whole numbers from 0 on, each once")
        return seeds

    @field_validator("chunk")
    @classmethod
    def _validate_chunk(cls, chunk: str | None) -> str | None:
        if chunk is not None:
            parse_chunk(chunk)
        return chunk


class ServerConfig(Section):
    """`server`: a running server at `address`, or an engine that is started for the collection."""

    # A server that speaks OpenAI's API; several addresses are replicas.
    address: str | list[str] | None = None  # http://host:port, with or without /v1
    model: str | None = None  # its name on the server; None: the only one
    api_key_env: str | None = None  # the environment variable that holds the key
    # completions: token ids in, token ids out (vLLM). chat: messages, which the server renders itself.
    api: Literal["auto", "completions", "chat"] = "auto"
    requests_per_minute: float | None = Field(default=None, gt=0)  # sent to the server at most; None: no limit
    tokens_per_minute: float | None = Field(default=None, gt=0)  # of prompts and responses at most; None: no limit

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
    trust_remote_code: bool = False  # run Python code that comes with the model
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)  # handed to vLLM's engine arguments as they are

    OF_ADDRESS: ClassVar[tuple[str, ...]] = ("model", "api_key_env", "api", "requests_per_minute", "tokens_per_minute")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The server's addresses; empty where an engine is started."""
        if self.address is None:
            return ()
        return (self.address,) if isinstance(self.address, str) else tuple(self.address)

    @property
    def misplaced(self) -> tuple[str, ...]:
        """Keys that were set without effect: an engine's beside an address, a server's without one."""
        engine_keys = tuple(name for name in type(self).model_fields if name not in ("address", *self.OF_ADDRESS))
        wrong = self.OF_ADDRESS if self.address is None else engine_keys
        return tuple(name for name in wrong if name in self.model_fields_set)

    def engine(self, sampling: SamplingConfig) -> GenerationConfig:
        """Return the engine as training recipes describe one; raises ConfigError for what it cannot be."""
        section: type[GenerationConfig] = ENGINES.section(self.backend, key="server.backend")  # type: ignore[assignment]
        return section.from_server(self, sampling)

    @model_serializer(mode="wrap")
    def _serialize_relevant_keys(self, values: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys without effect, so that a resolved recipe can be read again."""
        written = values(self)
        kept = {"address", *self.OF_ADDRESS} if self.address is not None else written.keys() - set(self.OF_ADDRESS)
        return {name: value for name, value in written.items() if name in kept}


class SampledRunConfig(RolloutRunConfig):
    """Rollouts of a model that is only sampled: the base of `nemo-rl collect` and examples/run_eval.py."""

    data: InputDataConfig
    server: ServerConfig = ServerConfig.with_defaults()
    rollout: RolloutBoundsConfig = RolloutBoundsConfig.with_defaults()

    @property
    def collection(self) -> CollectConfig:
        raise NotImplementedError

    @property
    def seed(self) -> int:
        """The first; others take its place one after the other."""
        return self.collection.all_seeds[0]

    @property
    def max_rollout_turns(self) -> int:
        return self.collection.max_rollout_turns


class CollectRunConfig(SampledRunConfig):
    """The configuration of `nemo-rl collect`."""

    collect: CollectConfig

    @property
    def collection(self) -> CollectConfig:
        return self.collect


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of a text: "0,2,5..7" is 0, 2, 5, 6, 7. Raises ValueError that explains the format."""
    seeds: set[int] = set()
    for part in text.split(","):
        first, separator, last = part.partition("..")
        if not (first.strip().isdecimal() and (last.strip().isdecimal() if separator else True)):
            raise ValueError(f"{text!r}: seeds look like 0,2,5..7")
        low, high = int(first), int(last if separator else first)
        if high < low:
            raise ValueError(f"{part!r}: from a seed to one that is not smaller")
        seeds.update(range(low, high + 1))
    return tuple(sorted(seeds))


def parse_chunk(text: str) -> tuple[int, int]:
    """Return index and count of a chunk: "2/4" is chunk 2 of the chunks 0 to 3. Raises ValueError."""
    index, separator, count = text.partition("/")
    if not (separator and index.isdecimal() and count.isdecimal()):
        raise ValueError(f"{text!r}: a chunk looks like 0/4 (its index from 0 on, and how many there are)")
    if int(index) >= int(count):
        raise ValueError(f"{text!r}: of {count} chunks the indices are 0 to {int(count) - 1}")
    return int(index), int(count)


def quote_seeds(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with seeds quoted, so that users need not: Hydra reads a comma as several runs."""
    return [_quote_seeds_override(text) for text in overrides]


def _quote_seeds_override(text: str) -> str:
    key, separator, value = text.partition("=")
    is_bare = key.lstrip("+") == "collect.seeds" and separator and not value.startswith(("'", '"', "["))
    return f"{key}='{value}'" if is_bare else text


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
    if server.address is None:
        server.engine(config.policy.generation)
    total, longest = config.policy.max_total_sequence_length, server.max_model_len
    if longest is not None and longest < total:
        raise ConfigError(
            "server.max_model_len", longest, f"must be at least policy.max_total_sequence_length = {total}"
        )


def _check_logger(config: SampledRunConfig) -> None:
    for name in ("wandb_enabled", "tensorboard_enabled"):
        if getattr(config.logger, name):
            raise ConfigError(f"logger.{name}", True, "metrics are logged by training alone; allowed: false")


class EvaluationConfig(Section):
    """`eval`, with NeMo-RL's names where it has them."""

    metric: Literal["pass@1", "pass@k", "cons@k"] = "pass@k"  # printed last; cons@k: majority vote
    num_tests_per_prompt: int = Field(default=1, gt=0)  # rollouts of each task
    k_value: int | None = Field(default=None, gt=0)  # None: num_tests_per_prompt
    seed: int = Field(default=42, ge=0)  # of the samples
    baseline: str | None = None  # another model or checkpoint to compare with
    output_dir: str = "evaluations"  # one directory per model; a restart resumes or reads it
    limit: int | None = Field(default=None, gt=0)  # tasks at most
    concurrency: int = Field(default=64, gt=0)  # rollouts at once
    max_attempts: int = Field(default=3, ge=1, le=HIGHEST_ATTEMPTS)  # of a rollout that fails
    max_rollout_turns: int = Field(default=1, gt=0)  # of the conversation with an environment

    @property
    def k(self) -> int:
        return self.k_value or self.num_tests_per_prompt

    @property
    def score_name(self) -> str:
        """The metric's name in profiles."""
        if self.metric == "pass@1" or (self.metric == "pass@k" and self.k == 1):
            return f"pass@1[avg-of-{self.num_tests_per_prompt}]"
        return f"pass@{self.k}" if self.metric == "pass@k" else f"majority@{self.k}"


class EvalRunConfig(SampledRunConfig):
    """The configuration of `examples/run_eval.py`."""

    eval: EvaluationConfig = EvaluationConfig.with_defaults()

    @property
    def collection(self) -> CollectConfig:
        own = self.eval
        return CollectConfig(
            output_dir=f"{own.output_dir}/{model_directory_name(self.policy.model_name)}",
            seeds=own.seed,
            num_repeats=own.num_tests_per_prompt,
            limit=own.limit,
            concurrency=own.concurrency,
            max_attempts=own.max_attempts,
            max_rollout_turns=own.max_rollout_turns,
        )

    @property
    def models(self) -> "tuple[EvalRunConfig, ...]":
        """One collection configuration per evaluated model, the baseline first."""
        if self.eval.baseline is None:
            return (self,)
        policy = self.policy.model_copy(update={"model_name": self.eval.baseline})
        return (self.model_copy(update={"policy": policy}), self)


def model_directory_name(model_name: str) -> str:
    """Return the directory name of a model's evaluation: the end of its name with a digest that keeps it unique.

    Example: "runs/exp_001/checkpoints/step_50" is "checkpoints_step_50-" and eight digits.
    """
    end = re.sub(r"[^\w.-]+", "_", "_".join(model_name.rstrip("/").split("/")[-2:]))
    return f"{end}-{hashlib.sha256(model_name.encode()).hexdigest()[:8]}"


def check_evaluation(config: EvalRunConfig) -> None:
    """Raise ConfigError for the first combination that cannot run or has no effect."""
    check_sampled(config)
    own, num_tests = config.eval, config.eval.num_tests_per_prompt
    if own.k > num_tests:
        raise ConfigError("eval.k_value", own.k, f"must be at most eval.num_tests_per_prompt = {num_tests}")
    if config.policy.generation.temperature == 0 and num_tests > 1:
        problem = "greedy samples of a task are all the same (policy.generation.temperature = 0); allowed: 1"
        raise ConfigError("eval.num_tests_per_prompt", num_tests, problem)
    if own.metric == "cons@k" and own.k == 1:
        raise ConfigError("eval.metric", "cons@k", "a vote needs several answers: eval.num_tests_per_prompt")
    if own.baseline == config.policy.model_name:
        raise ConfigError("eval.baseline", own.baseline, "is the model itself (policy.model_name)")
    if own.baseline is not None and config.server.address is not None:
        problem = "a server has one model: evaluate each by itself, then `nemo-rl profile DIR --compare DIR`"
        raise ConfigError("eval.baseline", own.baseline, problem)
