"""Dependencies that the rollouts of a run share, their limits, and the arguments of one call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.experience.agent_runtime import AgentRuntime
from nemo_rl.experience.failure_limits import FailureLog
from nemo_rl.experience.gym_runtime import GymRuntime
from nemo_rl.experience.scoring import Scoring
from nemo_rl.experience.supervision import Supervision
from nemo_rl.interfaces import Generation
from nemo_rl.types import SamplingParams, Trajectory


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Length limits of a rollout, and its deadlines and retries."""

    max_turns: int
    max_total_length: int  # tokens of prompt, responses and observations together
    generation_timeout_s: float = 600.0  # deadline of a request
    max_retries: int = 2  # retries of a generation request
    retry_backoff_s: float = 0.5  # before the first retry; doubles
    stall_timeout_s: float = 600.0  # limit without any progress


@dataclass(frozen=True, slots=True)
class RolloutDependencies:
    """Everything that the rollouts of a run share; it does not change once the run is open."""

    generation: Generation
    environments: Mapping[str, CheckedEnvironment]  # keys: task names
    encoder: ChatEncoder
    limits: RolloutLimits
    agents: Mapping[str, AgentRuntime] = field(default_factory=dict)  # keys: task names without an environment
    gyms: Mapping[str, GymRuntime] = field(default_factory=dict)  # NeMo Gym stacks by task name
    scoring: Scoring = field(default_factory=Scoring)  # scores whole rollouts after they end
    # `env.<task>.truncated_reward` of the tasks whose environments give rewards
    truncated_rewards: Mapping[str, float | None] = field(default_factory=dict)
    # the policies that speak in the rollouts of a task, in a run of several; that of the first response first
    speakers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # weight versions of policies that an engine holds as versions of one adapter: those of a collection
    policy_versions: Mapping[str, int] = field(default_factory=dict)
    failure_log: FailureLog = field(default_factory=FailureLog)
    supervision: Supervision = field(init=False)  # each copy made by `replace` has its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "supervision", Supervision(self.limits.stall_timeout_s))


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """The arguments of one call of the rollout layer."""

    sampling: SamplingParams  # `max_new_tokens` limits one response
    seed: int  # the run's seed
    progress: Callable[[Trajectory], None] | None = None  # called with each finished rollout; an exception ends all
    trains: bool = True  # whether the policy trains on the rollouts
