"""`nemo-rl check RUN --replay STEP`: a stored step's advantages and loss, recomputed from its rollouts and compared.

Needs `rollout.write_token_ids: true`. The batch is assembled of rollouts/train.jsonl alone; log-probs come from a plain
Hugging Face forward pass, one row at a time, with the weights that the step began with.
"""

import asyncio
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms import grpo
from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.checkpoint import CONFIG_FILE
from nemo_rl.command_line import ExitCode
from nemo_rl.config.loading import load_config
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.data.messages import parse_record
from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.interfaces import LossFn
from nemo_rl.launch.model_files import checkpoint_weights
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.training import required_logprobs
from nemo_rl.loss_types import TokenScores
from nemo_rl.losses.make import make_loss
from nemo_rl.observability.loggers import METRICS_FILE
from nemo_rl.policy.hf_model import load_model
from nemo_rl.policy.micro_batches import columns_of, count_valid, expected_optimizer_steps
from nemo_rl.policy.truncation import largest_recorded_set, make_truncation
from nemo_rl.token_columns import SAMPLING_MASK, decode_columns
from nemo_rl.types import (
    CollectedGroups,
    Failure,
    FailureClass,
    Prompt,
    StopReason,
    TokenizedMessage,
    TrainingBatch,
    Trajectory,
    TrajectoryGroup,
)

ROLLOUTS_FILE = "rollouts/train.jsonl"
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}  # tolerance of the loss by the policy's precision; advantages: 1e-5
COMPARED = ("reward", "shaped_reward", "total_num_tokens", "advantages/mean", "advantages/max", "advantages/min")


@dataclass(frozen=True, slots=True)
class ReplayedNumber:
    """One number of a step, as it was logged and as it was computed again."""

    name: str
    logged: float
    replayed: float
    tolerance: float  # relative to 1 and to the logged value

    @property
    def agrees(self) -> bool:
        """Return whether the difference is within the tolerance; NaN agrees with nothing."""
        return abs(self.logged - self.replayed) <= self.tolerance * max(1.0, abs(self.logged))


@dataclass(frozen=True, slots=True)
class Replay:
    """The comparisons of one step, and the reason if its loss is not among them."""

    step: int
    comparisons: tuple[ReplayedNumber, ...]
    no_loss_because: str | None = None


def replay(run_dir: Path, step: int) -> Replay:
    """Recompute a step. Raises ConfigError for a run that cannot be replayed, DataError for a missing step."""
    config_file = run_dir / CONFIG_FILE
    if not config_file.exists():
        raise ConfigError("RUN", str(run_dir), f"no run directory: it has no {CONFIG_FILE}")
    if step < 1:
        raise ConfigError("--replay", step, "training steps count from 1")
    config = load_config(config_file)
    _check_replayable(config)
    logged = read_metrics(run_dir / METRICS_FILE, step)
    collected = CollectedGroups(tuple(read_groups(run_dir / ROLLOUTS_FILE, step)))
    batch, _ = grpo.assemble_train_batch(config, collected, grpo.compute_train_rewards(config, None, collected))
    loss_fn, estimator = make_loss(config.loss_fn), make_advantage_estimator(config.grpo.adv_estimator, config.loss_fn)
    problem = _find_loss_problem(config, run_dir, step)
    if problem is None:
        batch[keys.PREV_LOGPROBS] = token_logprobs(_find_weights(config, run_dir, step), config, batch)
    elif required_logprobs(config, loss_fn, estimator).previous:
        raise ConfigError("--replay", step, f"its advantages read the policy's log-probs, and {problem}")
    if config.needs_reference and (problem is None or config.grpo.adv_estimator.needs_reference):
        batch[keys.REFERENCE_LOGPROBS] = (
            batch[keys.PREV_LOGPROBS].clone()  # step 1 begins with the reference's weights
            if step == 1 and problem is None
            else token_logprobs(_find_weights(config, run_dir, 1), config, batch)
        )
    metrics = grpo.estimate_advantages(config, estimator, batch)
    if problem is None:
        metrics["loss"] = _loss(loss_fn, batch)
    return Replay(step, tuple(_compare(logged, metrics, TOLERANCE[config.policy.precision])), problem)


