"""A refit: weights from the policy to every engine by one of the transports, and the check that they arrived."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.errors import GenerationError, WeightSyncError
from nemo_rl.interfaces import DeviceTurns, Generation, HasReplicas, Policy
from nemo_rl.types import Completion, GenerationRequest, SamplingParams
from nemo_rl.weight_sync.host_memory import SharedMemory
from nemo_rl.weight_sync.transports import Transport

logger = logging.getLogger(__name__)

PROBE_TOKENS = 32  # sampled for each probe
PROBE_SAMPLING = SamplingParams(PROBE_TOKENS)
PROBES_TIMEOUT_S = 600.0  # for the engine to answer all of them
ONLY_ENGINE = "engine 0"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on the differences of log-probs: rounding moves all tokens a little, a few of them far."""

    mean: float
    largest: float

    @classmethod
    def of_mean(cls, mean: float) -> "Tolerance":
        """Return the bounds for `weight_sync.verify_tolerance`."""
        return cls(mean, LARGEST_PER_MEAN * mean)


LARGEST_PER_MEAN = 15.0
FLOAT32 = Tolerance.of_mean(1e-4)
FLOAT32_ON_CUDA = Tolerance.of_mean(5e-3)  # vLLM's attention in Triton multiplies in TF32
LOW_PRECISION = Tolerance.of_mean(0.1)


def default_tolerance(dtype: str, device: str) -> Tolerance:
    """Return the bounds for an engine that computes in `dtype`."""
    if dtype != "float32":
        return LOW_PRECISION
    return FLOAT32_ON_CUDA if device == "cuda" else FLOAT32


async def sample_probes(
    generation: Generation, probes: Sequence[tuple[int, ...]], *, sampling: SamplingParams, weight_version: int
) -> TensorDict:
    """Return `probes` with what the engine samples for them, as the batch that `Policy.logprobs` reads.

    Raises WeightSyncError when the engine does not answer.
    """
    requests = [
        GenerationRequest(f"verify-{weight_version}-{index}", probe, sampling, seed=index, session_id="verify")
        for index, probe in enumerate(probes)
    ]
    return to_logprob_batch(requests, await collect_completions(generation, requests))


def compare_logprobs(batch: TensorDict, logprobs: torch.Tensor, tolerance: Tolerance, *, weight_version: int) -> float:
    """Return the mean difference of the engine's log-probs in `batch` and the policy's, [B, T], on sampled tokens.

    Raises WeightSyncError when the mean or the largest difference is beyond `tolerance`.
    """
    mask = batch[keys.TOKEN_MASK]
    logprobs = logprobs.cpu() * mask
    difference = (logprobs - batch[keys.GENERATION_LOGPROBS]).abs().nan_to_num(nan=torch.inf)  # [B, T]
    mean, largest = float(difference.sum() / mask.sum()), float(difference.max())
    if mean <= tolerance.mean and largest <= tolerance.largest:
        return mean
    probe, position = divmod(int(difference.argmax()), difference.shape[1])
    first = int(mask[probe].argmax())  # sampled token
    raise WeightSyncError(
        f"after the refit to weights {weight_version} the engine's log-probs differ from the policy's by {mean:.3g} on "
        f"average and by up to {largest:.3g} (tolerance {tolerance.mean:.3g} and {tolerance.largest:.3g}, over "
        f"{int(mask.sum())} tokens): probe {probe}, sampled token {position - first} (id "
        f"{int(batch[keys.TOKEN_IDS][probe, position])}), "
        f"engine {float(batch[keys.GENERATION_LOGPROBS][probe, position]):.5f}, "
        f"policy {float(logprobs[probe, position]):.5f}. "
        "Either the engine does not hold these weights, or it computes differently: compare policy.precision with "
        "vllm_cfg.precision, and the names that the policy publishes with the checkpoint's. A difference that is "
        "rounding alone is allowed by weight_sync.verify_tolerance."
    )


async def collect_completions(generation: Generation, requests: Sequence[GenerationRequest]) -> list[Completion]:
    try:
        async with asyncio.timeout(PROBES_TIMEOUT_S):
            answers = {answer.request_id: answer async for answer in generation.generate(requests)}
    except TimeoutError as error:
        raise WeightSyncError(f"the engine did not answer the probes in {PROBES_TIMEOUT_S:g} s") from error
    except GenerationError as error:
        raise WeightSyncError(f"after a refit the engine fails: {error}") from error
    ordered = [answers[request.request_id] for request in requests]
    for answer in ordered:
        if not isinstance(answer, Completion):
            raise WeightSyncError(f"the engine did not answer probe {answer.request_id}: {answer.cause}")
    return [answer for answer in ordered if isinstance(answer, Completion)]


