"""Every protocol of the program: the architecture in one file.

Implementations: environments/, generation/, policy/, weight_sync/, losses/, algorithms/advantages.py,
observability/, experience/sources.py. Shapes: B samples, T tokens, R named rewards.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from nemo_rl.types import (
    AgentResult,
    Completion,
    EnvStep,
    FailedRequest,
    Failure,
    GenerationRequest,
    Message,
    Prompt,
    TrainingBatch,
    TrajectoryGroup,
)

if TYPE_CHECKING:
    import torch

ResultT = TypeVar("ResultT")


class Environment(Protocol):
    """Scores answers and continues conversations, a batch at a time."""

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep | Failure]:
        """Answer each conversation's last turn; one result an item, in order.

        A `Failure` fails its item alone; an exception, or a wrong number of results, fails all items of the call.
        May be called again before an earlier call has returned. Blocking work runs off the event loop.
        """
        ...

    async def close(self) -> None:
        """Free what the environment holds; no call follows."""
        ...


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A rollout that has ended, as a scorer sees it."""

    messages: tuple[Message, ...]  # role and content, the last response included
    metadata: Mapping[str, Any]  # the prompt's env_state


class Scorer(Protocol):
    """Rewards of whole rollouts: a rule, a reward model, a judge."""

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[float | Failure]:
        """Return one score per request, in order; a `Failure` is that request's alone, an exception all requests'.

        May be called again before an earlier call has returned. Blocking work runs off the event loop.
        """
        ...

    async def close(self) -> None:
        """Free what the scorer holds; no call follows."""
        ...


class Agent(Protocol):
    """Whoever owns its own loop and talks to the gateway as to an OpenAI server."""

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        """Run one rollout of `prompt`; every call to `base_url` is recorded. An exception fails this rollout alone."""
        ...


EnginePart: TypeAlias = Literal["weights", "kv_cache"]  # of an engine's memory


class Generation(Protocol):
    """An engine that samples tokens."""

    @property
    def is_async(self) -> bool:
        """Return whether calls of `generate` that overlap are served together."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        """Yield one result a request, as they finish. Closing the iterator cancels what is left."""
        ...

    async def pause(self, *, keep_cache: bool = False) -> None:
        """Hold all running requests where they are, keeping their tokens; returns when none is being computed.

        Their keys and values are computed again after `resume`, unless `keep_cache` leaves those of the old weights.
        """
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, manifest: "Weights", weight_version: int) -> None:
        """Load the weights that `manifest` names; only while paused or idle. What is sampled next has this version."""
        ...

    async def sleep(self, *, discards_weights: bool = False) -> None:
        """Give the device's memory to the trainer. Nothing on a CPU, and for engines that inherit it.

        With `discards_weights` a refit must follow before the next request; else the weights are kept on the host.
        """
        return

    async def wake(self, *parts: "EnginePart") -> None:
        """Take the device's memory back, for these parts; none named: all."""
        return

    async def close(self) -> None: ...


