"""Megatron's own optimizer and schedule options as those of torch."""

import math
from collections.abc import Callable
from typing import Any

from nemo_rl.config.policy import OptimizerConfig, PolicyConfig, SchedulerStageConfig
from nemo_rl.policy.megatron.backend import MegatronOptimizerConfig, TrainedMegatronConfig


def to_torch_config(config: PolicyConfig) -> PolicyConfig:
    """Return the policy's section with Megatron's own optimizer and schedule, if set, in torch's names."""
    section = config.section_of(TrainedMegatronConfig)
    if section.optimizer is None and section.scheduler is None:
        return config
    changes: dict[str, Any] = {}
    if section.optimizer is not None:
        changes["optimizer"] = _torch_optimizer(section.optimizer)
        changes["scheduler"] = None
    if section.scheduler is not None:
        factor = learning_rate_factor(section, float(changes.get("optimizer", config.optimizer).kwargs["lr"]))
        changes["scheduler"] = SchedulerStageConfig(
            name="torch.optim.lr_scheduler.LambdaLR", kwargs={"lr_lambda": factor}
        )
    return config.model_copy(update=changes)


def learning_rate_factor(section: TrainedMegatronConfig, lr: float) -> Callable[[int], float]:
    """Return the factor of the learning rate in each training step, counted from 0.

    Warm-up: from `lr_warmup_init` to `lr` over `lr_warmup_iters` steps. Then, up to `lr_decay_iters`, from `lr` to
    `min_lr` linearly or along half a cosine, or constant.
    """
    schedule = section.scheduler
    assert schedule is not None
    lowest = section.optimizer.min_lr if section.optimizer is not None else 0.0
    warmup, end = schedule.lr_warmup_iters, schedule.lr_decay_iters

    def factor(step: int) -> float:
        if step < warmup:
            return (schedule.lr_warmup_init + (lr - schedule.lr_warmup_init) * step / warmup) / lr
        if schedule.lr_decay_style == "constant" or end is None:
            return 1.0
        done = min(1.0, (step - warmup) / max(end - warmup, 1))
        left = 1 - done if schedule.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
        return (lowest + (lr - lowest) * left) / lr

    return factor


def _torch_optimizer(section: MegatronOptimizerConfig) -> OptimizerConfig:
    if section.optimizer == "sgd":
        kwargs = {"lr": section.lr, "momentum": section.sgd_momentum, "weight_decay": section.weight_decay}
        return OptimizerConfig(name="torch.optim.SGD", kwargs=kwargs, decay_norm_and_bias=False)
    kwargs = {
        "lr": section.lr,
        "betas": [section.adam_beta1, section.adam_beta2],
        "eps": section.adam_eps,
        "weight_decay": section.weight_decay,
    }
    return OptimizerConfig(name="torch.optim.AdamW", kwargs=kwargs, decay_norm_and_bias=False)
