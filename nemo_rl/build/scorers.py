"""The scorers of a run from its configuration, and the reward models' pool of resources."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from nemo_rl.config.layout import Layout, make_reward_model_layout
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.environments.scorers.registry import make_scorer
from nemo_rl.errors import ConfigError
from nemo_rl.experience.scoring import Scoring, WeightedScorer

if TYPE_CHECKING:
    from nemo_rl.distributed.placement import Seat


async def open_scorers(config: RolloutRunConfig, layout: Layout | None, stack: AsyncExitStack) -> Scoring:
    """Make every scorer once, closed with `stack`, and give each task its own; raises ConfigError.

    `layout` is the run's; None where no policy runs beside the scorers.
    """
    seats = await _reserve_pool(config, layout, stack) if config.reward_model.enable_resource_pool else ()
    scorers: dict[str, WeightedScorer] = {}
    for name, section in config.scorers.items():
        scorer = make_scorer(name, section, seats=seats)
        stack.push_async_callback(scorer.close)
        scorers[name] = WeightedScorer(name, scorer, section.weight)
    return Scoring({task: tuple(scorers[name] for name in section.scorers) for task, section in config.env.items()})


async def _reserve_pool(config: RolloutRunConfig, layout: Layout | None, stack: AsyncExitStack) -> "Sequence[Seat]":
    """A seat a GPU of the pool, on a CPU a seat a process."""
    from nemo_rl.distributed.cluster import cluster_address, connect  # loads Ray
    from nemo_rl.distributed.placement import reserve

    if layout is not None and layout.device == "cuda" and not layout.needs_cluster:
        problem = "the policy's GPU is not Ray's to divide; set cluster.address, or place the policy on several ranks"
        raise ConfigError("reward_model.enable_resource_pool", True, problem)
    connect(config.cluster.address)
    pool = make_reward_model_layout(config.reward_model, "cpu" if layout is None else layout.device)
    reservation = await reserve(
        pool,
        timeout_s=config.cluster.start_timeout_s,
        may_grow=cluster_address(config.cluster.address) is not None,
        keys="reward_model.nnodes, reward_model.n_gpus_per_node",
    )
    stack.callback(reservation.release)
    return [reservation.seat(place) for place in pool.engines]
