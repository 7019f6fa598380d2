"""Every protocol of the program: the architecture in one file.

Implementations: environments/, generation/, policy/, weight_sync/, losses/, algorithms/advantages.py,
observability/, the sources of experience/. Shapes: B samples, T tokens, R named rewards.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores, TopK
from nemo_rl.types import (
    AgentResult,
    CollectedGroups,
    Completion,
    EnvStep,
    FailedRequest,
    Failure,
    GenerationRequest,
    Message,
    Prompt,
    ResponseFault,
    ScoreRequest,
    TrainingBatch,
)
from nemo_rl.weight_manifests import Weights

if TYPE_CHECKING:
    import torch

    WeightUse: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], "ResultT"]

ResultT = TypeVar("ResultT")
EnginePart: TypeAlias = Literal["weights", "kv_cache"]  # parts of an engine's memory
# In the order in which a step needs them; "optimizer": its state and the gradients.
OffloadPart: TypeAlias = Literal["weights", "reference", "optimizer"]


class Environment(Protocol):
    """Scores answers and continues conversations, a batch at a time."""

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep | Failure]:
        """Answer each conversation's last turn; return one result per item, in order.

        A `Failure` fails its item alone, a wrong number of results all items of the call. A user's step that raises is
        called again for each item (`env.<name>.retries`).
        Calls may overlap. Blocking work runs off the event loop.
        """
        ...

    async def close(self) -> None:
        """Free all resources; no call follows."""
        ...


class Scorer(Protocol):
    """Rewards of whole rollouts: a rule, a reward model, a judge."""

    async def score(self, requests: Sequence[ScoreRequest]) -> Sequence[float | Failure | ResponseFault]:
        """Return one score per request, in order.

        A `Failure` fails its request alone, an exception all of them. A response that cannot be scored is a
        `ResponseFault`, which earns the lowest reward that the scorer has given in the run, at most 0. Calls may
        overlap. Blocking work runs off the event loop.
        """
        ...

    async def close(self) -> None:
        """Free all resources; no call follows."""
        ...


class Agent(Protocol):
    """A program with its own loop, which talks to the gateway as to an OpenAI server."""

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        """Run one rollout of `prompt`; every call to `base_url` is recorded. An exception fails this rollout alone."""
        ...


class WeightTarget(Protocol):
    """A receiver of weights from a transport."""

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        """Load the weights of `manifest`."""
        ...


class Generation(WeightTarget, Protocol):
    """An engine that samples tokens."""

    @property
    def is_async(self) -> bool:
        """Return whether overlapping calls of `generate` are batched together."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        """Yield one result per request, as they finish. Closing the iterator cancels the unfinished requests."""
        ...

    async def pause(self, *, keep_cache: bool = False) -> None:
        """Suspend all running requests, keeping their tokens; return once the engine is idle.

        `resume` recomputes their keys and values, unless `keep_cache` keeps those of the old weights.
        """
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        """Load the weights of `manifest`, while paused or idle; later tokens are sampled under `weight_version`."""
        ...

    async def sleep(self, *, discards_weights: bool = False) -> None:
        """Free the device's memory for the trainer; a no-op on a CPU and by default.

        With `discards_weights` a refit must precede the next request; else the weights are kept on the host.
        """
        return

    async def wake(self, *parts: EnginePart) -> None:
        """Reload these parts to the device; all parts by default."""
        return

    async def close(self) -> None: ...


@runtime_checkable
class Profiled(Protocol):
    """A policy or an engine whose operations can be profiled."""

    async def start_profile(self, directory: Path, name: str) -> None:
        """Begin a profile, which is written to a file of `directory` whose name has `name`."""
        ...

    async def stop_profile(self) -> None:
        """End it; its file is there when this returns."""
        ...


@runtime_checkable
class HasReplicas(Protocol):
    """A Generation that routes to several engine replicas."""

    @property
    def replicas(self) -> Sequence[Generation]: ...

    @property
    def replica_names(self) -> Sequence[str]: ...


@runtime_checkable
class HoldsAdapters(Generation, Protocol):
    """A Generation that samples under versions of an adapter, side by side, beside its base model."""

    async def begin_refit(self) -> None:
        """Let engines that have started since the last refit take part in the next one."""
        ...

    async def load_adapter(self, manifest: Weights, weight_version: int) -> None:
        """Load a further version, which new requests are sampled under.

        Nothing is paused: a running request ends under the version that it began with, and one that names an older
        `weight_version` is sampled under it as long as the engine holds it.
        """
        ...


class Teacher(Protocol):
    """A frozen model that scores tokens."""

    async def logprobs(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return log-probs as `Policy.logprobs` does."""
        ...

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """Return the k most likely tokens at each position whose token mask is 1."""
        ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def close(self) -> None: ...


class WeightSource(Protocol):
    """A provider of weights for a transport."""

    async def run_with_weights(self, use: "WeightUse[ResultT]") -> ResultT:
        """Call `use` in the process of the weights with (Hugging Face name, tensor) pairs in the engines' dtype."""
        ...

    async def run_on_all_ranks(self, use: "WeightUse[ResultT]") -> Sequence[ResultT]:
        """Call `use` on every rank with all weights; return the results by rank."""
        ...


