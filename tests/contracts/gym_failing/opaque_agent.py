"""An agent of nemo-gym 0.7 as a foreign harness is one: no tokens in its reply, no metadata in its calls."""

# Checked where Gym is not installed.
# pyright: reportMissingImports=false

from fastapi import Request, Response
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.token_id_capture.records import TOKEN_FIELDS
from responses_api_agents.simple_agent.app import SimpleAgent


class OpaqueAgent(SimpleAgent):
    async def responses(
        self, request: Request, response: Response, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        reply = await super().responses(request, response, body.model_copy(update={"metadata": None}))
        items = [item.model_dump(mode="json", exclude=set(TOKEN_FIELDS)) for item in reply.output]
        return NeMoGymResponse.model_validate({**reply.model_dump(mode="json"), "output": items})
