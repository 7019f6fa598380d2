"""Faults of replies, and the rewards and advantages that follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.algorithms.grpo import (
    assemble_train_batch,
    compute_train_rewards,
    estimate_advantages,
    transform_rewards,
)
from nemo_rl.algorithms.reward_penalties import Penalties, make_penalties
from nemo_rl.config.master import (
    GRPOConfig,
    PenaltyTokenIdsConfig,
    RewardPenaltiesConfig,
    RewardScalingConfig,
)
from nemo_rl.types import CollectedGroups, Message, StopReason, TokenizedMessage, ToolCall, Trajectory, TrajectoryGroup
from tests.unit.algorithms.rollouts import PROMPT, make_trajectory

ALL: dict[str, Any] = {
    "penalize_duplicated_reasoning": True,
    "penalize_empty_final_answer": True,
    "penalize_unwanted_tokens": True,
    "penalize_malformed_think_tag": True,
}
CALL = ToolCall("c", "look", "{}")


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def context(text: str) -> TokenizedMessage:
    return TokenizedMessage(Message("user", text), tuple(map(ord, text)))


def reply(text: str, *calls: ToolCall) -> TokenizedMessage:
    message = Message("assistant", text, calls)
    return TokenizedMessage(message, tuple(map(ord, text)), (-1.0,) * len(text))


def rollout(*log: TokenizedMessage, reward: float = 1.0, index: int = 0, **values: Any) -> Trajectory:
    return Trajectory(PROMPT, "g", index, log, StopReason.DONE, {"score": reward}, **values)


def penalties(grpo: GRPOConfig | None = None, **config: Any) -> Penalties:
    made = make_penalties(RewardPenaltiesConfig(**config), grpo or GRPOConfig(), decode)
    assert made is not None
    return made


def faults(trajectory: Trajectory) -> set[str]:
    found = penalties(**ALL, token_ids=PenaltyTokenIdsConfig(unwanted=[ord("#")])).find_faults(trajectory)
    names = ("duplicated_reasoning", "empty_final_answer", "unwanted_tokens", "malformed_think_tag")
    return {name for name in names if getattr(found, name)}


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("2+2", "4", set()),
        ("2+2", "<think>add</think>4", set()),
        ("2+2<think>\n", "add</think>\n4", set()),
        ("with <think> tags: 2+2", "4", set()),  # a prompt that speaks of the tag opens nothing
        # the answer repeats the thinking
        ("2+2", "<think> it is 4 </think>\nit is 4", {"duplicated_reasoning"}),
        ("2+2<think>", "4</think>4", {"duplicated_reasoning"}),
        ("2+2", "<think></think>", {"empty_final_answer"}),  # nothing repeats nothing
        # no answer
        ("2+2", "  \n", {"empty_final_answer"}),
        ("2+2", "<think>add</think>", {"empty_final_answer"}),
        # tags
        ("2+2", "<think>add", {"malformed_think_tag", "empty_final_answer"}),
        ("2+2<think>", "add", {"malformed_think_tag", "empty_final_answer"}),
        ("2+2", "add</think>4", {"malformed_think_tag"}),
        ("2+2<think>", "<think>add</think>4", {"malformed_think_tag"}),
        ("2+2<think>", "add</think>4</think>", {"malformed_think_tag"}),
        ("2+2", "so <think>add</think>4", {"malformed_think_tag"}),
        ("2+2", "<think>a</think><think>b</think>4", {"malformed_think_tag"}),
        # tokens
        ("2+2#", "4", set()),
        ("2+2", "4#", {"unwanted_tokens"}),
    ],
)
def test_faults_of_one_reply(prompt: str, text: str, expected: set[str]) -> None:
    assert faults(rollout(context(prompt), reply(text))) == expected


def test_a_last_reply_with_a_tool_call_is_no_empty_answer() -> None:
    assert faults(rollout(context("look"), reply("", CALL))) == set()
    assert faults(rollout(context("look"), reply("", CALL), context("a cat"), reply(""))) == {"empty_final_answer"}


def test_any_reply_of_any_chain_may_be_at_fault_but_only_the_message_log_answers() -> None:
    first_wrong = rollout(context("a"), reply("x</think>"), context("b"), reply("fine"))
    assert faults(first_wrong) == {"malformed_think_tag"}
    other = (context("a"), reply("x#"), context("b"), reply(""))
    assert faults(replace(rollout(context("a"), reply("fine")), other_chains=(other,))) == {"unwanted_tokens"}


def test_thinking_that_an_earlier_turn_opened_is_not_open_in_a_later_one() -> None:
    assert faults(rollout(context("a<think>"), reply("x</think>1"), context("b"), reply("2"))) == set()
    assert faults(rollout(context("a<think>"), reply("x</think>1"), context("b<think>"), reply("2</think>3"))) == set()


def test_tags_may_be_others_named_by_text_or_token() -> None:
    log = (context("a"), reply("[x"))
    by_text = penalties(penalize_malformed_think_tag=True, thinking_tags=["[", "]"])
    by_token = penalties(
        penalize_malformed_think_tag=True, token_ids=PenaltyTokenIdsConfig(think_open=ord("["), think_close=ord("]"))
    )
    for each in (by_text, by_token):
        assert each.find_faults(rollout(*log)).malformed_think_tag
        assert not each.find_faults(rollout(context("a"), reply("[x]1"))).malformed_think_tag


def test_each_reply_is_decoded_once_and_not_at_all_for_tokens_alone() -> None:
    decoded: list[str] = []

    def recorded(token_ids: Sequence[int]) -> str:
        decoded.append(decode(token_ids))
        return decoded[-1]

    group = TrajectoryGroup("g", PROMPT, (rollout(context("a"), reply("one"), context("b"), reply("two")),))
    Penalties(RewardPenaltiesConfig(**ALL), GRPOConfig(malformed_thinking_advantage=-1), recorded).faults([group])
    assert sorted(decoded) == ["a", "b", "one", "two"]
    decoded.clear()
    only_tokens = RewardPenaltiesConfig(penalize_unwanted_tokens=True, token_ids=PenaltyTokenIdsConfig(unwanted=[1]))
    Penalties(only_tokens, GRPOConfig(), recorded).faults([group])
    assert decoded == []


def test_overwritten_advantages_need_the_text_also_where_tokens_alone_are_penalised() -> None:
    read = penalties(
        GRPOConfig(invalid_tool_call_advantage=-1.0, malformed_thinking_advantage=-2.0),
        penalize_unwanted_tokens=True,
        token_ids=PenaltyTokenIdsConfig(unwanted=[ord("#")]),
    )
    found = read.find_faults(rollout(context("Hi"), reply("<tool_call>nothing")))
    assert [read.advantage_for(one) for one in found.chains[0]] == [-1.0]
    found = read.find_faults(rollout(context("Hi"), reply("2</think>#")))
    assert [read.advantage_for(one) for one in found.chains[0]] == [-2.0]
    assert found.unwanted_tokens


def test_nothing_is_penalised_by_default() -> None:
    assert make_penalties(RewardPenaltiesConfig(), GRPOConfig(), decode) is None


def test_a_penalised_reward_is_zero_before_scaling_unless_lower_already() -> None:
    members = tuple(
        rollout(context("a"), reply(text), reward=reward, index=index)
        for index, (text, reward) in enumerate([("4", 1.0), ("", 1.0), ("", -2.0)])
    )
    group = TrajectoryGroup("g", PROMPT, (*members, make_trajectory(None, index=3)))
    step = penalties(penalize_empty_final_answer=True).faults([group])
    scaled = GRPOConfig(
        reward_scaling=RewardScalingConfig(enabled=True, source_min=-2, source_max=1, target_min=-1, target_max=1)
    )
    for config, expected in ((GRPOConfig(), [1.0, 0.0, -2.0]), (scaled, [1.0, 1 / 3, -1.0])):
        rewards = transform_rewards([group], config, None, zero_reward_rollouts=step.zero_reward_rollouts)
        assert rewards == pytest.approx({("g", index): reward for index, reward in enumerate(expected)})
    assert step.metrics == {"reward_penalties/empty_final_answer": 2}
    assert [t.reward for t in members] == [1.0, 1.0, -2.0]  # those of the environment stay


@dataclass(frozen=True)
class Run:
    """What the stages read of a run; the estimator's advantages are the rewards."""

    penalties: Penalties | None
    config: Any

    required_keys = frozenset({keys.REWARD})

    def __call__(self, batch: TensorDict) -> torch.Tensor:
        return batch[keys.REWARD][:, None].expand_as(batch[keys.TOKEN_MASK])


