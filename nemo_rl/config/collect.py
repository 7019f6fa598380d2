"""The configurations of `nemo-rl collect` and `nemo-rl eval`: a model only sampled from, and its scores."""

import hashlib
import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator

from nemo_rl.config.checks import check_rollouts
from nemo_rl.config.data import InputDataConfig
from nemo_rl.config.kinds import Section
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.policy import GenerationConfig
from nemo_rl.config.registries import ENGINES
from nemo_rl.config.server import ServerConfig
from nemo_rl.config.shared_sections import RolloutBoundsConfig, require_token_ids
from nemo_rl.config.value_types import MAX_SEED, Seed
from nemo_rl.errors import ConfigError

POLICY = "policy"  # the name that agents have for the sampled model
HIGHEST_ATTEMPTS = 254  # the store counts attempts in one byte
MAX_SEEDS = 100_000  # per collection: each has a file of its own


class CollectConfig(Section):
    """`collect`: which rollouts, and where they are stored."""

    output_dir: str  # a restart with the same directory resumes
    seeds: int | str | list[int] = 0  # seeds of the samples, one file per seed: "0,2,5..7"
    num_repeats: int = Field(default=1, gt=0)  # rollouts per task and seed
    limit: int | None = Field(default=None, gt=0)  # tasks at most, from the start of the input
    chunk: str | None = None  # "2/4": every 4th task from task 2 on; 0/4 to 3/4 make up the whole. None: all tasks
    concurrency: int = Field(default=64, gt=0)  # rollouts at once
    max_attempts: int = Field(default=3, ge=1, le=HIGHEST_ATTEMPTS)  # attempts at a failing rollout, over all starts
    max_failures_in_a_row: int = Field(default=100, gt=0)  # above it the collection stops: something is broken
    max_rollout_turns: int = Field(default=1, gt=0)  # turns of a conversation with an environment
    write_token_ids: bool = False  # store each message's token ids, with log-probs if sampled
    write_token_columns: bool = False  # with write_token_ids, also what the engine decided per token, compressed

    _check_columns = field_validator("write_token_columns")(require_token_ids)

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

    @property
    def sampled_name(self) -> str:
        """Return the model's name, with that of the adapter on it."""
        name = self.policy.model_name
        return f"{name}/{self.server.model}" if self.server.adapters else name

    @property
    def policy_table(self) -> tuple[str, tuple[str, ...]]:
        return "server.adapters", tuple(self.server.adapters)

    @property
    def speakers(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(section.policies) for name, section in self.env.items() if section.policies}

    @property
    def engine(self) -> GenerationConfig:
        """Return the engine that is started, as training recipes describe one; raises ConfigError if it cannot be."""
        section: type[GenerationConfig] = ENGINES.section(self.server.backend, key="server.backend")  # type: ignore[assignment]
        return section.from_server(self.server, self.policy.generation)


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
        if high - low >= MAX_SEEDS or high > MAX_SEED:
            raise ValueError(f"{part!r}: at most {MAX_SEEDS} seeds, each at most {MAX_SEED}")
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
    parts = [text.partition("=") for text in overrides]
    return [
        f"{key}='{value}'"
        if key.lstrip("+") == "collect.seeds" and value and not value.startswith(("'", '"', "["))
        else f"{key}{separator}{value}"
        for key, separator, value in parts
    ]


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
        _ = config.engine
    if server.adapters:
        _check_adapters(config)
    total, longest = config.policy.max_total_sequence_length, server.max_model_len
    if longest is not None and longest < total:
        raise ConfigError(
            "server.max_model_len", longest, f"must be at least policy.max_total_sequence_length = {total}"
        )


def _check_adapters(config: SampledRunConfig) -> None:
    server = config.server
    if not config.engine.holds_adapters:
        problem = f"the {server.backend} engine holds whole weights; allowed: backend: vllm"
        raise ConfigError("server.adapters", server.adapters, problem)
    if server.model not in server.adapters:
        problem = "names the adapter of server.adapters that rollouts are sampled under"
        raise ConfigError("server.model", server.model, problem, known=list(server.adapters))
    for name in (POLICY, config.policy.model_name):
        if name in server.adapters:
            problem = "is the name of the sampled model" if name == POLICY else "is the name of the base model"
            raise ConfigError("server.adapters", name, f"{problem}; expected another")


def _check_logger(config: SampledRunConfig) -> None:
    for name in ("wandb_enabled", "tensorboard_enabled"):
        if getattr(config.logger, name):
            raise ConfigError(f"logger.{name}", True, "metrics are logged by training alone; allowed: false")


class EvaluationConfig(Section):
    """`eval`, with NeMo-RL's names if it has them."""

    metric: Literal["pass@1", "pass@k", "cons@k"] = "pass@k"  # printed last; cons@k: majority vote
    num_tests_per_prompt: int = Field(default=1, gt=0)  # rollouts of each task
    k_value: int | None = Field(default=None, gt=0)  # None: num_tests_per_prompt
    seed: Seed = 42  # seeds the samples
    baseline: str | None = None  # another model or checkpoint to compare with
    output_dir: str = "evaluations"  # one directory per model; a restart resumes or reads it
    limit: int | None = Field(default=None, gt=0)  # tasks at most
    concurrency: int = Field(default=64, gt=0)  # rollouts at once
    max_attempts: int = Field(default=3, ge=1, le=HIGHEST_ATTEMPTS)  # attempts at a failing rollout
    max_rollout_turns: int = Field(default=1, gt=0)  # turns of a conversation with an environment

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
            output_dir=f"{own.output_dir}/{model_directory_name(self.sampled_name)}",
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
        baseline = self.eval.baseline
        if baseline is None:
            return (self,)
        if baseline in self.server.adapters:
            return (self.model_copy(update={"server": self.server.model_copy(update={"model": baseline})}), self)
        policy, server = self.policy.model_copy(update={"model_name": baseline}), self.server.without_adapters()
        return (self.model_copy(update={"policy": policy, "server": server}), self)


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
    itself, key = config.policy.model_name, "policy.model_name"
    if config.server.adapters:
        itself, key = str(config.server.model), "server.model"
    if own.baseline == itself:
        raise ConfigError("eval.baseline", own.baseline, f"is the model itself ({key})")
    if own.baseline is not None and config.speakers:
        problem = (
            f"env.{next(iter(config.speakers))}.policies names the adapters that play, so a game has no other model"
        )
        raise ConfigError("eval.baseline", own.baseline, f"{problem}; allowed: null, or an evaluation of each")
    if own.baseline is not None and config.server.address is not None:
        problem = "a server has one model: evaluate each by itself, then `nemo-rl profile DIR --compare DIR`"
        raise ConfigError("eval.baseline", own.baseline, problem)