class Policy(Protocol):
    """The trained model and its frozen reference. Calls never overlap."""

    async def select(self, name: str) -> None:
        """Make scoring and training those of one of several policies, named adapters on one base (`policies`).

        Each has an optimizer and a schedule of its own. Published weights, checkpoints and the reference are those of
        all of them, whichever is selected.
        """
        ...

    async def logprobs(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return log-probs of `batch["token_ids"]` under log_softmax(logits / temperature): [B, T] float32.

        Column 0 is 0. With `policy.router_replay.mode: R2` the batch gets the experts of this pass as a column, for the
        training steps on it.
        """
        ...

    async def reference_logprobs(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return log-probs as `logprobs` does, under the initial weights."""
        ...

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        """Return the k most likely tokens at each position whose token mask is 1."""
        ...

    async def train_step(self, batch: TrainingBatch, loss_fn: "LossFn") -> dict[str, float]:
        """Take all optimizer steps of one batch; return metrics: those of the loss, `loss`, `grad_norm`, `lr`."""
        ...

    async def recorded_logprobs(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return the log-probs that the loss read in the step on `batch`, for its N `recorded` rows: [N, T] float32.

        They are under the weights before the optimizer step that trains the row; NaN if no step trained it.
        """
        ...

    async def run_with_weights(self, use: "WeightUse[ResultT]", *, adapter_only: bool = False) -> ResultT:
        """Call `use` in the process of the weights with (Hugging Face name, tensor) pairs in the engines' dtype.

        No two tensors share memory. `use` may return them, and must not write to them; they are valid until the next
        training step. With `adapter_only` they are those of the adapter, named as peft's files, B with its scale.
        """
        ...

    async def run_on_all_ranks(self, use: "WeightUse[ResultT]", *, adapter_only: bool = False) -> Sequence[ResultT]:
        """Call `use` on every rank with all weights, as `run_with_weights` does; return the results by rank."""
        ...

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        """Begin to write `weights/` (Hugging Face files), `tokenizer/` and `optimizer/` under `path`.

        Returns once everything is copied, so that training may continue.
        """
        ...

    async def has_written_save(self) -> bool:
        """Return whether `finish_save` would return at once."""
        ...

    async def finish_save(self) -> None:
        """Wait until the save is on disk; raises CheckpointError if it cannot be written."""
        ...

    async def load(self, path: Path) -> None:
        """Restore a checkpoint of `save`."""
        ...

    async def offload(self, *parts: OffloadPart) -> None:
        """Move these parts to the host, all by default, so that engines may use the device.

        Calls that need an offloaded part raise PolicyError. A no-op on a CPU.
        """
        ...

    async def onload(self, *parts: OffloadPart) -> None:
        """Move these parts back to the device; all by default."""
        ...

    async def empty_cache(self) -> None:
        """Return unused memory of the device's allocator to the device, so that engines may use it."""
        ...

    async def device_bytes(self) -> int:
        """Return the memory of the CUDA device of rank 0."""
        ...

    async def close(self) -> None: ...


class DeviceTurns(Protocol):
    """Turns of policy and engines during a refit, on a device that they share."""

    def delivery(self) -> AbstractAsyncContextManager[None]:
        """Keep both models' weights on the device inside the block; afterwards only the engines'."""
        ...

    def policy_turn(self, *parts: OffloadPart) -> AbstractAsyncContextManager[None]:
        """Keep these parts of the policy on the device inside the block; afterwards only the engines use it."""
        ...


class WeightSync(Protocol):
    """Brings the policy's weights to the engine."""

    @property
    def keeps_versions(self) -> bool:
        """Return whether running requests keep the weights that they began with, so that no refit waits for them."""
        ...

    async def publish(
        self, policy: Policy, generation: Generation, *, weight_version: int, turns: DeviceTurns | None = None
    ) -> None:
        """Publish the weights: what starts to be generated after it returns is sampled under `weight_version`.

        `turns` are taken if policy and engines share a device; None: they do not. Raises WeightSyncError when a
        verification finds other weights in the engine.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class LossFn(Protocol):
    """A pure scalar function of token scores; unaware of micro-batches and ranks."""

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the batch keys that it reads."""
        ...

    @property
    def required_scores(self) -> RequiredScores:
        """Return the scores that it reads besides log-probs."""
        ...

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> "tuple[torch.Tensor, dict[str, Metric]]":
        """Return the loss of a micro-batch and its metrics; an optimizer step sums the losses of its micro-batches."""
        ...


@runtime_checkable
class AdvantageEstimator(Protocol):
    """Advantages from rewards or from teachers, per trajectory or per token."""

    @property
    def required_keys(self) -> frozenset[str]: ...

    def __call__(self, batch: TrainingBatch) -> "torch.Tensor":
        """Return advantages [B, T] float32; any value at positions whose token mask is 0."""
        ...


class GroupSource(Protocol):
    """A source of rollouts; synchronous, asynchronous and filtered training differ only in it."""

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """Return the groups of one step, ordered by prompt; raise StopAsyncIteration when the dataset is exhausted."""
        ...

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Start no rollout inside the block (refit, validation); with `until_idle` first wait until none runs."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, among them `consumed_prompts` and `epoch`; called after every step.

        `replay_buffer`, if present, refers to frozen groups.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


class Logger(Protocol):
    """A destination of metrics."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics under their full names in docs/metrics.md ("train/loss")."""
        ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ResumableLogger(Logger, Protocol):
    """A destination that keeps what an earlier start of the run has logged."""

    def resume_after(self, step: int) -> None:
        """Discard what was logged of later steps."""
        ...


@runtime_checkable
class HistogramLogger(Logger, Protocol):
    """A destination of metrics that also draws distributions."""

    def log_histogram(self, name: str, values: Sequence[float], step: int) -> None:
        """Log the distribution of some finite values ("train/advantages/histogram")."""
        ...