def to_logprob_batch(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> TensorDict:
    """Return prompts and completions as the batch that `Policy.logprobs` reads; keys: nemo_rl/batch.py."""
    lengths = [len(r.token_ids) + len(c.token_ids) for r, c in zip(requests, completions, strict=True)]
    size = (len(requests), max(lengths))
    token_ids = torch.zeros(size, dtype=torch.int64)
    token_mask, logprobs = torch.zeros(size), torch.zeros(size)
    for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        sampled = slice(len(request.token_ids), lengths[index])
        token_ids[index, : lengths[index]] = torch.tensor(request.token_ids + completion.token_ids)
        token_mask[index, sampled] = 1
        logprobs[index, sampled] = torch.tensor(completion.logprobs)
    return TensorDict(
        {
            keys.TOKEN_IDS: token_ids,
            keys.TOKEN_MASK: token_mask,
            keys.GENERATION_LOGPROBS: logprobs,
            keys.LENGTHS: torch.tensor(lengths),
            keys.SAMPLE_MASK: torch.ones(len(requests)),
        },
        batch_size=[len(requests)],
    )


def engine_replicas(generation: Generation) -> Sequence[Generation]:
    """Return the engines that hold weights of their own: those behind a router, else the engine itself."""
    return generation.replicas if isinstance(generation, HasReplicas) else (generation,)


def engine_names(generation: Generation) -> Sequence[str]:
    """Return the names of `engine_replicas`, in their order."""
    return generation.replica_names if isinstance(generation, HasReplicas) else (ONLY_ENGINE,)


class TransportWeightSync:
    """The refit of all engines by `transport`; None: through a file in shared memory.

    All engines pause, all load, all resume: none samples under the new weights before all have them. The first refit of
    each engine is verified with `probes` (token ids of prompts), later ones where `section.verify` says so.
    `dtype` and `device` are those of the engine's computation, `sampling` that of training, whose log-probs the policy
    computes. With `keep_cache` running requests continue with keys and values of the old weights.
    """

    def __init__(
        self,
        probes: Sequence[Sequence[int]],
        section: WeightSyncConfig,
        dtype: str,
        *,
        device: str = "cpu",
        sampling: SamplingParams = PROBE_SAMPLING,
        keep_cache: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self._probes = [tuple(probe) for probe in probes[: section.num_probe_prompts]]
        self._verify_all = section.verify
        wanted = section.verify_tolerance
        self._tolerance = default_tolerance(dtype, device) if wanted is None else Tolerance.of_mean(wanted)
        self._sampling = replace(sampling, max_new_tokens=PROBE_TOKENS)
        self._keep_cache = keep_cache
        self._transport = transport or SharedMemory()
        self._verified: WeakSet[Generation] = WeakSet()

    async def publish(
        self, policy: Policy, generation: Generation, *, weight_version: int, turns: DeviceTurns | None = None
    ) -> None:
        """Refit the engines; running requests are held meanwhile and continue under the new weights.

        Raises WeightSyncError; the engine then stays paused, since it may hold a part of the new weights.
        """
        async with turns.delivery() if turns else nullcontext():
            staged = await self._transport.stage(policy)
            await generation.pause(keep_cache=self._keep_cache)
            await self._transport.deliver(policy, generation, staged, weight_version)
        await generation.resume()
        unverified = [e for e in engine_replicas(generation) if self._verify_all or e not in self._verified]
        if not unverified:
            return
        if not self._probes:
            logger.warning("no probe prompts: the refit to weights %d is not verified", weight_version)
            return
        await self._verify(policy, unverified, weight_version, turns)
        self._verified.update(unverified)

    async def _verify(
        self, policy: Policy, engines: Sequence[Generation], weight_version: int, turns: DeviceTurns | None
    ) -> None:
        """Let all engines sample first, then the policy score what they did: the two may share a device."""
        batches = [
            await sample_probes(engine, self._probes, sampling=self._sampling, weight_version=weight_version)
            for engine in engines
        ]
        async with turns.policy_turn("weights") if turns else nullcontext():
            logprobs = [await policy.logprobs(batch) for batch in batches]
        for batch, scored in zip(batches, logprobs, strict=True):
            difference = compare_logprobs(batch, scored, self._tolerance, weight_version=weight_version)
            logger.info("weights %d verified: log-probs differ by %.2g on average", weight_version, difference)

    def close(self) -> None:
        self._transport.close()
