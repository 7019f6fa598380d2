"""Training that every backend shares: optimizers and schedules by dotted path, and reports of optimizer steps.

`policy.scheduler` is one scheduler, `{name, kwargs}`, or a list of them that ends with `{milestones: [...]}`: the steps
at which the next one takes over (torch's SequentialLR). A schedule counts training steps, as NeMo-RL's do, whatever
the number of optimizer steps in each. Metrics are reduced over micro-batches, then ranks, then optimizer steps.
"""

import importlib
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig, SchedulerStageConfig
from nemo_rl.config.supervised import RewardModelPolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import LossFn, Metric, Normalizer, TokenScores
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)
Reduction = Literal["sum", "count", "min", "max"]
SkipCause = Literal["no_valid_tokens", "nonfinite_loss", "nonfinite_gradient"]


def check_optimizer(config: PolicyConfig | RewardModelPolicyConfig) -> None:
    """Make optimizer and schedule for a dummy weight.

    Raises:
        ConfigError: with the key that is wrong, e.g. `policy.optimizer.kwargs.lrr` or `policy.scheduler.1.name`.
    """
    optimizer = make_optimizer(config, [torch.nn.Parameter(torch.zeros(1))])
    make_scheduler(config, optimizer)


def make_optimizer(
    config: PolicyConfig | RewardModelPolicyConfig, parameters: Iterable[torch.nn.Parameter] | list[dict[str, Any]]
) -> Optimizer:
    """Make the optimizer of `policy.optimizer`; Adam is fused (a third of the time) unless the kwargs choose."""
    key = "policy.optimizer"
    cls = _resolve(f"{key}.name", config.optimizer.name, Optimizer)
    kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in config.optimizer.kwargs.items()}
    _check_kwargs(f"{key}.kwargs", kwargs, _keyword_names(cls))
    if cls in (torch.optim.Adam, torch.optim.AdamW) and not kwargs.keys() & {"fused", "foreach", "differentiable"}:
        kwargs["fused"] = True
    return _build(f"{key}.kwargs", config.optimizer.kwargs, cls, parameters, kwargs)


def make_scheduler(config: PolicyConfig | RewardModelPolicyConfig, optimizer: Optimizer) -> LRScheduler | None:
    """Make the schedule of `policy.scheduler`; None: the learning rate is constant."""
    section = config.scheduler
    if section is None:
        return None
    if isinstance(section, SchedulerStageConfig):
        if section.milestones is not None:
            raise ConfigError("policy.scheduler.milestones", section.milestones, "belongs to a list of schedulers")
        return _make_stage("policy.scheduler", section, optimizer)
    stages = [(i, s) for i, s in enumerate(section) if s.milestones is None]
    milestones = [(i, s.milestones) for i, s in enumerate(section) if s.milestones is not None]
    schedulers = [_make_stage(f"policy.scheduler.{i}", stage, optimizer) for i, stage in stages]
    if len(schedulers) == 1 and not milestones:
        return schedulers[0]
    if len(milestones) != 1:
        raise ConfigError("policy.scheduler", len(milestones), "a list needs exactly one entry with milestones")
    index, steps = milestones[0]
    _check_milestones(f"policy.scheduler.{index}", section[index], len(schedulers))
    return SequentialLR(optimizer, schedulers, steps)


class RecordedLoss:
    """A loss that keeps the log-probs it is given, with the numbers of their rows (`batch.RECORDED`)."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self.required_keys = loss_fn.required_keys | {keys.RECORDED}
        self.required_scores = loss_fn.required_scores
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # (numbers [n], log-probs [n, t]) on their device

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        self._kept.append((batch[keys.RECORDED], scores.logprobs.detach().clone()))
        return self._loss_fn(scores, batch, normalizer)

    def recorded(self) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor]]]:
        """Yield (numbers, log-probs) of the rows that have a number, on the CPU; waits for the device."""
        for numbers, logprobs in self._kept:
            chosen = numbers.cpu() >= 0
            if chosen.any():
                yield numbers.cpu()[chosen], (logprobs.cpu()[chosen],)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The report of one optimizer step."""

    metrics: dict[str, float]  # the loss function's, and `loss`
    reductions: dict[str, Reduction]  # of each metric
    normalizer: Normalizer
    grad_norm: float | None  # before clipping; None: no valid token
    skip_cause: SkipCause | None  # None: the step was taken

    @property
    def is_skipped(self) -> bool:
        """Return whether the weights stayed as they were."""
        return self.skip_cause is not None


def skip_without_tokens(normalizer: Normalizer, num_samples: int) -> OptimizerStep:
    """Return the report of a step that has nothing to train on, with a warning."""
    logger.warning("skipped an optimizer step of %d samples without a valid token", num_samples)
    return OptimizerStep({"loss": 0.0}, {"loss": "sum"}, normalizer, grad_norm=None, skip_cause="no_valid_tokens")


def find_skip_cause(loss: float, grad_norm: float) -> SkipCause | None:
    """Return why a step with this loss and gradient must be skipped, with a warning; None: it can be taken.

    A loss that is no number may have a finite gradient, where what makes it so is clamped or masked; such a step
    learns from an arbitrary part of its batch.
    """
    cause: SkipCause | None = None
    if not math.isfinite(loss):
        cause = "nonfinite_loss"
    elif not math.isfinite(grad_norm):
        cause = "nonfinite_gradient"
    if cause is not None:
        logger.warning(
            "skipped an optimizer step: loss is %s, gradient norm is %s; weights are unchanged", loss, grad_norm
        )
    return cause