def _check_replayable(config: GRPORunConfig) -> None:
    """Raise ConfigError for settings that need more than the stored rollouts."""
    if config.policies:
        problem = "a step of several policies cannot be replayed; allowed: {}"
        raise ConfigError("policies", list(config.policies), problem)
    required = {
        "rollout.write_token_ids": (config.rollout.write_token_ids, True),
        "rollout.write_rollouts": (config.rollout.write_rollouts, True),
        "grpo.use_dynamic_sampling": (config.grpo.use_dynamic_sampling, False),
        "grpo.async_grpo.enabled": (config.grpo.async_grpo.enabled, False),
        "grpo.adv_estimator.uses_teachers": (config.grpo.adv_estimator.uses_teachers, False),
        "grpo.adv_estimator.needs_greedy_baseline": (config.grpo.adv_estimator.needs_greedy_baseline, False),
        **{f"reward_penalties.{name}": (True, False) for name in config.reward_penalties.enabled},
    }
    if largest_recorded_set(config.policy.generation):
        required["rollout.write_token_columns"] = (config.rollout.write_token_columns, True)
    for key, (value, allowed) in required.items():
        if value is not allowed:
            raise ConfigError(key, value, f"the run's rollouts cannot be replayed; allowed: {str(allowed).lower()}")
    for key in ("invalid_tool_call_advantage", "malformed_thinking_advantage"):
        if (value := getattr(config.grpo, key)) is not None:
            raise ConfigError(f"grpo.{key}", value, "the run's rollouts cannot be replayed; allowed: null")


def _find_loss_problem(config: GRPORunConfig, run_dir: Path, step: int) -> str | None:
    """Return why the loss cannot be recomputed from the weights that the step began with."""
    if expected_optimizer_steps(config.grpo.num_samples_per_step, config.policy.train_global_batch_size) > 1:
        return "the step took several optimizer steps, whose weights are not stored"
    if _find_weights(config, run_dir, step) is None:
        return f"there is no checkpoint of step {step - 1}, whose weights sampled the step"
    return None


def _find_weights(config: GRPORunConfig, run_dir: Path, step: int) -> str | None:
    """Return the directory or the name of the model that the step began with; None if it is not stored."""
    if step == 1:
        return asyncio.run(resolve_model(config.policy.model_name))
    checkpoints = Path(config.checkpointing.checkpoint_dir or run_dir / "checkpoints")
    found = checkpoint_weights(str(checkpoints / f"step_{step - 1}"))
    return None if found is None else str(found)


@torch.no_grad()
def token_logprobs(weights: str | None, config: GRPORunConfig, batch: TrainingBatch) -> torch.Tensor:
    """Return the log-probs of the sampled tokens, 0 elsewhere: [B, T]; each row is a pass of its own, in float32."""
    assert weights is not None
    model = load_model(weights, config.policy.hf_config_overrides).float().eval()
    truncation = make_truncation(config.policy.generation)
    result = torch.zeros(batch[keys.TOKEN_IDS].shape)
    for row, length in enumerate(batch[keys.LENGTHS].tolist()):
        ids = batch[keys.TOKEN_IDS][row : row + 1, :length]
        logits = model(input_ids=ids, use_cache=False).logits.float() / config.policy.generation.temperature
        sets = (columns_of(batch) or {}).get(SAMPLING_MASK)
        sets = None if sets is None else sets[row, 1:length]
        logits, _ = truncation.replay(logits[0, :-1], ids[0, 1:], sets)
        scores = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        result[row, 1:length] = scores
    return result * batch[keys.TOKEN_MASK]


