"""A refit: weights from the policy to every engine by one of the transports, and the check that they arrived."""

import asyncio
import logging
from collections.abc import Sequence
from weakref import WeakSet

import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.errors import GenerationError, WeightSyncError
from nemo_rl.interfaces import Generation, Policy, engine_replicas
from nemo_rl.types import Completion, GenerationRequest, SamplingParams
from nemo_rl.weight_sync.shared_memory import SharedMemory
from nemo_rl.weight_sync.transports import Transport

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8  # sampled for each probe
PROBES_TIMEOUT_S = 600.0  # for the engine to answer all of them


async def verify_weights(
    policy: Policy,
    generation: Generation,
    *,
    probes: Sequence[tuple[int, ...]],
    temperature: float,
    tolerance: float,
    weight_version: int,
) -> float:
    """Return the largest difference of the engine's and the policy's log-probs on what it samples for `probes`.

    `temperature` is the one that the policy divides its logits by. Raises WeightSyncError when the difference is
    beyond `tolerance`, or when the engine does not answer.
    """
    sampling = SamplingParams(max_new_tokens=PROBE_TOKENS, temperature=temperature)
    requests = [
        GenerationRequest(f"verify-{weight_version}-{index}", probe, sampling, seed=index, session_id="verify")
        for index, probe in enumerate(probes)
    ]
    completions = await collect_completions(generation, requests)
    batch = to_logprob_batch(requests, completions)
    logprobs = (await policy.logprobs(batch)).cpu() * batch[keys.TOKEN_MASK]  # [B, T]
    difference = (logprobs - batch[keys.GENERATION_LOGPROBS]).abs().nan_to_num(nan=torch.inf)
    largest = float(difference.max())
    if largest <= tolerance:
        return largest
    probe, position = divmod(int(difference.argmax()), difference.shape[1])
    raise WeightSyncError(
        f"after the refit to weights {weight_version} the engine's log-probs differ from the policy's by up to "
        f"{largest:.3g}, tolerance {tolerance:.3g}: probe {probe}, sampled token "
        f"{position - len(requests[probe].token_ids)} (id {int(batch[keys.TOKEN_IDS][probe, position])}), "
        f"engine {float(batch[keys.GENERATION_LOGPROBS][probe, position]):.5f}, "
        f"policy {float(logprobs[probe, position]):.5f}. Either the engine does not hold these weights, or it computes "
        "differently: compare policy.precision with vllm_cfg.precision, and the names that the policy publishes with "
        "the checkpoint's. A difference that is rounding alone is allowed by weight_sync.verify_tolerance."
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


FLOAT32_TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 0.1


class TransportWeightSync:
    """The refit of all engines by `transport`; None: through a file in shared memory.

    All engines pause, all load, all resume: none samples under the new weights before all have them. The first refit of
    each engine is verified with `probes` (token ids of prompts), later ones where `section.verify` says so.
    `dtype` is that of the engine's computation, `temperature` that which the policy divides its logits by. With
    `keep_cache` running requests continue with keys and values of the old weights.
    """

    def __init__(
        self,
        probes: Sequence[Sequence[int]],
        section: WeightSyncConfig,
        dtype: str,
        *,
        temperature: float = 1.0,
        keep_cache: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self._probes = [tuple(probe) for probe in probes[: section.num_probe_prompts]]
        self._verify_all = section.verify
        default = FLOAT32_TOLERANCE if dtype == "float32" else LOW_PRECISION_TOLERANCE
        self._tolerance = section.verify_tolerance or default
        self._temperature = temperature
        self._keep_cache = keep_cache
        self._transport = transport or SharedMemory()
        self._verified: WeakSet[Generation] = WeakSet()

    async def publish(self, policy: Policy, generation: Generation, *, weight_version: int) -> None:
        """Refit the engines; running requests are held meanwhile and continue under the new weights.

        Raises WeightSyncError; the engine then stays paused, since it may hold a part of the new weights.
        """
        staged = await self._transport.stage(policy)
        await generation.pause(keep_cache=self._keep_cache)
        await self._transport.deliver(policy, generation, staged, weight_version)
        await generation.resume()
        for engine in engine_replicas(generation):
            if self._verify_all or engine not in self._verified:
                await self._verify(policy, engine, weight_version)
                self._verified.add(engine)

    async def _verify(self, policy: Policy, engine: Generation, weight_version: int) -> None:
        if not self._probes:
            logger.warning("no probe prompts: the refit to weights %d is not verified", weight_version)
            return
        difference = await verify_weights(
            policy,
            engine,
            probes=self._probes,
            temperature=self._temperature,
            tolerance=self._tolerance,
            weight_version=weight_version,
        )
        logger.info("weights %d verified: log-probs differ by at most %.2g", weight_version, difference)

    def close(self) -> None:
        self._transport.close()
