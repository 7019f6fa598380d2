"""Penalties of faulty replies: which replies are faulty, and the rewards and advantages that follow."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nemo_rl.config.master import GRPOConfig, RewardPenaltiesConfig
from nemo_rl.experience.assembly import BatchRow, TrajectoryKey, trajectory_key
from nemo_rl.types import MessageLog, TokenizedMessage, Trajectory, TrajectoryGroup

CONTEXT_TAIL_TOKENS = 16  # tokens of the context in which an opening thinking tag is looked for
Decode = Callable[[Sequence[int]], str]  # token ids -> text with special tokens, without the stop token at the end


@dataclass(frozen=True, slots=True)
class ReplyFaults:
    duplicated_reasoning: bool = False
    empty_answer: bool = False  # a fault of a last reply only
    unwanted_token: bool = False
    malformed_thinking: bool = False
    invalid_tool_call: bool = False


@dataclass(frozen=True, slots=True)
class RolloutFaults:
    """The faults of a trajectory's replies: chain by chain, the message log first."""

    chains: tuple[tuple[ReplyFaults, ...], ...]

    @property
    def duplicated_reasoning(self) -> bool:
        return any(reply.duplicated_reasoning for reply in self._replies())

    @property
    def empty_final_answer(self) -> bool:
        """Return whether the message log ends without an answer; other chains give none."""
        return bool(self.chains[0]) and self.chains[0][-1].empty_answer

    @property
    def unwanted_tokens(self) -> bool:
        return any(reply.unwanted_token for reply in self._replies())

    @property
    def malformed_think_tag(self) -> bool:
        return any(reply.malformed_thinking for reply in self._replies())

    def _replies(self) -> Iterator[ReplyFaults]:
        return (reply for chain in self.chains for reply in chain)


@dataclass(frozen=True, slots=True)
class StepFaults:
    """The faults of a step's rollouts that did not fail, and their consequences."""

    penalties: "Penalties | None" = None
    rollouts: Mapping[TrajectoryKey, RolloutFaults] = field(default_factory=dict)

    def penalised(self, name: str) -> frozenset[TrajectoryKey]:
        """Return the rollouts with the fault that the key `penalize_<name>` is about."""
        return frozenset(key for key, faults in self.rollouts.items() if getattr(faults, name))

    @property
    def zero_reward_rollouts(self) -> frozenset[TrajectoryKey]:
        names = self.penalties.names if self.penalties else ()
        return frozenset[TrajectoryKey]().union(*(self.penalised(name) for name in names))

    @property
    def metrics(self) -> dict[str, float]:
        """Return the number of rollouts per enabled penalty, and of replies whose advantage is overwritten."""
        if self.penalties is None:
            return {}
        metrics = {f"reward_penalties/{name}": float(len(self.penalised(name))) for name in self.penalties.names}
        replies = [reply for faults in self.rollouts.values() for chain in faults.chains for reply in chain]
        if self.penalties.invalid_tool_call_advantage is not None:
            metrics["num_invalid_tool_calls"] = float(sum(reply.invalid_tool_call for reply in replies))
        if self.penalties.malformed_thinking_advantage is not None:
            metrics["num_malformed_thinking"] = float(sum(reply.malformed_thinking for reply in replies))
        return metrics

    def advantage_override(self, rows: Sequence[BatchRow], *, shape: Sequence[int]) -> torch.Tensor | None:
        """Return advantages that replace the estimator's, NaN elsewhere: [B, T]; None if there is none."""
        if self.penalties is None or not self.penalties.overwrites_advantages:
            return None
        override = torch.full(tuple(shape), math.nan)
        for index, row in enumerate(rows):
            replies = self.rollouts[row.trajectory_key].chains[row.chain_index]
            for (start, stop), reply in zip(_reply_spans(row.message_log), replies, strict=True):
                value = self.penalties.advantage_for(reply)
                if value is not None:
                    override[index, start:stop] = value
        return override