def _loss(loss_fn: LossFn, batch: TrainingBatch) -> float:
    """Return the loss of the whole batch, in one piece; `prev_logprobs` are the current ones."""
    normalizer = count_valid(batch, torch.arange(len(batch)))
    loss, _ = loss_fn(TokenScores(batch[keys.PREV_LOGPROBS]), batch, normalizer)
    return float(loss)


def _compare(logged: Mapping[str, float], replayed: Mapping[str, float], tolerance: float) -> Iterator[ReplayedNumber]:
    for name in (*COMPARED, "loss"):
        if name in replayed and f"train/{name}" in logged:
            bound = tolerance if name == "loss" else TOLERANCE["float32"]
            yield ReplayedNumber(f"train/{name}", logged[f"train/{name}"], replayed[name], bound)


# ---- the run's files ----


def read_metrics(path: Path, step: int) -> dict[str, float]:
    """Return the logged metrics of a step; raises DataError if there are none."""
    found: dict[str, float] = {}
    for row in read_jsonl(path):
        if row.get("step") == step:
            found |= {name: float(value) for name, value in row.items()}
    if "train/loss" not in found:
        raise DataError(f"{path} has no training step {step}")
    return found


def read_groups(path: Path, step: int) -> list[TrajectoryGroup]:
    """Return the groups of a step in the order of the file; raises DataError if it has none."""
    by_id: dict[str, list[Trajectory]] = {}
    for row in read_jsonl(path):
        if row["step"] == step:
            by_id.setdefault(row["group_id"], []).append(read_trajectory(row))
    if not by_id:
        raise DataError(f"{path} has no rollouts of step {step}")
    return [TrajectoryGroup(group_id, group[0].prompt, tuple(group)) for group_id, group in by_id.items()]


def read_trajectory(row: Mapping[str, Any]) -> Trajectory:
    """Return the rollout of one line, with what training reads of it."""
    failure = row["failure"]
    return Trajectory(
        prompt=Prompt(row["prompt_id"], row["task_name"], (), dataset=row["dataset"], agent_name=row.get("env", "")),
        group_id=row["group_id"],
        generation_index=row["generation_index"],
        message_log=_read_log(row["messages"]),
        stop_reason=StopReason(row["stop_reason"]),
        rewards=row["rewards"],
        num_turns=row["num_turns"],
        failure=None if failure is None else Failure(FailureClass(failure["class"]), failure["cause"]),
        other_chains=tuple(_read_log(chain) for chain in row.get("other_chains", ())),
        chain_rewards=tuple(row.get("chain_rewards", ())),
        policy_rewards=row.get("policy_rewards", {}),
    )


def _read_log(messages: Sequence[Mapping[str, Any]]) -> tuple[TokenizedMessage, ...]:
    def logprobs(message: Mapping[str, Any]) -> tuple[float, ...] | None:
        stored = message.get("generation_logprobs")
        return None if stored is None else tuple(-math.inf if value is None else value for value in stored)

    return tuple(
        TokenizedMessage(
            parse_record(m),
            tuple(m["token_ids"]),
            logprobs(m),
            columns=decode_columns(m.get("columns", {})),
            policy=m.get("policy", ""),
        )
        for m in messages
    )


# ---- the command ----


def format_replay(result: Replay) -> str:
    """Format one line per number, and the reason if the loss is missing."""
    lines = [
        f"{c.name:<24} logged {c.logged:<14.7g} replayed {c.replayed:<14.7g} {'agrees' if c.agrees else 'DIFFERS'}"
        for c in result.comparisons
    ]
    if result.no_loss_because is not None:
        lines.append(f"train/loss is not compared: {result.no_loss_because}")
    return "\n".join((f"step {result.step}", *lines)) + "\n"


def run_replay(run_dir: Path, step: int) -> ExitCode:
    """Replay a step and print the comparison; FAILED if a number differs."""
    result = replay(run_dir, step)
    sys.stdout.write(format_replay(result))
    return ExitCode.DONE if all(c.agrees for c in result.comparisons) else ExitCode.FAILED
