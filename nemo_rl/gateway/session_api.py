"""Bodies of the gateway's own endpoints below /sessions."""

from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from nemo_rl.data.messages import to_openai_message
from nemo_rl.gateway.dialects.bodies import Body
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.sessions import Chain, Session
from nemo_rl.types import ImagePart


class SessionRequest(Body):
    """The body of POST /sessions; may be empty."""

    # base of all sampling seeds in the session; None: derived from the run's seed
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class RewardRequest(Body):
    """The body of POST /sessions/{id}/reward: one number, or several by name.

    `reward_info` is uni-agent's name for `rewards`, with which it posts to .../reward_info.
    """

    reward: FiniteFloat | None = None
    rewards: dict[str, FiniteFloat] | None = None
    reward_info: dict[str, FiniteFloat] | None = None
    completion_id: str | None = None  # `id` of a completion: the rewards count only for chains through that call

    def named(self) -> dict[str, float]:
        """Return the rewards by name; a single one is called "reward"."""
        single = None if self.reward is None else {"reward": float(self.reward)}
        given = [each for each in (single, self.rewards, self.reward_info) if each is not None]
        if len(given) != 1:
            raise RequestError(400, "give one of reward, rewards and reward_info", param="reward")
        return dict(given[0])


def session_body(session_id: str, session: Session) -> dict[str, Any]:
    """Return a session with its chains, token for token."""
    return {
        "id": session_id,
        "object": "session",
        "num_calls": session.num_calls,
        "rewards": session.rewards,
        "chains": [_chain_body(chain) for chain in session.chains()],
    }


def _chain_body(chain: Chain) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, int]] = []  # (weight version, start, end); only for messages sampled across a refit
    for each in chain.message_log:
        spans += ((span.version, len(ids) + span.start, len(ids) + span.end) for span in each.weight_spans)
        ids += each.token_ids
        mask += [int(each.is_generated)] * len(each.token_ids)
        logprobs += each.generation_logprobs or [0.0] * len(each.token_ids)
    return {
        "token_ids": ids,
        "token_mask": mask,
        "generation_logprobs": logprobs,
        "messages": [to_openai_message(each.message, write_image=_image_body) for each in chain.message_log],
        "weight_versions": chain.weight_versions,
        "weight_spans": spans,
        "rewards": chain.rewards,
    }


def _image_body(image: ImagePart) -> dict[str, Any]:
    return {"type": "image", "digest": image.digest}
