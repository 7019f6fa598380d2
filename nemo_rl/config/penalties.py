"""`reward_penalties`: replies that cost a rollout its reward, under NeMo-RL's names."""

from pydantic import Field

from nemo_rl.config.section import Section


class PenaltyTokenIdsConfig(Section):
    unwanted: list[int] = Field(default_factory=list)  # none of them may be sampled
    think_open: int | None = None  # in place of the first of thinking_tags
    think_close: int | None = None  # in place of the second


class RewardPenaltiesConfig(Section):
    """A rollout with such a reply gets the reward 0, unless its own is lower. All off by default."""

    penalize_duplicated_reasoning: bool = False  # a reply whose answer repeats its thinking
    penalize_empty_final_answer: bool = False  # a last reply without answer and without tool call
    penalize_unwanted_tokens: bool = False  # any of token_ids.unwanted in a reply
    penalize_malformed_think_tag: bool = False  # thinking tags that do not open and close once
    token_ids: PenaltyTokenIdsConfig = PenaltyTokenIdsConfig()
    thinking_tags: list[str] = Field(default=["<think>", "</think>"], min_length=2, max_length=2)
    invalid_tool_call_patterns: list[str] = Field(  # of grpo.invalid_tool_call_advantage
        default=["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"], min_length=1
    )

    @property
    def enabled(self) -> tuple[str, ...]:
        """The keys that are on."""
        return tuple(name for name in type(self).model_fields if name.startswith("penalize_") and getattr(self, name))
