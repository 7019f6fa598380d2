"""Rules of micro-batches that are bounded by tokens."""

from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.errors import ConfigError

PACKING, DYNAMIC = "sequence_packing", "dynamic_batching"


def check_batching(policy: PolicyConfig) -> None:
    """One way of making micro-batches, which holds every sample that there can be."""
    _check_section("policy", policy, policy.max_total_sequence_length)


def check_teacher_batching(config: TrainingRunConfig) -> None:
    """The same of each teacher."""
    for key, teacher in config.teacher_sections.items():
        _check_section(key, teacher, config.policy.max_total_sequence_length)
        for name in (PACKING, DYNAMIC):
            section = getattr(teacher, name)
            if section.enabled and section.logprob_mb_tokens is None:
                raise ConfigError(f"{key}.{name}.logprob_mb_tokens", None, "required: the tokens of one forward pass")


def _check_section(key: str, model: PolicyConfig | TeacherConfig, longest: int) -> None:
    if model.sequence_packing.enabled and model.dynamic_batching.enabled:
        problem = f"{key}.{DYNAMIC}.enabled is true too: samples are packed or padded; allowed: one of the two"
        raise ConfigError(f"{key}.{PACKING}.enabled", True, problem)
    for section in (PACKING, DYNAMIC):
        values = getattr(model, section)
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(values, name)
            if values.enabled and tokens is not None and tokens < longest:
                problem = f"must be at least policy.max_total_sequence_length = {longest}, or null"
                raise ConfigError(f"{key}.{section}.{name}", tokens, problem)
