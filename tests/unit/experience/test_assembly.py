from dataclasses import replace

import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.errors import RolloutError
from nemo_rl.experience.assembly import (
    AssemblyCounts,
    assemble_batch,
    count_assembly,
    make_training_samples,
)
from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    MessageLog,
    Prompt,
    StopReason,
    TokenizedMessage,
    Trajectory,
    TrajectoryGroup,
)

PROMPT = Prompt(prompt_id="p", task_name="math", messages=(Message("user", "?"),))


def context(*token_ids: int) -> TokenizedMessage:
    return TokenizedMessage(Message("user", "?"), token_ids)


def generated(*tokens: tuple[int, float]) -> TokenizedMessage:
    ids, logprobs = tuple(t for t, _ in tokens), tuple(p for _, p in tokens)
    return TokenizedMessage(Message("assistant", "!"), ids, logprobs)


ONE_TURN: MessageLog = (context(5, 6), generated((7, -0.5), (8, -0.25)))
TWO_TURNS: MessageLog = (
    context(),  # its tokens lie on the segment's last message
    context(1, 2),
    generated((3, -0.1)),
    context(4),
    generated((5, -0.2), (6, -0.3)),
)


def trajectory(
    group_id: str,
    index: int,
    message_log: MessageLog = ONE_TURN,
    *,
    stop_reason: StopReason = StopReason.DONE,
    **rewards: float,
) -> Trajectory:
    return Trajectory(PROMPT, group_id, index, message_log, stop_reason, rewards=rewards)


def failed(group_id: str, index: int, cause: str = "TimeoutError: 600 s") -> Trajectory:
    failure = Failure(FailureClass.INFRA, cause)
    return Trajectory(PROMPT, group_id, index, ONE_TURN, StopReason.FAILED, failure=failure)


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories[0].group_id, PROMPT, trajectories)


def test_message_logs_become_padded_rows() -> None:
    groups = [group(trajectory("a", 0, TWO_TURNS, score=1.0), trajectory("a", 1, score=0.0))]
    batch, _ = assemble_batch(groups, min_group_size=2)
    assert batch[keys.TOKEN_IDS].tolist() == [[1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 0, 0]]
    assert batch[keys.TOKEN_MASK].tolist() == [[0, 0, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0]]
    torch.testing.assert_close(
        batch[keys.GENERATION_LOGPROBS], torch.tensor([[0, 0, -0.1, 0, -0.2, -0.3], [0, 0, -0.5, -0.25, 0, 0]])
    )
    assert batch[keys.LENGTHS].tolist() == [6, 4]
    assert batch[keys.TRAJECTORY_TOKENS].tolist() == [3.0, 2.0]
    assert batch[keys.SAMPLE_MASK].tolist() == [1.0, 1.0]


def test_tokens_of_a_trajectory_are_those_of_all_its_histories() -> None:
    several = replace(trajectory("a", 0, score=1.0), other_chains=(TWO_TURNS,))
    batch, _ = assemble_batch([group(several, trajectory("a", 1, score=0.0))], min_group_size=2)
    assert batch[keys.TOKEN_MASK].sum(-1).tolist() == [2.0, 3.0, 2.0]
    assert batch[keys.TRAJECTORY_TOKENS].tolist() == [5.0, 5.0, 2.0]


def test_keys_shapes_and_dtypes_are_those_of_the_glossary() -> None:
    batch, _ = assemble_batch([group(trajectory("a", 0, score=1.0), trajectory("a", 1))], min_group_size=2)
    expected = {
        keys.TOKEN_IDS: ((2, 4), torch.int64),
        keys.TOKEN_MASK: ((2, 4), torch.float32),
        keys.GENERATION_LOGPROBS: ((2, 4), torch.float32),
        keys.LENGTHS: ((2,), torch.int64),
        keys.SAMPLE_MASK: ((2,), torch.float32),
        keys.TRAJECTORY_ID: ((2,), torch.int64),
        keys.GROUP_ID: ((2,), torch.int64),
        keys.TRAJECTORY_TOKENS: ((2,), torch.float32),
        keys.REWARD: ((2,), torch.float32),
        keys.TRUNCATED: ((2,), torch.bool),
    }
    found = {k: (tuple(v.shape), v.dtype) for k, v in batch.items() if k != keys.REWARD_COMPONENTS}
    assert found == expected
    assert batch[keys.REWARD_COMPONENTS]["score"].tolist() == [1.0, 0.0]
    assert batch.batch_size == (2,)


def test_a_chain_with_rewards_of_its_own_trains_with_these() -> None:
    two = replace(
        trajectory("a", 0, shared=1.0, call=0.5),
        other_chains=(TWO_TURNS, ONE_TURN),
        chain_rewards=({"call": 1.0}, {"call": 0.0}, {}),
    )
    batch, _ = assemble_batch([group(two, trajectory("a", 1, shared=0.0))], min_group_size=1)
    assert batch[keys.REWARD].tolist() == [2.0, 1.0, 1.5, 0.0]
    assert batch[keys.REWARD_COMPONENTS]["call"].tolist() == [1.0, 0.0, 0.5, 0.0]
    shaped, _ = assemble_batch([group(two)], {("a", 0): 10.0}, min_group_size=1)
    assert shaped[keys.REWARD].tolist() == [10.5, 9.5, 10.0]


