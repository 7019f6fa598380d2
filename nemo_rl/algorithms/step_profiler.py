"""Profiles the policy and the engine in chosen steps (`logger.profile.steps`)."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.config.shared_sections import ProfileConfig
from nemo_rl.errors import NemoRLError
from nemo_rl.interfaces import HasReplicas, Profiled
from nemo_rl.observability.profiles import append_profile, find_profiles, profile_directory
from nemo_rl.observability.trace_file import TRACE_FILE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepProfiler:
    """Profiles `parts` in the steps of these numbers; the files go to `directory`, and into the run's trace if any."""

    steps: frozenset[int]
    directory: Path
    parts: Sequence[Profiled]

    @asynccontextmanager
    async def profiled(self, step: int) -> AsyncIterator[None]:
        """Profile the block if it is one of the steps. A profile that fails is reported, and the run continues."""
        if step not in self.steps:
            yield
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        before, started = find_profiles(self.directory), []
        for part in self.parts:
            if await _reported(part.start_profile(self.directory, f"step_{step}"), "start"):
                started.append(part)
        try:
            yield
        finally:
            for part in started:
                await _reported(part.stop_profile(), "stop")
            await asyncio.to_thread(self._merge, find_profiles(self.directory) - before)

    def _merge(self, profiles: set[Path]) -> None:
        trace = self.directory.parent / TRACE_FILE
        for path in sorted(profiles):
            logger.info("wrote the profile %s", path)
            if trace.exists():
                try:
                    append_profile(trace, path)
                except (ValueError, OSError) as error:
                    logger.warning("the trace lacks the profile %s: %s", path, error)


def make_profiler(section: ProfileConfig, run_dir: Path, *parts: object) -> StepProfiler:
    """Return the profiler of a run; of its parts those that can be profiled take part."""
    if (directory := profile_directory(section, run_dir)) is None:
        return NO_PROFILES
    profiled = [part for part in parts if isinstance(part, Profiled)]
    engines = [replica for part in parts if isinstance(part, HasReplicas) for replica in part.replicas]
    profiled += [engine for engine in engines if isinstance(engine, Profiled)]
    return StepProfiler(frozenset(section.steps), directory, profiled)


NO_PROFILES = StepProfiler(frozenset(), Path(), ())


async def _reported(call: Awaitable[None], what: str) -> bool:
    """Await the call; return whether it succeeded."""
    try:
        await call
    except (NemoRLError, RuntimeError, OSError) as error:  # a profiler failed; a dead worker fails the step itself
        logger.warning("cannot %s a profile: %r", what, error)
        return False
    return True
