"""The policy's ranks on a Ray cluster, and seats for the engines there. Importing this loads Ray."""

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from nemo_rl.config.layout import Layout
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.distributed.cluster import cluster_address, connect
from nemo_rl.distributed.placement import Reservation, Seat, reserve
from nemo_rl.policy.group import PolicyGroup

logger = logging.getLogger(__name__)


async def open_reservation(
    config: TrainingRunConfig | SFTRunConfig, layout: Layout, stack: AsyncExitStack
) -> Reservation:
    """Join or start a cluster and set aside what the layout needs; `stack` gives it back."""
    connect(config.cluster.address)
    reservation = await _reserve(config, layout)
    stack.callback(reservation.release)
    return reservation


async def open_ranks(
    config: TrainingRunConfig | SFTRunConfig,
    layout: Layout,
    reservation: Reservation,
    arguments: dict[str, Any],
    *,
    log_dir: Path,
    stack: AsyncExitStack,
) -> tuple[PolicyGroup, list[Seat]]:
    """The policy's ranks, and the engines' seats; `arguments` are those of a policy rank.

    `stack` ends them. From here to its end the death of a rank ends the current task with WorkerError.
    """
    policy = await PolicyGroup.create(
        config.policy.model_copy(update={"device": layout.device}),
        seats=[reservation.seat(slot) for slot in layout.ranks],
        timeout_s=config.cluster.start_timeout_s,
        log_dir=log_dir,
        **arguments,
    )
    stack.push_async_callback(policy.close)
    await stack.enter_async_context(policy.ends_this_task())
    pids = ", ".join(map(str, await policy.pids()))
    logger.info("%d policy ranks are ready (processes %s), their output in %s", policy.num_ranks, pids, log_dir)
    return policy, [reservation.seat(slot) for slot in layout.engines]


async def _reserve(config: TrainingRunConfig | SFTRunConfig, layout: Layout) -> Reservation:
    return await reserve(
        layout,
        timeout_s=config.cluster.start_timeout_s,
        may_grow=cluster_address(config.cluster.address) is not None,
    )
