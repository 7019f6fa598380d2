"""The work of a recipe that has not run: what a device's data sheet, and shares of it that are usual, let expect.

An engine's step reads all weights once and the keys and values of each sequence; training takes 6 operations per
parameter and token, scoring 2. Environments and scorers take no time here; a trace knows theirs.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.device_peaks import DevicePeaks
from nemo_rl.policy.memory import ModelShape
from nemo_rl.trace.workload import EngineCurve, PlannedRollout, PlannedTurn, TrainerCurve, Workload

MEMORY_SHARE = 0.6  # share of the memory's bandwidth that sampling reaches
FLOPS_SHARE = 0.35  # share of the peak that training reaches
LINK_BYTES_PER_S = 25e9  # bandwidth of a refit
STEP_OVERHEAD_S = 0.004  # per step of the engine beside the device: scheduling, sampling
LENGTH_SPREAD = 0.7  # standard deviation of the logarithm of lengths
BYTES_PER_NUMBER = 2  # bfloat16
NUM_GROUPS = 64  # whose lengths are drawn


@dataclass(frozen=True, slots=True)
class StatedDevices:
    """Devices of a run: `num_ranks` devices train, and each engine has `gpus_per_engine`."""

    peaks: DevicePeaks
    num_ranks: int
    gpus_per_engine: int


def state_workload(config: TrainingRunConfig, shape: ModelShape, devices: StatedDevices, mean_tokens: int) -> Workload:
    """Return the work of a recipe whose responses have `mean_tokens` in the mean, cut at its limit."""
    algorithm, policy = config.algorithm, config.policy
    limit = policy.generation.max_new_tokens or policy.max_total_sequence_length
    prompt_tokens = min(config.data.max_input_seq_length or mean_tokens, mean_tokens)
    trained_share = (prompt_tokens + mean_tokens) / mean_tokens  # prompts are computed too
    active = _active_parameters(shape)
    passes = 6 + 2 + (2 if config.needs_reference else 0)  # operations per parameter and token, log-probs included
    flops = devices.peaks.flops * FLOPS_SHARE * devices.num_ranks
    weights = shape.parameters * BYTES_PER_NUMBER
    return Workload(
        _draw_groups(mean_tokens, limit, algorithm.num_generations_per_prompt),
        state_engine(shape, devices, prompt_tokens + mean_tokens // 2),
        TrainerCurve(0.0, 0.0, passes * active * trained_share / flops, 1.0),
        {"weight_sync": weights / LINK_BYTES_PER_S},
    )


def state_engine(shape: ModelShape, devices: StatedDevices, context: int) -> EngineCurve:
    """Return the curve of an engine whose sequences have `context` tokens in the mean.

    Example: 3 GB of weights at 0.6 x 3.35 TB/s take 1.5 ms, and 4 ms go to the step itself.
    """
    bandwidth = devices.peaks.memory_bytes * MEMORY_SHARE * devices.gpus_per_engine
    flops = devices.peaks.flops * FLOPS_SHARE * devices.gpus_per_engine
    token_s = STEP_OVERHEAD_S + shape.parameters * BYTES_PER_NUMBER / bandwidth
    return EngineCurve(token_s, shape.cache_bytes(context) / bandwidth + 2 * _active_parameters(shape) / flops)


def _active_parameters(shape: ModelShape) -> int:
    """Return the parameters that a token uses: of the experts those that it is sent to."""
    if not shape.num_experts:
        return shape.parameters
    unused = 1 - shape.num_experts_per_token / shape.num_experts
    return shape.parameters - int(shape.expert_parameters * unused)


def _draw_groups(mean_tokens: int, limit: int, num_generations: int) -> list[list[PlannedRollout]]:
    """Return rollouts of one turn with log-normal lengths."""
    draw, normal = random.Random(0), NormalDist(-(LENGTH_SPREAD**2) / 2, LENGTH_SPREAD)

    def rollout() -> PlannedRollout:
        length = normal.inv_cdf(min(max(draw.random(), 1e-6), 1 - 1e-6))
        tokens = min(max(round(mean_tokens * math.exp(length)), 1), limit)
        return PlannedRollout("any", (PlannedTurn(tokens, 0.0),), {})

    return [[rollout() for _ in range(num_generations)] for _ in range(NUM_GROUPS)]
