"""The start of an engine of any kind. Loads neither torch nor vLLM."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.config.policy import GenerationConfig
from nemo_rl.config.registries import ENGINES
from nemo_rl.config.shared_sections import TraceConfig
from nemo_rl.errors import GenerationError
from nemo_rl.interfaces import Generation

DEFAULT_START_S = 300.0  # enough for a small model


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The adapters that an engine holds beside its model: the newest versions of one, or of one per policy."""

    rank: int  # the adapters'
    num_versions: int  # newest ones that requests may ask for; older ones stay while a request runs under them
    policies: tuple[str, ...] = ("",)  # names of the policies, each of which has an adapter in every version


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The model that an engine samples, and its device; the section's precision and context length win over these."""

    model_path: str
    dtype: str
    max_model_len: int
    device: str
    trust_remote_code: bool = False
    divides_cores: bool = False  # on a CPU, with a trainer that computes at the same time
    records_routes: bool = False  # completions have the column `token_columns.ROUTED_EXPERTS`
    adapters: AdapterSlots | None = None  # None: refits bring whole weights
    vision_type: str | None = None  # type of a model that sees (config/images.py); None: it reads text
    profile_dir: Path | None = None  # where the engine writes profiles of chosen steps; None: it writes none
    trace: TraceConfig = field(
        default_factory=TraceConfig
    )  # `logger.trace`: completions have phases, and the engine counters


async def make_generation(
    section: GenerationConfig,
    model: EngineModel,
    *,
    slots: Sequence[Any] = (),
    start_timeout_s: float = DEFAULT_START_S,
) -> Generation:
    """Start the engine that `section` names; takes seconds.

    `slots` are the resources of the replicas in a cluster (distributed/cluster.py), one per replica; without them
    `section.num_replicas` engines run on this machine. `start_timeout_s` bounds the start of each, except for code in
    this process that blocks the event loop.
    Raises ConfigError for settings that the engine refuses, GenerationError if it does not start.
    """
    make = ENGINES.entry(section.backend, key="policy.generation.backend").make
    try:
        async with asyncio.timeout(None if slots else start_timeout_s) as deadline:  # replicas have a limit each
            return await make(section, model, slots=slots, start_timeout_s=start_timeout_s)
    except TimeoutError as error:
        if not deadline.expired():  # the engine's own
            raise
        problem = f"the engine {section.backend} did not start within {start_timeout_s:g} s (cluster.start_timeout_s)"
        raise GenerationError(problem) from error
