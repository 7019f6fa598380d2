"""What the sections of teachers need of each other and of the rest."""

from typing import TypeGuard

from nemo_rl.config.master import TEACHERS, DistillationRunConfig, GRPORunConfig, TrainingRunConfig
from nemo_rl.errors import ConfigError


def uses_teachers(config: TrainingRunConfig) -> bool:
    """Whether anything of the algorithm asks a teacher."""
    if isinstance(config, GRPORunConfig):
        return config.grpo.adv_estimator.name == "opd"
    return isinstance(config, DistillationRunConfig)


def uses_cross_tokenizer(config: TrainingRunConfig) -> TypeGuard[DistillationRunConfig]:
    """Whether teachers are asked in tokens of their own."""
    return isinstance(config, DistillationRunConfig) and config.loss_fn.cross_tokenizer.enabled


def check_teachers(config: TrainingRunConfig) -> None:
    """Raise ConfigError for a teacher that nobody asks, for a task that is not there, and where none is."""
    if not uses_teachers(config):
        for key in config.teacher_sections:
            reason = "teachers are read by grpo.adv_estimator.name: opd and by examples/run_distillation.py only"
            raise ConfigError(key, "set", f"{reason}; allowed: null")
        return
    if not config.teacher_sections:
        raise ConfigError("teacher", None, "required: a model to learn from (or teachers.<task>, by task name)")
    for task in config.teachers:
        if task not in config.env:
            known = ", ".join(sorted(config.env)) or "none"
            raise ConfigError(f"{TEACHERS}.{task}", "set", f"no such task; those of env: {known}", known=config.env)
    for key, section in config.teacher_sections.items():
        temperature = config.policy.generation.temperature
        if section.server is not None and temperature != 1:
            raise ConfigError(
                f"{key}.server",
                section.server.model,
                f"a server answers for temperature 1, and policy.generation.temperature is {temperature:g}",
            )


def check_task_teachers(config: TrainingRunConfig, task_names: frozenset[str]) -> None:
    """Raise ConfigError for a task of the training data that no teacher teaches."""
    for task in sorted(task_names):
        if config.teacher_key(task) is None:
            raise ConfigError(
                f"{TEACHERS}.{task}", None, "the training data has this task: set it, or teacher for all tasks"
            )