def test_order_is_groups_then_generation_index() -> None:
    groups = [
        group(trajectory("b", 1, score=2.0), trajectory("b", 0, score=1.0)),
        group(trajectory("a", 0, score=3.0), trajectory("a", 1, score=4.0)),
    ]
    batch, rows = assemble_batch(groups, min_group_size=1)
    assert [row.trajectory_key for row in rows] == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    assert batch[keys.REWARD].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert batch[keys.GROUP_ID].tolist() == [0, 0, 1, 1]
    assert batch[keys.TRAJECTORY_ID].tolist() == [0, 1, 2, 3]


def test_shaped_rewards_replace_the_total_but_not_the_components() -> None:
    groups = [group(trajectory("a", 0, right=1.0, format=0.5), trajectory("a", 1, right=0.0))]
    assert assemble_batch(groups, min_group_size=2)[0][keys.REWARD].tolist() == [1.5, 0.0]
    batch, _ = assemble_batch(groups, {("a", 0): -1.0, ("a", 1): 2.0}, min_group_size=2)
    assert batch[keys.REWARD].tolist() == [-1.0, 2.0]
    assert batch[keys.REWARD_COMPONENTS]["right"].tolist() == [1.0, 0.0]
    assert batch[keys.REWARD_COMPONENTS]["format"].tolist() == [0.5, 0.0]


def test_failures_and_groups_with_too_few_survivors_are_left_out_and_counted() -> None:
    groups = [
        group(trajectory("a", 0, score=1.0), failed("a", 1), trajectory("a", 2, score=2.0)),
        group(trajectory("b", 0, score=3.0), failed("b", 1)),
        group(failed("c", 0), failed("c", 1)),
        group(trajectory("d", 0, score=4.0), trajectory("d", 1, score=5.0)),
    ]
    batch, _ = assemble_batch(groups, min_group_size=2)
    assert batch[keys.REWARD].tolist() == [1.0, 2.0, 4.0, 5.0]
    assert batch[keys.GROUP_ID].tolist() == [0, 0, 1, 1]
    counts = count_assembly(groups, min_group_size=2)
    assert counts == AssemblyCounts(9, num_failed=4, num_dropped_groups=2, num_dropped_survivors=1)
    assert counts.num_trajectories - counts.num_failed - counts.num_dropped_survivors == len(batch)


def test_an_empty_batch_names_the_first_cause() -> None:
    groups = [group(failed("a", 0, "ConnectionError: refused"), failed("a", 1, "other"))]
    with pytest.raises(RolloutError, match=r"2 of 2 rollouts failed.*infra: ConnectionError: refused"):
        assemble_batch(groups, min_group_size=2)
    with pytest.raises(RolloutError, match="min_group_size = 2"):
        assemble_batch([group(trajectory("a", 0))], min_group_size=2)


def test_truncation_is_marked_and_running_out_of_turns_is_not() -> None:
    reasons = (StopReason.DONE, StopReason.TRUNCATED, StopReason.MAX_TURNS)
    groups = [group(*(trajectory("a", i, stop_reason=reason) for i, reason in enumerate(reasons)))]
    assert assemble_batch(groups, min_group_size=2)[0][keys.TRUNCATED].tolist() == [False, True, False]


def test_a_trajectory_that_sampled_nothing_has_no_trained_token() -> None:
    groups = [group(trajectory("a", 0, (context(1, 2, 3),)), trajectory("a", 1, ()))]
    batch, _ = assemble_batch(groups, min_group_size=2)
    assert batch[keys.LENGTHS].tolist() == [3, 0]
    assert not batch[keys.TOKEN_MASK].any()


def test_the_first_token_is_never_trained() -> None:
    batch, _ = assemble_batch([group(trajectory("a", 0, (generated((1, -0.5), (2, -0.5)),)))], min_group_size=1)
    assert batch[keys.TOKEN_MASK].tolist() == [[0, 1]]
    assert batch[keys.GENERATION_LOGPROBS].tolist() == [[0, -0.5]]
    assert batch[keys.TRAJECTORY_TOKENS].tolist() == [1]


def test_a_trajectory_yields_its_whole_log_as_one_sample() -> None:
    (sample,) = make_training_samples(trajectory("a", 0, TWO_TURNS), trajectory_id=3, group_id=1, reward=0.5)
    assert sample.token_ids == (1, 2, 3, 4, 5, 6)
    assert sample.token_mask == (0, 0, 1, 0, 1, 1)
    assert sample.generation_logprobs == (0.0, 0.0, -0.1, 0.0, -0.2, -0.3)
    assert (sample.trajectory_id, sample.group_id, sample.reward, sample.loss_weight) == (3, 1, 0.5, 1.0)
