"""The factories of the Megatron entries. They import Megatron, which takes seconds, before CUDA is used."""

import importlib
import os
import warnings
from types import ModuleType
from typing import Any

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.policy.megatron.backend import MegatronConfig, TrainedMegatronConfig
from nemo_rl.policy.worker import PolicyWorker, TeacherWorker


def make_policy_worker(options: TrainedMegatronConfig, /, config: PolicyConfig, **arguments: Any) -> PolicyWorker:
    """Return a policy worker; the factory of the entry `MEGATRON`."""
    return import_megatron().MegatronPolicyWorker(config, **arguments)


def make_teacher_worker(options: MegatronConfig, /, config: TeacherConfig, **arguments: Any) -> TeacherWorker:
    """Return a teacher worker; the factory of the entry `MEGATRON_TEACHER`."""
    return import_megatron().MegatronTeacherWorker(config, **arguments)


def import_megatron() -> ModuleType:
    """Return the module of the workers, imported without Megatron's warnings about missing optional kernels.

    With a single hardware queue on CUDA, communication starts before the computation that it overlaps with.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("nemo_rl.policy.megatron.worker")
