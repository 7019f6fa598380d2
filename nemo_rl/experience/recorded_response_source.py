"""The source of off-policy distillation: recorded responses in place of rollouts."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompt_loader import LoadedPrompt, PromptLoader
from nemo_rl.errors import DataError
from nemo_rl.experience.rollout_metrics import rollout_metrics
from nemo_rl.types import CollectedGroups, Message, Prompt, StopReason, TokenizedMessage, Trajectory, TrajectoryGroup

RESPONSE = "answer"  # key of a prompt's state: the row's `output_key`, or its last message


@dataclass(frozen=True, slots=True)
class RecordedResponseSource:
    """Satisfies interfaces.GroupSource.

    A response includes the model's end token; beyond `max_total_length` it is cut. It has
    log-probs of 0 and no reward.
    """

    loader: PromptLoader
    encoder: ChatEncoder
    num_prompts_per_step: int
    max_total_length: int

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        loaded = self.loader.take_step(self.num_prompts_per_step)
        if not loaded:
            raise StopAsyncIteration
        groups = tuple(self._group(one) for one in loaded)
        metrics = rollout_metrics([t for group in groups for t in group.trajectories])
        metrics = {k: v for k, v in metrics.items() if not k.endswith("reward_mean")}
        return CollectedGroups(groups, metrics | self.loader.take_metrics())

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing: nothing runs between two calls."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() | {"consumed_prompts": self.loader.consumed, "epoch": self.loader.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    async def close(self) -> None:
        """Do nothing: nothing runs between two calls."""

    def _group(self, loaded: LoadedPrompt) -> TrajectoryGroup:
        prompt = loaded.prompt
        prompt_log = self.encoder.encode_prompt(prompt.messages, prompt.tools)
        response = Message("assistant", get_recorded_response(prompt))
        token_ids = self.encoder.encode_answer(response, prompt.tools)
        max_response_tokens = self.max_total_length - sum(len(message.token_ids) for message in prompt_log)
        cut = token_ids[:max_response_tokens]
        trajectory = Trajectory(
            prompt=prompt,
            group_id=loaded.group_id,
            generation_index=0,
            message_log=(*prompt_log, TokenizedMessage(response, cut, (0.0,) * len(cut))),
            stop_reason=StopReason.DONE if len(cut) == len(token_ids) else StopReason.TRUNCATED,
            num_turns=1,
        )
        return TrajectoryGroup(loaded.group_id, prompt, (trajectory,))


def get_recorded_response(prompt: Prompt) -> str:
    """Return the response of a prompt's row; raise DataError if it has none."""
    response = prompt.env_state.get(RESPONSE)
    if not isinstance(response, str) or not response:
        raise DataError(
            f"prompt {prompt.prompt_id} of {prompt.dataset!r} has no response to learn from (distillation.off_policy): "
            "rows need a last message of the assistant, or text in output_key"
        )
    return response
