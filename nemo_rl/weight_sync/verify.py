"""The check that an engine holds the policy's weights: both must give the same tokens the same log-probs.

"The outputs have changed" is no such check: an engine that keeps one old matrix passes it.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.errors import GenerationError, WeightSyncError
from nemo_rl.interfaces import Generation, Policy
from nemo_rl.types import Completion, GenerationRequest, SamplingParams

PROBE_TOKENS = 8  # sampled for each probe


async def verify_weights(
    policy: Policy,
    generation: Generation,
    *,
    probes: Sequence[tuple[int, ...]],
    temperature: float,
    tolerance: float,
    weight_version: int,
) -> float:
    """The largest difference between the engine's and the policy's log-probs on what the engine samples for `probes`.

    `temperature` is the one that the policy divides its logits by. Raises WeightSyncError when the difference is
    beyond `tolerance`, or when the engine does not answer.
    """
    sampling = SamplingParams(max_new_tokens=PROBE_TOKENS, temperature=temperature)
    requests = [
        GenerationRequest(f"verify-{weight_version}-{index}", probe, sampling, seed=index, session_id="verify")
        for index, probe in enumerate(probes)
    ]
    completions = await completions_of(generation, requests)
    batch = batch_of(requests, completions)
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
        "otherwise: compare policy.precision with vllm_cfg.precision, and the names that the policy publishes with the "
        "checkpoint's. A difference that is rounding alone is allowed by weight_sync.verify_tolerance."
    )


async def completions_of(generation: Generation, requests: Sequence[GenerationRequest]) -> list[Completion]:
    try:
        answers = {answer.request_id: answer async for answer in generation.generate(requests)}
    except GenerationError as error:
        raise WeightSyncError(f"after a refit the engine fails: {error}") from error
    ordered = [answers[request.request_id] for request in requests]
    for answer in ordered:
        if not isinstance(answer, Completion):
            raise WeightSyncError(f"the engine did not answer probe {answer.request_id}: {answer.cause}")
    return [answer for answer in ordered if isinstance(answer, Completion)]


def batch_of(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> TensorDict:
    """Prompts and completions as the batch that `Policy.logprobs` reads: nemo_rl/batch.py says what the keys mean."""
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
