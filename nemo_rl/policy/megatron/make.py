"""Where Megatron-core is first imported: in a rank's process, when `policy.megatron_cfg` is enabled."""

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl.policy.megatron.rank import MegatronRank


def megatron_rank() -> "type[MegatronRank]":
    """The class; its import takes seconds, and warns of optional kernels that are not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nemo_rl.policy.megatron.rank import MegatronRank
    return MegatronRank