class Penalties:
    """Reads replies for the faults that the configuration asks about."""

    def __init__(self, config: RewardPenaltiesConfig, grpo: GRPOConfig, decode: Decode) -> None:
        ids = config.token_ids
        self.names = tuple(key.removeprefix("penalize_") for key in config.enabled)
        self.invalid_tool_call_advantage = grpo.invalid_tool_call_advantage
        self.malformed_thinking_advantage = grpo.malformed_thinking_advantage
        self._open = config.thinking_tags[0] if ids.think_open is None else decode([ids.think_open])
        self._close = config.thinking_tags[1] if ids.think_close is None else decode([ids.think_close])
        self._unwanted = frozenset(ids.unwanted)
        self._call_patterns = tuple(config.invalid_tool_call_patterns)
        self._decode = decode
        self._decode_tail = functools.lru_cache(maxsize=1024)(decode)  # most prompts end with the same tokens
        self._reads_text = set(self.names) != {"unwanted_tokens"} or self.overwrites_advantages

    @property
    def overwrites_advantages(self) -> bool:
        return self.invalid_tool_call_advantage is not None or self.malformed_thinking_advantage is not None

    def faults(self, groups: Sequence[TrajectoryGroup]) -> StepFaults:
        """Return the faults of all rollouts that did not fail; each reply is decoded once."""
        rollouts = {trajectory_key(t): self.find_faults(t) for group in groups for t in group.scored}
        return StepFaults(self, rollouts)

    def find_faults(self, trajectory: Trajectory) -> RolloutFaults:
        return RolloutFaults(tuple(tuple(self._find_reply_faults(log)) for log in trajectory.chains))

    def advantage_for(self, reply: ReplyFaults) -> float | None:
        """Return the advantage that overrides a reply's tokens; the lowest if several apply, else None."""
        values = []
        if reply.invalid_tool_call and self.invalid_tool_call_advantage is not None:
            values.append(self.invalid_tool_call_advantage)
        if reply.malformed_thinking and self.malformed_thinking_advantage is not None:
            values.append(self.malformed_thinking_advantage)
        return min(values, default=None)

    def _find_reply_faults(self, log: MessageLog) -> Iterator[ReplyFaults]:
        context: tuple[int, ...] = ()
        for message in log:
            if message.is_generated:
                yield self._check_reply(message, context)
                context = ()
            context = message.token_ids or context

    def _check_reply(self, message: TokenizedMessage, context: tuple[int, ...]) -> ReplyFaults:
        unwanted = not self._unwanted.isdisjoint(message.token_ids)
        if not self._reads_text:
            return ReplyFaults(unwanted_token=unwanted)
        text = self._decode(message.token_ids)
        opened = self._decode_tail(context[-CONTEXT_TAIL_TOKENS:]).rstrip().endswith(self._open)
        thinking, answer = self._split_thinking(text, opened=opened)
        calls = message.message.tool_calls
        return ReplyFaults(
            duplicated_reasoning=bool(thinking) and thinking == answer,
            empty_answer=not answer and not calls,
            unwanted_token=unwanted,
            malformed_thinking=self._is_malformed(text, opened=opened),
            invalid_tool_call=any(text.count(pattern) > len(calls) for pattern in self._call_patterns),
        )

    def _split_thinking(self, text: str, *, opened: bool) -> tuple[str, str]:
        """Return thinking and answer, stripped.

        Thinking begins with its tag or in the prompt; without a closing tag, all of the text is thinking.
        """
        begins = opened or text.lstrip().startswith(self._open)
        thinking, closed, answer = text.partition(self._close)
        if not begins and not closed:
            return "", text.strip()
        return thinking.strip().removeprefix(self._open).strip(), answer.strip()

    def _is_malformed(self, text: str, *, opened: bool) -> bool:
        """Return whether the tags are malformed.

        Well-formed are: one closing tag if the prompt opened one; one pair from the beginning; no tag if the
        prompt opened none.
        """
        num_opening, num_closing = text.count(self._open), text.count(self._close)
        if opened:
            return (num_opening, num_closing) != (0, 1)
        is_pair = (num_opening, num_closing) == (1, 1) and text.lstrip().startswith(self._open)
        return not is_pair and num_opening + num_closing > 0


def _reply_spans(log: MessageLog) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each reply's tokens in its row."""
    start = 0
    for message in log:
        stop = start + len(message.token_ids)
        if message.is_generated:
            yield start, stop
        start = stop


def make_penalties(config: RewardPenaltiesConfig, grpo: GRPOConfig, decode: Decode) -> Penalties | None:
    """Return the configured penalties; None if nothing is penalised."""
    penalties = Penalties(config, grpo, decode)
    return penalties if penalties.names or penalties.overwrites_advantages else None
