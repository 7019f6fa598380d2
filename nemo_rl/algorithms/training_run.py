"""The parts of one run on rollouts. launch/training.py makes a `TrainingRun`, loop.py trains it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl import checkpoint
from nemo_rl.algorithms.interrupt import Interrupt
from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.stages import Algorithm
from nemo_rl.algorithms.step_profiler import NO_PROFILES, StepProfiler
from nemo_rl.algorithms.validation import Validator
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.experience.rollout_details import RolloutDetails
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.interfaces import Generation, GroupSource, Logger, Policy, WeightSync
from nemo_rl.observability.console import Progress
from nemo_rl.observability.lost_records import LostRecords


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The parts of one run on rollouts."""

    config: TrainingRunConfig
    run_dir: Path
    num_steps: int  # upper bound: max_num_steps, or fewer if the data ends first
    # the algorithm of each policy that is trained, by name; "" is the name of a run's only policy
    algorithms: Mapping[str, Algorithm]
    source: GroupSource
    generation: Generation
    policy: Policy
    placement: Placement
    weight_sync: WeightSync
    validator: Validator | None
    checkpoints: checkpoint.CheckpointStore | None
    logger: Logger
    progress: Progress
    validation_rollouts: RolloutWriter | None
    interrupt: Interrupt
    num_devices: int = 1  # devices that train, sample or score
    num_train_devices: int = 1
    profiler: StepProfiler = NO_PROFILES
    details: RolloutDetails | None = None
    lost_records: LostRecords = field(default_factory=LostRecords)

    @property
    def generation_phase(self) -> str:
        """Return the timer's name for the wait for rollouts."""
        return "exposed_generation" if self.config.algorithm.background.enabled else "generation"
