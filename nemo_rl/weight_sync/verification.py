"""The check of a refit: an engine samples probes, and the policy must score its tokens alike."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.errors import GenerationError, WeightSyncError
from nemo_rl.image_features import PlacedImage
from nemo_rl.interfaces import Generation
from nemo_rl.types import Completion, GenerationRequest, SamplingParams

PROBES_TIMEOUT_S = 600.0  # limit for the engine to answer all probes
LARGEST_PER_MEAN = 15.0
FLOAT32_MEAN = 1e-4
FLOAT32_ON_CUDA_MEAN = 5e-3  # vLLM's attention in Triton multiplies in TF32
LOW_PRECISION_MEAN = 0.1


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt for the check of a refit."""

    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on the differences of log-probs: rounding moves all tokens a little, a few of them far."""

    mean: float
    largest: float

    @classmethod
    def of_mean(cls, mean: float) -> "Tolerance":
        """Return the bounds for `weight_sync.verify_tolerance`."""
        return cls(mean, LARGEST_PER_MEAN * mean)


def default_tolerance(dtype: str, device: str) -> Tolerance:
    """Return the bounds for an engine that computes in `dtype`."""
    if dtype != "float32":
        return Tolerance.of_mean(LOW_PRECISION_MEAN)
    return Tolerance.of_mean(FLOAT32_ON_CUDA_MEAN if device == "cuda" else FLOAT32_MEAN)


async def sample_probes(
    generation: Generation,
    probes: Sequence[Probe],
    *,
    sampling: SamplingParams,
    weight_version: int,
    policy: str = "",
) -> TensorDict:
    """Return `probes` with the engine's completions under a policy, as the batch that `Policy.logprobs` reads.

    Raises WeightSyncError if the engine does not answer.
    """
    requests = [
        GenerationRequest(
            f"verify-{weight_version}-{policy}-{index}" if policy else f"verify-{weight_version}-{index}",
            probe.token_ids,
            sampling,
            seed=index,
            session_id="verify",
            images=probe.images,
            policy=policy,
        )
        for index, probe in enumerate(probes)
    ]
    return to_logprob_batch(requests, await collect_completions(generation, requests))


def compare_logprobs(batch: TensorDict, logprobs: torch.Tensor, tolerance: Tolerance, *, weight_version: int) -> float:
    """Return the mean difference between the engine's log-probs in `batch` and the policy's, [B, T], on sampled tokens.

    Raises WeightSyncError if the mean or the largest difference exceeds `tolerance`.
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
    batch = TensorDict(
        {
            keys.TOKEN_IDS: token_ids,
            keys.TOKEN_MASK: token_mask,
            keys.GENERATION_LOGPROBS: logprobs,
            keys.LENGTHS: torch.tensor(lengths),
            keys.SAMPLE_MASK: torch.ones(len(requests)),
        },
        batch_size=[len(requests)],
    )
    keys.add_images(batch, [request.images for request in requests])
    return batch
