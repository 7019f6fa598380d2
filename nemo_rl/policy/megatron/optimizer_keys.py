"""`policy.megatron_cfg.optimizer` and `.scheduler` as the optimizer and the schedule of torch's that they ask for."""

import math
from collections.abc import Callable
from typing import Any

from nemo_rl.config.megatron import MegatronOptimizerConfig, TrainedMegatronConfig
from nemo_rl.config.policy import OptimizerConfig, PolicyConfig, SchedulerStageConfig


def in_torchs_names(config: PolicyConfig) -> PolicyConfig:
    """`policy.optimizer` and `policy.scheduler` that do what `policy.megatron_cfg` asks for, where it does."""
    section = config.megatron_cfg
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
    """What the learning rate is multiplied by in each training step, from 0.

    Warm-up: from `lr_warmup_init` to `lr` over `lr_warmup_iters` steps. Then, up to `lr_decay_iters`, from `lr` to
    `min_lr` in a line or half a cosine, or constant.
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
        return OptimizerConfig(name="torch.optim.SGD", kwargs=kwargs)
    kwargs = {
        "lr": section.lr,
        "betas": [section.adam_beta1, section.adam_beta2],
        "eps": section.adam_eps,
        "weight_decay": section.weight_decay,
    }
    return OptimizerConfig(name="torch.optim.AdamW", kwargs=kwargs)
