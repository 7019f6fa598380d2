"""A resources server of nemo-gym 0.7 that verifies as `fail` of its row says; run by Gym's own Python."""

# Checked where Gym is not installed.
# pyright: reportMissingImports=false

from nemo_gym.base_resources_server import BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer
from nemo_gym.judge import JudgeError
from pydantic import ConfigDict


class FailingVerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class FailingResourcesServer(SimpleResourcesServer):
    async def verify(self, body: FailingVerifyRequest) -> BaseVerifyResponse:
        failure = body.model_extra["fail"]
        if failure == "judge":
            raise JudgeError("the judge is away")
        if failure == "raise":
            raise RuntimeError("the verifier broke")
        return BaseVerifyResponse(**body.model_dump(exclude={"fail"}), reward=0.0, **failure)
