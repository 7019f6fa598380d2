"""The optimizer and the learning-rate schedule of a section, by dotted path.

`policy.scheduler` is one scheduler, `{name, kwargs}`, or a list of them that ends with `{milestones: [...]}`: the steps
at which the next one takes over (torch's SequentialLR). A schedule counts training steps, as NeMo-RL's do, whatever
the number of optimizer steps in each.
"""

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from nemo_rl.config.policy import PolicyConfig, SchedulerStageConfig
from nemo_rl.config.supervised_runs import RewardModelPolicyConfig
from nemo_rl.errors import ConfigError


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
    keywords = _keyword_names(cls)
    _check_kwargs(f"{key}.kwargs", kwargs, keywords)
    if not config.optimizer.decay_norm_and_bias and keywords is not None and "weight_decay" not in keywords:
        raise ConfigError(f"{key}.decay_norm_and_bias", False, f"{cls.__name__} has no weight_decay; allowed: true")
    if cls in (torch.optim.Adam, torch.optim.AdamW) and not kwargs.keys() & {"fused", "foreach", "differentiable"}:
        kwargs["fused"] = True
    return _build(f"{key}.kwargs", config.optimizer.kwargs, cls, parameters, kwargs)


def parameter_groups(
    weights: Iterable[tuple[int, torch.nn.Parameter]], *, decay_norm_and_bias: bool
) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups of (number of dimensions, parameter) pairs, without empty ones.

    One group, or else one with weight decay and one without, of the tensors of one dimension: norms and biases.
    """
    pairs = list(weights)
    if decay_norm_and_bias:
        return [{"params": [parameter for _, parameter in pairs]}]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for ndim, parameter in pairs if ndim > 1]},
        {"params": [parameter for ndim, parameter in pairs if ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


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
