"""An environment server of nemo-gym 0.7 whose episodes fail as `fail` of their row says; run by Gym's own Python."""

# Checked where Gym is not installed.
# pyright: reportMissingImports=false, reportCallIssue=false

import asyncio

from nemo_gym.base_environment_server import BaseEnvironmentServer, BaseEnvironmentServerConfig, HandledEpisodeError
from nemo_gym.episode_types import EpisodeFailure
from nemo_gym.single_agent_turn_types import SingleAgentTurnRequest, SingleAgentTurnResponse


class FailingEnvironmentServer(BaseEnvironmentServer[SingleAgentTurnRequest, SingleAgentTurnResponse]):
    config: BaseEnvironmentServerConfig
    request_model = SingleAgentTurnRequest
    response_model = SingleAgentTurnResponse

    async def run(self, request, cleanup):
        failure = request.task.task_input.task_data["fail"]
        if failure == "raise":
            raise RuntimeError("not handled")
        if failure == "hang":
            await asyncio.Event().wait()
        raise HandledEpisodeError(EpisodeFailure(**failure))

    async def aggregate_metrics(self, body=None):
        raise NotImplementedError
