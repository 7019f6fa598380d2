"""An environment server of nemo-gym 0.7 whose episodes fail as `fail` of their row says; run by Gym's own Python."""

# Checked where Gym is not installed.
# pyright: reportMissingImports=false, reportCallIssue=false

import asyncio
import time
from pathlib import Path
from typing import Any

from nemo_gym.base_environment_server import BaseEnvironmentServer, BaseEnvironmentServerConfig, HandledEpisodeError
from nemo_gym.episode_types import EpisodeFailure
from nemo_gym.single_agent_turn_types import SingleAgentTurnRequest, SingleAgentTurnResponse

MAX_WAIT_S = 50.0  # less than a row may take


def _wait_for(file: Path) -> None:
    ends_at = time.monotonic() + MAX_WAIT_S
    while not file.exists() and time.monotonic() < ends_at:
        time.sleep(0.05)


class FailingEnvironmentServer(BaseEnvironmentServer[SingleAgentTurnRequest, SingleAgentTurnResponse]):
    config: BaseEnvironmentServerConfig
    request_model = SingleAgentTurnRequest
    response_model = SingleAgentTurnResponse

    async def run(self, request, cleanup):
        failure: Any = request.task.task_input.task_data["fail"]
        wait_for = None if isinstance(failure, str) else failure.get("wait_for")
        if failure == "hang":
            await asyncio.Event().wait()
        if wait_for is not None:
            await asyncio.to_thread(_wait_for, Path(wait_for))
        if failure == "raise" or wait_for is not None:
            raise RuntimeError("not handled")
        raise HandledEpisodeError(EpisodeFailure(**failure))

    async def aggregate_metrics(self, body=None):
        raise NotImplementedError