def stage_run(grpo: GRPOConfig) -> Run:
    config = SimpleNamespace(grpo=grpo, min_group_size=1, policy=SimpleNamespace(max_response_length=None))
    return Run(make_penalties(RewardPenaltiesConfig(), grpo, decode), config)


def test_advantages_of_faulty_replies_are_overwritten_and_no_others() -> None:
    run = stage_run(GRPOConfig(invalid_tool_call_advantage=-5.0, malformed_thinking_advantage=-7.0))
    broken_call, thought = "<tool_call>{", "</think>"
    first = rollout(context("ab"), reply(broken_call), context("c"), reply("ok"), reward=1.0)
    second = replace(
        rollout(context("a"), reply("<tool_call>{}</tool_call>", CALL), reward=2.0, index=1),
        other_chains=((context("a"), reply(thought)), (context("a"), reply(broken_call + thought))),
    )
    collected = CollectedGroups((TrajectoryGroup("g", PROMPT, (first, second)),))
    rewards = compute_train_rewards(run.config, run.penalties, collected)
    batch, _ = assemble_train_batch(run.config, collected, rewards)
    estimate_advantages(run.config, run, batch)
    advantages = batch[keys.ADVANTAGES]
    assert advantages[0, :17].tolist() == [1.0] * 2 + [-5.0] * 12 + [1.0] * 3
    assert advantages[1].tolist() == [2.0] * advantages.shape[1]
    assert advantages[2, :9].tolist() == [2.0] + [-7.0] * 8
    assert advantages[3, :21].tolist() == [2.0] + [-7.0] * 20  # the lower of the two
    assert batch.get(keys.ADVANTAGE_OVERRIDE, None) is None
    assert rewards.faults.metrics == {"num_invalid_tool_calls": 2, "num_malformed_thinking": 2}
    assert rewards.by_trajectory == {("g", 0): 1.0, ("g", 1): 2.0}


def test_a_run_without_penalties_keeps_its_advantages() -> None:
    run = stage_run(GRPOConfig())
    collected = CollectedGroups((TrajectoryGroup("g", PROMPT, (rollout(context("a"), reply("</think>")),)),))
    rewards = compute_train_rewards(run.config, run.penalties, collected)
    batch, _ = assemble_train_batch(run.config, collected, rewards)
    estimate_advantages(run.config, run, batch)
    assert batch[keys.ADVANTAGES].unique().tolist() == [1.0]
    assert rewards.faults.metrics == {}
