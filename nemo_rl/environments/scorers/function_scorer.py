"""Scorer `function`: a rule `(messages, metadata) -> float`, in processes of its own."""

import asyncio
from collections.abc import Sequence

from nemo_rl.config.environment import BatchedScorerConfig
from nemo_rl.config.kinds import Entry, import_path
from nemo_rl.config.value_types import Processes
from nemo_rl.environments.boundary import error_to_failure
from nemo_rl.environments.process_pool import PoolOptions, ProcessPool
from nemo_rl.environments.registry import messages_to_dicts
from nemo_rl.errors import ConfigError, WorkerError
from nemo_rl.types import Failure, FailureClass, ScoreRequest


class FunctionScorerConfig(BatchedScorerConfig):
    """A rule: `(messages, metadata) -> float`, in processes of its own."""

    function: str  # a dotted path
    num_workers: Processes = 2  # processes that run the function
    sandboxed: bool = False  # they can compute alone: no files, network, secrets, processes or threads


class RuleScorer:
    """A rule `(messages, metadata) -> float`; an exception, a hang or a crash fails its own request alone."""

    def __init__(self, name: str, section: FunctionScorerConfig) -> None:
        key = f"scorers.{name}.function"
        function = import_path(key, section.function)
        if not callable(function):
            raise ConfigError(key, section.function, "not a function")
        module, qualified_name = function.__module__, function.__qualname__
        if "<" in qualified_name or "." in qualified_name:
            raise ConfigError(key, section.function, "a function in a process of its own must be found by its path")
        options = PoolOptions(section.timeout_s, sandboxed=section.sandboxed)
        self._pool = ProcessPool(f"{module}:{qualified_name}", section.num_workers, options)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        return list(await asyncio.gather(*map(self._score, requests)))

    async def _score(self, request: ScoreRequest) -> float | Failure:
        try:
            return await self._pool.call(messages_to_dicts(request.messages), dict(request.metadata))
        except WorkerError as error:
            return error_to_failure(error, FailureClass.REWARD)

    async def close(self) -> None:
        await self._pool.close()


FUNCTION = Entry(FunctionScorerConfig, make=RuleScorer)
