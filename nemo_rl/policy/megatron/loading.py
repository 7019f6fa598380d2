"""Factories of the workers on Megatron-core, which import it before CUDA is used."""

import os
import warnings
from typing import TYPE_CHECKING, Any

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.policy.megatron.backend import MegatronConfig, TrainedMegatronConfig

if TYPE_CHECKING:
    from nemo_rl.policy.megatron.worker import MegatronPolicyWorker, MegatronTeacherWorker


def make_policy_worker(
    options: TrainedMegatronConfig, /, config: PolicyConfig, **arguments: Any
) -> "MegatronPolicyWorker":
    """Return a policy worker; the factory of the entry `MEGATRON`."""
    import_megatron()
    from nemo_rl.policy.megatron.worker import MegatronPolicyWorker

    return MegatronPolicyWorker(config, **arguments)


def make_teacher_worker(options: MegatronConfig, /, config: TeacherConfig, **arguments: Any) -> "MegatronTeacherWorker":
    """Return a teacher worker; the factory of the entry `MEGATRON_TEACHER`."""
    import_megatron()
    from nemo_rl.policy.megatron.worker import MegatronTeacherWorker

    return MegatronTeacherWorker(config, **arguments)


def import_megatron() -> None:
    """Import the workers, which takes seconds, without Megatron's warnings of optional kernels that are missing.

    With a single hardware queue on CUDA, communication starts before the computation that it overlaps with.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nemo_rl.policy.megatron.worker  # noqa: F401