def accumulate_metric(metric: Metric, accumulated: torch.Tensor | None) -> torch.Tensor:
    """Return the metric accumulated over one more micro-batch; it stays on its device, so that nothing synchronizes."""
    value = metric.value.detach()
    if accumulated is None:
        return value
    if metric.reduction in ("sum", "count"):
        return accumulated + value
    return torch.minimum(accumulated, value) if metric.reduction == "min" else torch.maximum(accumulated, value)


def reduce_over_ranks(
    parts: list[tuple[dict[str, float], dict[str, Reduction]]],
) -> tuple[dict[str, float], dict[str, Reduction]]:
    """Return the metrics of all ranks and their reductions from those of each; a rank without samples has none."""
    if len(parts) == 1:
        return parts[0]
    collected: dict[str, list[float]] = defaultdict(list)
    reductions: dict[str, Reduction] = {}
    for values, reductions_of_part in parts:
        reductions |= reductions_of_part
        for name, value in values.items():
            collected[name].append(value)
    combine = {"sum": sum, "count": sum, "min": min, "max": max}
    return {name: combine[reductions[name]](values) for name, values in collected.items()}, reductions


def reduce_over_optimizer_steps(steps: list[OptimizerStep]) -> dict[str, float]:
    """Return the metrics of one training step: sums are averaged over optimizer steps, counts are added up, and
    minima and maxima are those of all steps."""
    collected: dict[str, list[float]] = defaultdict(list)
    reductions: dict[str, Reduction] = {}
    for step in steps:
        reductions.update(step.reductions)
        for name, value in step.metrics.items():
            collected[name].append(value)
    metrics = {name: _reduce_over_steps(values, reductions[name]) for name, values in collected.items()}
    norms = [s.grad_norm for s in steps if s.grad_norm is not None]
    finite = [n for n in norms if math.isfinite(n)]
    return {
        **metrics,
        "grad_norm": sum(finite) / len(finite) if finite else (norms or [0.0])[0],
        "global_valid_seqs": sum(s.normalizer.num_valid_trajectories for s in steps),
        "global_valid_toks": sum(s.normalizer.num_valid_tokens for s in steps),
        "num_optimizer_steps": float(sum(not s.is_skipped for s in steps)),
        "num_skipped_steps": float(sum(s.is_skipped for s in steps)),
        **{f"skipped_steps/{cause}": float(sum(s.skip_cause == cause for s in steps)) for cause in get_args(SkipCause)},
    }


def _check_milestones(key: str, entry: SchedulerStageConfig, num_schedulers: int) -> None:
    steps = entry.milestones or []
    if entry.name is not None or entry.kwargs:
        raise ConfigError(f"{key}.name", entry.name, "the entry with milestones has nothing else")
    if len(steps) != num_schedulers - 1:
        raise ConfigError(
            f"{key}.milestones", steps, f"{num_schedulers} schedulers need {num_schedulers - 1} milestones"
        )
    if any(a >= b for a, b in zip([0, *steps], steps, strict=False)):
        raise ConfigError(f"{key}.milestones", steps, "must be positive and rise")


def _make_stage(key: str, stage: SchedulerStageConfig, optimizer: Optimizer) -> LRScheduler:
    if stage.name is None:
        raise ConfigError(f"{key}.name", None, "needs a dotted path such as torch.optim.lr_scheduler.LinearLR")
    cls = _resolve(f"{key}.name", stage.name, LRScheduler)
    if issubclass(cls, ReduceLROnPlateau):
        raise ConfigError(f"{key}.name", stage.name, "follows a metric, which is not supported")
    _check_kwargs(f"{key}.kwargs", stage.kwargs, _keyword_names(cls))
    return _build(f"{key}.kwargs", stage.kwargs, cls, optimizer, stage.kwargs)


def _resolve(key: str, path: str, base: type) -> type[Any]:
    """Return the class at a dotted path; raises ConfigError with the nearest class of its module."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(key, path, f"no module {module_name!r} can be imported ({error})") from error
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    classes = [n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base) and c is not base]
    matches = [n for n in classes if n.lower() == name.lower()]
    problem = f"{module_name} has no {base.__name__} of that name"
    if matches:
        raise ConfigError(key, path, f"{problem}; did you mean {module_name}.{matches[0]}?")
    raise ConfigError(key, path, f"{problem}; known: {', '.join(sorted(classes))}")


def _keyword_names(cls: type) -> set[str] | None:
    """Return the constructor's keywords after its first parameter; None: it takes any."""
    parameters = list(inspect.signature(cls).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters[1:]}


def _check_kwargs(key: str, kwargs: Mapping[str, Any], known: set[str] | None) -> None:
    for name, value in kwargs.items():
        if known is not None and name not in known:
            raise ConfigError(f"{key}.{name}", value, "unknown key", known=known)


def _build(key: str, shown: Mapping[str, Any], cls: type[Any], target: Any, kwargs: Mapping[str, Any]) -> Any:
    try:
        return cls(target, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(key, dict(shown), f"{cls.__name__} refuses it: {error}") from error


def _reduce_over_steps(values: list[float], reduction: Reduction) -> float:
    if reduction in ("min", "max"):
        return min(values) if reduction == "min" else max(values)
    return sum(values) if reduction == "count" else sum(values) / len(values)
