"""The whole configuration of `examples/run_eval.py`: the scores of a model, optionally compared with another."""

import hashlib
import re
from typing import Literal

from pydantic import Field

from nemo_rl.config.collect import HIGHEST_ATTEMPTS, CollectConfig, SampledRunConfig, check_sampled
from nemo_rl.config.section import Section
from nemo_rl.errors import ConfigError


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