@runtime_checkable
class HasReplicas(Protocol):
    """A Generation that stands before several engines."""

    @property
    def replicas(self) -> "Sequence[Generation]": ...

    @property
    def replica_names(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One tensor in a weight file."""

    name: str  # as in the Hugging Face checkpoint
    dtype: str  # torch's name, e.g. "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file; a multiple of 64


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """The policy's own tensors, for an engine in its process, which copies them and writes to none of them."""

    tensors: "tuple[tuple[str, torch.Tensor], ...]"  # with their names in the Hugging Face checkpoint


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Weights for an engine on this machine: a file in shared memory, and its entries."""

    path: str
    entries: tuple[WeightEntry, ...]


@dataclass(frozen=True, slots=True)
class WeightChunks:
    """Weights in the object store of a cluster: the bytes of a weight file, which each machine writes once."""

    name: str  # of the file; machines write it again if `transfer` differs
    transfer: int  # counts the refits
    chunks: tuple[Any, ...]  # references to arrays of bytes, to be concatenated (distributed/actors.py)
    entries: tuple[WeightEntry, ...]


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """Weights that each policy rank hands to the engine worker on its own device (distributed/tensor_transfer.py)."""

    token: str  # in the address where the two meet
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WeightStream:
    """Weights that the policy broadcasts to all engine workers at once (distributed/tensor_transfer.py)."""

    host: str  # of the store where the members meet
    port: int
    group: int  # counts the groups: another one is joined where it differs
    members: tuple[str, ...]  # names: the policy's first rank, then each worker of each engine
    engine: str  # the name of the engine that is told this
    backend: str  # "nccl", on a CPU "gloo"
    timeout_s: float


Weights: TypeAlias = LocalWeights | WeightManifest | WeightChunks | DeviceWeights | WeightStream

OffloadPart: TypeAlias = Literal["weights", "optimizer", "reference"]  # the optimizer's: its state and the gradients


class TopK(NamedTuple):
    """The most likely tokens of each position, most likely first."""

    ids: "torch.Tensor"  # [B, T, K] int64
    logprobs: "torch.Tensor"  # [B, T, K] float32, of the whole vocabulary's log_softmax; 0 where not requested


class RequiredScores(NamedTuple):
    """The values to read of the next-token distributions, beside the log-probs of the tokens themselves."""

    candidates: str | None = None  # key of the batch: ids [B, T, K] whose log-probs are wanted; those below 0 are none
    entropy: bool = False
    topk: int = 0  # the model's own most likely tokens


class TokenScores(NamedTuple):
    """Scores of a micro-batch under the current weights.

    Entry t belongs to token t, hence to the distribution before it; 0 where the token mask is 0 and in entry 0. All are
    of log_softmax(logits / temperature), in float32.
    """

    logprobs: "torch.Tensor"  # [B, T]
    candidates: "torch.Tensor | None" = None  # [B, T, K]; 0 for ids below 0
    entropy: "torch.Tensor | None" = None  # [B, T] of the whole distribution, in nats
    topk: TopK | None = None


class Teacher(Protocol):
    """A model that is asked and never trained."""

    async def logprobs(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return log-probs as `Policy.logprobs` does."""
        ...

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """Return the k most likely tokens before each token with a mask."""
        ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def close(self) -> None: ...


class Policy(Protocol):
    """The model that is trained, and its frozen reference. Calls never overlap; all are awaited in turn."""

    async def logprobs(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return log-probs of `batch["token_ids"]`, of log_softmax(logits / temperature): [B, T] float32.

        Entry 0 of each row is 0.
        """
        ...

    async def reference_logprobs(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return log-probs as `logprobs` does, under the weights that training began with."""
        ...

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """Return the k most likely tokens before each token with a mask."""
        ...

    async def train_step(self, batch: TrainingBatch, loss_fn: "LossFn") -> dict[str, float]:
        """Take all optimizer steps of one batch; return metrics: those of the loss, `loss`, `grad_norm`, `lr`."""
        ...

    async def recorded_logprobs(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return the log-probs that the loss has read in the step on `batch`, of its N `recorded` rows: [N, T] float32.

        Each row's are of the weights before the optimizer step that trains it; NaN in a row without such a step.
        """
        ...

    async def run_with_weights(self, use: "Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]") -> ResultT:
        """Call `use` with (Hugging Face name, tensor) pairs where the weights live, in the dtype engines want.

        Each tensor has memory of its own, and `use` may return them; they are not to be written to, and hold until the
        policy is trained again.
        """
        ...

    async def run_on_all_ranks(
        self, use: "Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]"
    ) -> "Sequence[ResultT]":
        """Call `use` as `run_with_weights` does, on every rank with all of the weights; return the results by rank."""
        ...

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        """Begin to write `weights/` (Hugging Face files), `tokenizer/` and `optimizer/` under `path`.

        Returns once everything is copied, so that training may continue.
        """
        ...

    async def has_written_save(self) -> bool:
        """Return whether `finish_save` would not wait."""
        ...

    async def finish_save(self) -> None:
        """Return once what `save` began is on the disk; raises CheckpointError where it cannot be."""
        ...

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote."""
        ...

    async def offload(self, *parts: OffloadPart) -> None:
        """Move these parts off the accelerator, so that an engine may use it; none named: all. A no-op on a CPU.

        What needs a part that is away raises PolicyError.
        """
        ...

    async def onload(self, *parts: OffloadPart) -> None:
        """Move these parts back; none named: all."""
        ...

    async def close(self) -> None: ...


class DeviceTurns(Protocol):
    """The turns that policy and engines take during a refit, on a device that they share."""

    def delivery(self) -> AbstractAsyncContextManager[None]:
        """Inside, the device holds both weights; afterwards the engines alone use it."""
        ...

    def policy_turn(self, *parts: OffloadPart) -> AbstractAsyncContextManager[None]:
        """Inside, these parts of the policy are on the device; afterwards the engines alone use it."""
        ...


class WeightSync(Protocol):
    """Brings the policy's weights to the engine."""

    async def publish(
        self, policy: Policy, generation: Generation, *, weight_version: int, turns: DeviceTurns | None = None
    ) -> None:
        """Publish the weights: what starts to be generated after it returns is sampled under `weight_version`.

        `turns` are taken where policy and engines share a device; None: they do not. Raises WeightSyncError when a
        verification finds other weights in the engine.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Normalizer:
    """The divisors of one optimizer step: counts over all its samples, whatever micro-batch or rank they are on."""

    num_valid_tokens: float  # sum of token_mask * sample_mask, entry 0 of each sample excluded
    num_valid_trajectories: float
    num_positive_tokens: float = 0.0  # the part of num_valid_tokens in samples with a (shaped) reward above 0


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a micro-batch.

    `sum`: already divided by the normalizer's counts, so micro-batches add up, and optimizer steps are averaged.
    `count`: both add up.
    """

    value: "torch.Tensor"
    reduction: Literal["sum", "count", "min", "max"] = "sum"


@runtime_checkable
class LossFn(Protocol):
    """A scalar function of what the current weights say; pure, and unaware of micro-batches and ranks."""

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the keys of the batch that it reads."""
        ...

    @property
    def required_scores(self) -> RequiredScores:
        """Return what it reads of the model beside log-probs."""
        ...

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> "tuple[torch.Tensor, dict[str, Metric]]":
        """Return the loss of a micro-batch; losses of an optimizer step's micro-batches are summed."""
        ...


@runtime_checkable
class AdvantageEstimator(Protocol):
    """Advantages from rewards or from teachers; one a trajectory or one a token."""

    @property
    def required_keys(self) -> frozenset[str]: ...

    def __call__(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return [B, T] float32; any value where the token mask is 0."""
        ...


@dataclass(frozen=True, slots=True)
class CollectedGroups:
    """The groups and metrics that a source hands to one training step."""

    groups: tuple[TrajectoryGroup, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class GroupSource(Protocol):
    """A source of the loop's rollouts; sync, async and filtered training differ in it alone."""

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """Return the groups of one step, ordered by prompt; raise StopAsyncIteration when the dataset is exhausted."""
        ...

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Start no rollout inside; with `until_idle` it is entered once none runs. For refits and validations."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, among them `consumed_prompts` and `epoch`; what was drawn is not drawn again.

        Taken after every step. `replay_buffer`, of a source that has one, refers to its frozen groups.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


class Logger(Protocol):
    """One place where metrics go."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics; names as in docs/metrics.md, prefix included ("train/loss")."""
        ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None: ...

    def close(self) -> None: ...
