"""The start of vLLM in this process, or of its replicas in actors behind a router."""

from collections.abc import Sequence
from typing import Any

from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.router import MAX_REPLICAS, ReplicatedGeneration, start_engines
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.generation.vllm.entry import VllmGenerationConfig
from nemo_rl.interfaces import Generation


async def make_vllm(
    section: VllmGenerationConfig, model: EngineModel, *, slots: Sequence[Any], start_timeout_s: float
) -> Generation:
    """Start the engine in this process, or its replicas in actors, served by a router.

    `model.trust_remote_code` is ignored: vLLM has it among its `vllm_kwargs`. Raises ConfigError for settings that vLLM
    refuses, GenerationError if it does not start.
    """
    slots_or_none = list(slots) or [None] * (section.num_replicas or 1)
    count = len(slots_or_none)
    if count == 1 and slots_or_none[0] is None and not section.in_actor:
        return await VllmGeneration.create(section, model, start_timeout_s=start_timeout_s)

    from nemo_rl.generation.vllm.actor import VllmActorGeneration  # loads Ray

    async def start(index: int) -> Generation:
        slot = slots_or_none[index % count]  # a CPU takes more engines than were configured, a GPU does not
        num_replicas = max(count, index + 1)
        return await VllmActorGeneration.create(
            section, model, slot=slot, index=index, num_replicas=num_replicas, start_timeout_s=start_timeout_s
        )

    limit = count if model.device == "cuda" else MAX_REPLICAS
    return ReplicatedGeneration(await start_engines(start, count), restart=start, max_replicas=limit)
