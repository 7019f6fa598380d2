"""Base sections of `env` and `scorers`, and the section `reward_model`.

The entries own their sections: environments/, environments/scorers/, environments/nemo_gym/ and experience/agents.py.
"""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from nemo_rl.config.kinds import Section
from nemo_rl.config.layout import Device
from nemo_rl.config.policy import ServedModelConfig
from nemo_rl.config.value_types import Delay, Processes, Seconds


class BatchingConfig(Section):
    """Batching of items from many pipelined rollouts into shared calls."""

    enabled: bool = False  # join the items of concurrent rollouts; false: a call for each rollout's items
    max_batch_size: int = Field(default=64, gt=0)  # items of one call
    max_wait_ms: float = Field(default=20.0, ge=0)  # longest wait of an item for others to join its call
    max_queue_size: int = Field(default=100_000, gt=0)  # queued items; further callers wait for room
    max_calls: int | None = Field(default=None, gt=0)  # concurrent calls; items queue meanwhile. None: no limit


class RemoteConfig(Section):
    """Placement of the environment in Ray actors."""

    enabled: bool = False  # run the environment in Ray actors; false: in the driver's process
    num_actors: Processes = 1  # actors that share the calls
    max_concurrency: int = Field(default=16, gt=0)  # concurrent calls in each actor


class EnvironmentConfig(Section):
    """Keys of every entry of `env`."""

    has_own_rewards: ClassVar[bool] = True  # False: the rewards are those of `scorers` alone

    type: str | None = None  # a built-in or registered name, or a dotted path; None: the entry's own name
    timeout_s: Seconds = 120.0  # per call
    batching: BatchingConfig = BatchingConfig.with_defaults()
    remote: RemoteConfig = RemoteConfig.with_defaults()
    isolated: bool = False  # run it in processes, which are replaced when they die or exceed `timeout_s`
    sandboxed: bool = False  # isolated, and able to compute alone: no files, network, secrets, processes or threads
    isolated_workers: Processes = 2  # processes, each with a copy
    # names in `policies`, in a collection in `server.adapters`, of those that speak in its rollouts, that of the first
    # response first; empty: the first of the table alone, in a collection the sampled model
    policies: list[str] = Field(default_factory=list)
    scorers: list[str] = Field(default_factory=list)  # entries of `scorers` whose scores are added at the end
    # reward of a rollout that a limit cuts off before its environment gave any; null: none, and no place in a baseline
    truncated_reward: float | None = Field(default=0.0, allow_inf_nan=False)

    @property
    def shows_images(self) -> bool:
        """Return whether it is configured to show the policy images, which needs one that sees."""
        return False


class RolloutRunnerConfig(EnvironmentConfig):
    """Base of entries that run whole rollouts themselves and call the policy through the gateway."""

    has_stack: ClassVar[bool] = False  # True: rows name agents of a stack, which opens once the gateway serves

    max_concurrency: int = Field(default=64, gt=0)  # concurrent rollouts
    reward_min: float = Field(default=-100.0, allow_inf_nan=False)  # a lower reward, or sum of them, fails the rollout
    reward_max: float = Field(default=100.0, allow_inf_nan=False)  # so does a higher one


class SideCallRule(Section):
    """Conditions on a model call, all of which hold for a side call; at least one."""

    model: str | None = None  # a regular expression found in the model's name as the client gives it
    system: str | None = None  # a regular expression found in the system messages
    last_message: str | None = None  # a regular expression found in the last message
    tools: bool | None = None  # whether the call offers tools


class AgentRunnerConfig(RolloutRunnerConfig):
    """Base of agents: entries whose sessions with the gateway this program opens, one per rollout."""

    scored_by: str | None = None  # the entry of `env` whose rewards count; None: those that the agent gives
    # model calls beside the task (titles, summaries): answered, but neither trained nor scored; any rule may match
    side_calls: list[SideCallRule] = Field(default_factory=list)


class CallRetriesConfig(Section):
    """Repeated calls of user code that raised, for each item of the call alone, within the entry's `timeout_s`."""

    # calls of an item beyond the first; None: 2 for functions and steps of one conversation, 0 for steps of a batch,
    # which may have acted on some of it before they raised
    max_retries: int | None = Field(default=None, ge=0)
    backoff_s: Delay = 0.5  # before an item is tried again; doubles


class CustomEnvironmentConfig(EnvironmentConfig):
    """A class by dotted path, with its constructor arguments, or a function."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the class
    retries: CallRetriesConfig = CallRetriesConfig.with_defaults()  # after calls that raise


class ScorerConfig(Section):
    """Keys of every entry of `scorers`."""

    type: str | None = None  # a built-in or registered name, or a dotted path; None: the entry's own name
    weight: float = 1.0  # weight of the score in the reward


class BatchedScorerConfig(ScorerConfig):
    """Base of scorers that are called with several rollouts at once."""

    timeout_s: Seconds = 120.0  # per call
    batching: BatchingConfig = BatchingConfig.with_defaults(enabled=True, max_batch_size=16)

    @property
    def max_calls(self) -> int | None:
        """Return the limit of concurrent calls; None for no limit."""
        return self.batching.max_calls


class ModelScorerConfig(BatchedScorerConfig):
    """Base of scorers that load a model in this run; `reward_model` places them."""

    model_name: str  # a Hugging Face name or a directory
    in_actor: bool = True  # False: on a thread of the trainer's process, whose time it takes
    num_replicas: Processes = 1  # actors; a request goes to the least busy one
    # auto: the run's; if no other model computes in it, cuda if there is a GPU
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @property
    def max_calls(self) -> int:
        """Return the limit of concurrent calls: a replica computes one at a time."""
        return self.num_replicas if self.batching.max_calls is None else self.batching.max_calls

    def place(self, device: Device | None, *, num_slots: int) -> Self:
        """Return the section with its device, and with an actor on each slot of the pool if there is one.

        `device` is that of the run, None if no other model computes in it. On cuda an actor without a slot looks for a
        GPU itself, since Ray may have put it on a node without one.
        """
        knows_device = device == "cpu" or not self.in_actor or num_slots > 0
        chosen = {"device": device} if self.device == "auto" and device is not None and knows_device else {}
        replicas = {"in_actor": True, "num_replicas": num_slots} if num_slots else {}
        return self.model_copy(update=chosen | replicas)


class EndpointScorerConfig(ScorerConfig, ServedModelConfig):
    """Base of scorers that a server computes.

    Each request is sent alone and bounded by `limits`, so there is neither `timeout_s` nor `batching`.
    """


class CustomScorerConfig(BatchedScorerConfig):
    """A class by dotted path: interfaces.Scorer, constructed with `kwargs`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the class


class RewardModelPlacementConfig(Section):
    """Placement of all scorers of type reward_model, with verl's keys."""

    enable: bool = False  # place the scorers of type reward_model by this section, one actor a GPU
    enable_resource_pool: bool = False  # dedicated GPUs: scoring overlaps generation; else the policy's, after it
    n_gpus_per_node: int = 0  # GPUs of the dedicated pool on each of its nodes
    nnodes: int = 0  # nodes of the dedicated pool

    @property
    def shares_device(self) -> bool:
        """Return whether they score after the rollouts of a step, while the engine sleeps."""
        return self.enable and not self.enable_resource_pool
