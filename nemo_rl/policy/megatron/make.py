"""Where Megatron-core is first imported: in a rank's process, when its `megatron_cfg` is enabled."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl.policy.megatron.rank import MegatronRank
    from nemo_rl.policy.megatron.teacher import MegatronTeacher


def megatron_rank() -> "type[MegatronRank]":
    """The class of a policy's rank; to be called before CUDA is used."""
    with _quiet_import():
        from nemo_rl.policy.megatron.rank import MegatronRank
    return MegatronRank


def megatron_teacher() -> "type[MegatronTeacher]":
    """The same of a teacher's rank."""
    with _quiet_import():
        from nemo_rl.policy.megatron.teacher import MegatronTeacher
    return MegatronTeacher


@contextmanager
def _quiet_import() -> Iterator[None]:
    """It takes seconds, and warns of optional kernels that are not installed.

    With one queue of work on CUDA, what ranks exchange begins before what it overlaps with.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
