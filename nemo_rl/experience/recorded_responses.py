"""Off-policy training: a group a prompt, whose one response is that of the data set. No engine takes part."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.loader import LoadedPrompt, PromptLoader
from nemo_rl.errors import DataError
from nemo_rl.experience.metrics import rollout_metrics
from nemo_rl.interfaces import CollectedGroups
from nemo_rl.types import Message, Prompt, StopReason, TokenizedMessage, Trajectory, TrajectoryGroup

RESPONSE = "answer"  # of a prompt's state: what its row has in `output_key`, or as the last message


@dataclass(frozen=True, slots=True)
class RecordedResponses:
    """Satisfies interfaces.GroupSource.

    A response is what the model would have to write, its end included; beyond `max_total_length` it is cut. It has
    log-probs of nobody (0) and no reward.
    """

    loader: PromptLoader
    encoder: ChatEncoder
    num_prompts_per_step: int
    max_total_length: int

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        loaded = self.loader.take(self.num_prompts_per_step)
        if not loaded:
            raise StopAsyncIteration
        groups = tuple(self._group(one) for one in loaded)
        metrics = rollout_metrics([t for group in groups for t in group.trajectories])
        return CollectedGroups(groups, {k: v for k, v in metrics.items() if not k.endswith("reward_mean")})

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Nothing runs between two calls."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() | {"consumed_prompts": self.loader.consumed, "epoch": self.loader.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    async def close(self) -> None:
        """Nothing runs between two calls."""

    def _group(self, loaded: LoadedPrompt) -> TrajectoryGroup:
        prompt = loaded.prompt
        asked = self.encoder.encode_prompt(prompt.messages, prompt.tools)
        response = Message("assistant", response_of(prompt))
        token_ids = self.encoder.encode_answer(response, prompt.tools)
        room = self.max_total_length - sum(len(message.token_ids) for message in asked)
        cut = token_ids[:room]
        trajectory = Trajectory(
            prompt=prompt,
            group_id=loaded.group_id,
            generation_index=0,
            message_log=(*asked, TokenizedMessage(response, cut, (0.0,) * len(cut))),
            stop_reason=StopReason.DONE if len(cut) == len(token_ids) else StopReason.TRUNCATED,
            num_turns=1,
        )
        return TrajectoryGroup(loaded.group_id, prompt, (trajectory,))


def response_of(prompt: Prompt) -> str:
    """Raises DataError for a prompt whose row had none."""
    response = prompt.env_state.get(RESPONSE)
    if not isinstance(response, str) or not response:
        raise DataError(
            f"prompt {prompt.prompt_id} of {prompt.dataset!r} has no response to learn from (distillation.off_policy): "
            "rows need a last message of the assistant, or text in output_key"
        )
    return response
