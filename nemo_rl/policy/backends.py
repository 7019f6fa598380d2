"""Choosing the backend of a model: the workers of the policy and of teachers are made here."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nemo_rl.config.policy import PolicyConfig, TeacherConfig

if TYPE_CHECKING:
    from nemo_rl.policy.worker import PolicyWorker, TeacherWorker


def make_policy_worker(config: PolicyConfig, **arguments: Any) -> "PolicyWorker":
    """Return a policy worker of the configured backend; `arguments` are those of `PolicyWorker`."""
    if config.megatron_cfg.enabled:
        import_megatron()
        from nemo_rl.policy.megatron.worker import MegatronPolicyWorker

        return MegatronPolicyWorker(config, **arguments)
    from nemo_rl.policy.fsdp2.worker import FSDP2PolicyWorker

    return FSDP2PolicyWorker(config, **arguments)


def make_teacher_worker(config: TeacherConfig, **arguments: Any) -> "TeacherWorker":
    """Return a teacher worker of the configured backend; `arguments` are those of `TeacherWorker`."""
    if config.megatron_cfg.enabled:
        import_megatron()
        from nemo_rl.policy.megatron.worker import MegatronTeacherWorker

        return MegatronTeacherWorker(config, **arguments)
    from nemo_rl.policy.fsdp2.worker import FSDP2TeacherWorker

    return FSDP2TeacherWorker(config, **arguments)


def import_megatron() -> None:
    """Import the workers on Megatron-core, which takes seconds; to be called before CUDA is used.

    Megatron warns of optional kernels that are not installed. With a single hardware queue on CUDA, communication
    starts before the computation that it overlaps with.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with _ignore_warnings():
        import nemo_rl.policy.megatron.worker  # noqa: F401


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
