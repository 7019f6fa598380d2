"""Where Megatron-core is first imported: in a rank's process, when `policy.megatron_cfg` is enabled."""

import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl.policy.megatron.rank import MegatronRank


def megatron_rank() -> "type[MegatronRank]":
    """The class; its import takes seconds, and warns of optional kernels that are not installed.

    To be called before CUDA is used: with one queue of work, what ranks exchange begins before what it overlaps with.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nemo_rl.policy.megatron.rank import MegatronRank
    return MegatronRank
