"""Requests that an engine answers one by one, all at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nemo_rl.config.policy import GenerationConfig
from nemo_rl.errors import GenerationError
from nemo_rl.interfaces import Generation


async def make_generation(
    section: GenerationConfig,
    *,
    model_path: str,
    dtype: str,
    max_model_len: int,
    device: str,
    slots: Sequence[Any] = (),
    trust_remote_code: bool = False,
) -> Generation:
    """Start the engine; takes seconds. `dtype` and `max_model_len` hold where the section says nothing else.

    `trust_remote_code` is the hf engine's; vLLM has it among its `vllm_kwargs`.
    `slots` are the places of the replicas in a cluster (distributed/cluster.py), one a replica; without them
    `section.num_replicas` engines stand on this machine. Several are in actors, behind a router.
    Raises ConfigError for settings that the engine refuses, GenerationError when it does not start.
    """
    model: dict[str, Any] = {
        "model_path": model_path,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "device": device,
    }
    # Imported here: each takes seconds that a run with another engine need not wait.
    if section.backend == "hf":
        from nemo_rl.generation.hf import HFGeneration

        return HFGeneration(
            model_path, dtype=dtype, device=device, max_model_len=max_model_len, trust_remote_code=trust_remote_code
        )
    slots_or_none = list(slots) or [None] * (section.num_replicas or 1)
    if len(slots_or_none) == 1 and slots_or_none[0] is None and not section.in_actor:
        from nemo_rl.generation.vllm import VllmGeneration

        return await VllmGeneration.create(section, **model)

    from nemo_rl.generation.actor import VllmActorGeneration
    from nemo_rl.generation.router import ReplicatedGeneration

    async def start(index: int) -> Generation:
        return await VllmActorGeneration.create(
            section, **model, slot=slots_or_none[index], num_replicas=len(slots_or_none)
        )

    if len(slots_or_none) == 1:
        return await start(0)
    return ReplicatedGeneration(await start_engines(start, len(slots_or_none)), restart=start)


async def start_engines(start: Callable[[int], Awaitable[Generation]], count: int) -> list[Generation]:
    """All engines, started together; when one does not start, the others are closed and its error is raised."""
    outcomes = await asyncio.gather(*(start(index) for index in range(count)), return_exceptions=True)
    started = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not failed:
        return started
    await asyncio.gather(*(engine.close() for engine in started), return_exceptions=True)
    raise GenerationError(f"{len(failed)} of {count} engine replicas did not start: {failed[0]}") from failed[0]
