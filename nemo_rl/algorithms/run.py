"""Everything that one GRPO run is made of; build/ makes it, grpo.py uses it."""

from dataclasses import dataclass
from pathlib import Path

from nemo_rl.algorithms.interrupt import Interrupt
from nemo_rl.algorithms.penalties import Penalties
from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.validation import Validator
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.master import GRPOConfig
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import AdvantageEstimator, Generation, GroupSource, Logger, LossFn, Policy, WeightSync
from nemo_rl.observability.progress import Progress


@dataclass(frozen=True, slots=True)
class LogprobsNeeded:
    """The passes over a batch before it is trained on: only those that someone reads."""

    previous: bool
    reference: bool


@dataclass(frozen=True, slots=True)
class GRPORun:
    config: GRPOConfig
    run_dir: Path
    num_steps: int  # at most: grpo.max_num_steps, or what the data allows
    source: GroupSource
    generation: Generation
    policy: Policy
    placement: Placement
    weight_sync: WeightSync
    loss_fn: LossFn
    advantage_estimator: AdvantageEstimator
    logprobs_needed: LogprobsNeeded
    validator: Validator | None
    checkpoints: CheckpointStore | None
    logger: Logger
    progress: Progress
    validation_rollouts: RolloutWriter | None
    interrupt: Interrupt
    penalties: Penalties | None = None  # of faults in replies

    @property
    def generation_phase(self) -> str:
        """The name of the time that the trainer waits for rollouts."""
        return "exposed_generation" if self.config.grpo.async_grpo.enabled else "generation"
