"""Reports of a training step and of a validation: metrics, rates, waits and sample rollouts."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.algorithms.validation import ValidationResult
from nemo_rl.interfaces import Logger
from nemo_rl.metric_names import CHECKPOINT_ONLY_METRICS, COLLECTION_PHASES, POLICY_PHASES
from nemo_rl.observability.console import Progress
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import FailureClass, Trajectory

WAITING_PHASES = {
    "generation": COLLECTION_PHASES,
    "teachers": ("teacher_logprobs",),
    "weight_sync": ("weight_sync",),
    "checkpointing": ("checkpointing",),
}
NUM_TRAIN_SAMPLES = 16  # rollouts of a table
SAMPLE_COLUMNS = ("prompt", "response", "reward", "stop_reason")


class ReportTarget(Protocol):
    """A run that reports its steps."""

    @property
    def logger(self) -> Logger: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def num_devices(self) -> int: ...

    @property
    def num_train_devices(self) -> int: ...


def report_step(
    run: ReportTarget, step: int, metrics: dict[str, float], timer: StepTimer, *, move_s: Mapping[str, float]
) -> None:
    """Log the metrics of one training step under their prefixes, and show them; `move_s`: seconds by kind of move."""
    seconds = timer.seconds()
    validation_s = seconds.pop("total_validation_time", 0.0)
    devices = {"num_devices": run.num_devices, "num_train_devices": run.num_train_devices}
    performance = throughput(metrics, seconds, validation_s, **devices)
    run.logger.log_metrics(
        {_add_train_prefix(name): value for name, value in metrics.items() if name not in CHECKPOINT_ONLY_METRICS}
        | {f"efficiency/{name}": value for name, value in efficiency(seconds, validation_s).items()}
        | {f"timing/train/{name}": value for name, value in seconds.items()}
        | {f"timing/moves/{name}": value for name, value in move_s.items()}
        | {f"performance/{name}": value for name, value in performance.items()},
        step,
    )
    run.progress.step(step, metrics=metrics | performance, seconds=seconds)


def _add_train_prefix(name: str) -> str:
    """Return the metric's full name; a background source reports waits, which have a prefix of their own."""
    return name if name.startswith("efficiency/") else f"train/{name}"


def efficiency(seconds: dict[str, float], validation_s: float) -> dict[str, float]:
    """Return the share of a step in which the policy computed, and the seconds in which it waited, by cause."""
    busy_s = sum(seconds.get(name, 0.0) for name in POLICY_PHASES)
    waits = {cause: sum(seconds.get(name, 0.0) for name in names) for cause, names in WAITING_PHASES.items()}
    waits["validation"] = validation_s
    shares = {"training_busy_pct": 100 * busy_s / max(seconds["total_step_time"], 1e-9)}
    return shares | {f"exposed_wait_s/{cause}": waited for cause, waited in waits.items()}


def throughput(
    metrics: dict[str, float],
    seconds: dict[str, float],
    validation_s: float,
    *,
    num_devices: int = 1,
    num_train_devices: int = 1,
) -> dict[str, float]:
    """Return the rates of one step, without the time of its validation; `num_devices` train, sample or score."""
    total = max(seconds["total_step_time"] - validation_s, 1e-9)
    num_tokens = metrics["total_num_tokens"]
    trained = num_tokens / max(seconds["policy_training"], 1e-9)
    rates = {
        "samples_per_sec": metrics["global_valid_seqs"] / total,
        "tokens_per_sec": num_tokens / total,
        "tokens_per_sec_per_device": num_tokens / total / num_devices,
        "policy_training_tokens_per_sec": trained,
        "policy_training_tokens_per_sec_per_device": trained / num_train_devices,
    }
    if "num_rollouts" in metrics:
        generation_s = seconds.get("generation", total)  # background generation takes the whole step
        rates["generation_tokens_per_sec"] = _num_sampled_tokens(metrics) / max(generation_s, 1e-9)
    if "train_flops" in metrics:  # the policy's count for the whole step
        rates["train_flops"] = metrics["train_flops"] / max(seconds["policy_training"], 1e-9)
    if "train_peak_flops" in metrics:
        rates["mfu"] = rates["train_flops"] / metrics["train_peak_flops"]
    return rates


def _num_sampled_tokens(metrics: dict[str, float]) -> float:
    """Return the sampled tokens of all rollouts that did not fail, also of those not trained on."""
    num_failed = sum(metrics[f"failures/{failure_class}"] for failure_class in FailureClass)
    return metrics["mean_gen_tokens_per_sample"] * (metrics["num_rollouts"] - num_failed)


async def report_validation(run: TrainingRun, step: int, validation: ValidationResult, timer: StepTimer) -> None:
    """Log the metrics of one validation and its first rollouts as a table; write all rollouts to a file."""
    metrics = {f"validation/{name}": value for name, value in validation.metrics.items()}
    metrics["timing/validation/total_validation_time"] = timer.seconds()["total_validation_time"]
    run.logger.log_metrics(metrics, step)
    if run.validation_rollouts is not None:
        await run.validation_rollouts.write(step, validation.trajectories)
    rows = sample_rows(validation.trajectories[: run.config.logger.num_val_samples_to_print])
    run.logger.log_table("validation/samples", SAMPLE_COLUMNS, rows, step)
    run.progress.validation(step, metrics=validation.metrics, columns=SAMPLE_COLUMNS, rows=rows)


def report_train_samples(run: TrainingRun, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Log the first rollouts of a training step as a table, if one is due (`logger.train_samples_period`)."""
    period = run.config.logger.train_samples_period
    if period and step % period == 0:
        run.logger.log_table("train/samples", SAMPLE_COLUMNS, sample_rows(trajectories[:NUM_TRAIN_SAMPLES]), step)


def sample_rows(trajectories: Sequence[Trajectory]) -> list[tuple[str, str, str, str]]:
    """Return one row for each rollout, as SAMPLE_COLUMNS; a failed one has its cause in place of a reward."""
    rows = []
    for trajectory in trajectories:
        prompt = "\n".join(message.content for message in trajectory.prompt.messages)
        turns = [m.message for m in trajectory.message_log[len(trajectory.prompt.messages) :]]
        response = "\n".join(f"{m.role}: {m.content}" if len(turns) > 1 else m.content for m in turns)
        failure = trajectory.failure
        reward = f"failed: {failure.cause}" if failure else f"{trajectory.reward:.3f}"
        rows.append((prompt, response, reward, str(trajectory.stop_reason)))
    return rows
