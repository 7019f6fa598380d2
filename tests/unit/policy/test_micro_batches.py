import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.errors import ConfigError
from nemo_rl.policy.micro_batches import (
    PackedTokens,
    PaddedTokens,
    SampleCount,
    count_valid,
    divide_rows,
    expected_optimizer_steps,
    micro_batches,
    scoring_micro_batching,
    split_optimizer_steps,
    teacher_micro_batching,
    training_micro_batching,
)
from nemo_rl.policy.ranks import RankLayout
from tests.unit.policy.tiny import make_batch


def test_number_of_optimizer_steps_is_the_nearest_and_at_least_one() -> None:
    assert expected_optimizer_steps(64, 64) == 1
    assert expected_optimizer_steps(64, 512) == 1
    assert expected_optimizer_steps(128, 32) == 4
    assert expected_optimizer_steps(96, 64) == 2
    assert expected_optimizer_steps(90, 64) == 1


def test_groups_are_never_cut() -> None:
    group_id = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3])
    assert [rows.tolist() for rows in split_optimizer_steps(group_id, 2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert [len(rows) for rows in split_optimizer_steps(group_id, 12)] == [3, 3, 2, 4]
    assert [len(rows) for rows in split_optimizer_steps(group_id, 1)] == [12]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 5))
def test_every_row_is_trained_once_with_its_group(sizes: list[int], num_steps: int) -> None:
    group_id = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    steps = split_optimizer_steps(group_id, num_steps)
    assert len(steps) <= num_steps
    assert torch.cat(steps).tolist() == list(range(sum(sizes)))
    groups = [set(group_id[rows].tolist()) for rows in steps]
    assert sum(len(g) for g in groups) == len(sizes)


def test_equal_groups_split_evenly() -> None:
    group_id = torch.arange(32) // 4
    assert [len(rows) for rows in split_optimizer_steps(group_id, 4)] == [8, 8, 8, 8]


def test_micro_batches_are_sorted_by_length_and_cut_to_their_longest() -> None:
    batch = make_batch([3, 9, 4, 8, 5])
    parts = list(micro_batches(batch, torch.tensor([0, 1, 2, 3]), 2))
    assert [rows.tolist() for rows, _ in parts] == [[1, 3], [2, 0]]
    assert [part["token_ids"].shape for _, part in parts] == [(2, 9), (2, 4)]
    assert torch.equal(parts[1][1]["advantages"], batch["advantages"][[2, 0], :4])
    assert torch.equal(parts[1][1]["reward_components", "r"], torch.ones(2))
    assert batch["token_ids"].shape == (5, 9)


def test_valid_tokens_leave_out_the_first_entry_and_masked_samples() -> None:
    batch = make_batch([4, 4, 4, 3])
    batch["token_mask"] = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 0]], dtype=torch.float32)
    batch["sample_mask"] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    normalizer = count_valid(batch, torch.arange(4))
    assert normalizer.num_valid_tokens == 3 + 2 + 1
    assert normalizer.num_valid_trajectories == 3


def test_samples_of_one_trajectory_count_once() -> None:
    batch = make_batch([4, 4, 4, 4])
    batch["trajectory_id"] = torch.tensor([0, 0, 1, 2])
    batch["sample_mask"] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert count_valid(batch, torch.arange(4)).num_valid_trajectories == 2
    assert count_valid(batch, torch.tensor([2, 3])).num_valid_trajectories == 1
    batch["sample_mask"] = torch.ones(4)
    assert count_valid(batch, torch.arange(4)).num_valid_trajectories == 3


def test_positive_tokens_are_those_of_samples_with_a_reward_above_0() -> None:
    batch = make_batch([4, 4, 4])
    batch["token_mask"] = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.float32)
    batch["reward"] = torch.tensor([0.5, 0.0, -1.0])
    assert count_valid(batch, torch.arange(3)).num_positive_tokens == 3


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [[[2, 0], [4, 1], [3]]]),
        (2, [[[2, 4], [3]], [[0, 1], []]]),
        (4, [[[2, 3]], [[0]], [[4]], [[1]]]),
    ],
)
def test_ranks_get_as_many_parts_of_like_length(num_ranks: int, expected: list[list[list[int]]]) -> None:
    """Lengths 9, 5, 12, 3, 7: longest first these are rows 2, 0, 4, 1, 3."""
    batch = make_batch([9, 5, 12, 3, 7])
    for rank in range(num_ranks):
        layout = RankLayout(rank, num_ranks, init_method="file:///nowhere")
        parts = list(micro_batches(batch, torch.arange(5), 2, layout))
        assert [rows.tolist() for rows, _ in parts] == expected[rank]
        for rows, part in parts:
            if len(rows) == 0:
                assert part["token_ids"].shape == (1, 2)
                assert part["token_mask"].sum() == 0


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(0, 90), st.integers(1, 4), st.sampled_from([1, 8]))
def test_padded_micro_batches_stay_within_their_tokens(
    lengths: list[int], slack: int, num_ranks: int, multiple: int
) -> None:
    tokens = max(lengths, default=1) + slack
    ranks = PaddedTokens(tokens, "key", multiple).parts(lengths, num_ranks)
    assert sorted(i for parts in ranks for part in parts for i in part) == list(range(len(lengths)))
    assert len({len(parts) for parts in ranks}) == 1
    for part in (part for parts in ranks for part in parts if part):
        padded = -(-max(lengths[i] for i in part) // multiple) * multiple
        assert len(part) * padded <= tokens or len(part) == 1


def test_padded_micro_batches_by_hand() -> None:
    batch = make_batch([3, 9, 4, 8, 5])
    parts = list(micro_batches(batch, torch.arange(5), PaddedTokens(18, "key")))
    assert [rows.tolist() for rows, _ in parts] == [[1, 3], [4, 2, 0]]
    assert [part["token_ids"].shape for _, part in parts] == [(2, 9), (3, 5)]
    parts = list(micro_batches(batch, torch.arange(5), PaddedTokens(18, "key", 4)))
    assert [rows.tolist() for rows, _ in parts] == [[1], [3, 4], [2, 0]]
    assert [part["token_ids"].shape for _, part in parts] == [(1, 9), (2, 8), (2, 4)]  # no column is added


@pytest.mark.parametrize("batching", [PackedTokens(8, "the.key", "concatenative"), PaddedTokens(8, "the.key")])
def test_sample_that_no_micro_batch_holds_is_an_error(batching: PackedTokens | PaddedTokens) -> None:
    with pytest.raises(ConfigError, match=r"the\.key = 8: a sample has 9 tokens"):
        batching.parts([3, 9], 1)


def test_configuration_says_how_micro_batches_are_made() -> None:
    def policy(**config: object) -> PolicyConfig:
        base = {"model_name": "m", "train_micro_batch_size": 2, "max_total_sequence_length": 100}
        return PolicyConfig.model_validate({**base, **config})

    assert training_micro_batching(policy()) == SampleCount(2)
    assert scoring_micro_batching(policy(logprob_batch_size=3)) == SampleCount(3)
    packed = policy(sequence_packing={"enabled": True, "logprob_mb_tokens": 500, "algorithm": "concatenative"})
    assert training_micro_batching(packed) == PackedTokens(
        200, "policy.sequence_packing.train_mb_tokens", "concatenative"
    )
    assert scoring_micro_batching(packed) == PackedTokens(
        500, "policy.sequence_packing.logprob_mb_tokens", "concatenative"
    )
    padded = policy(dynamic_batching={"enabled": True, "train_mb_tokens": 300, "sequence_length_round": 8})
    assert training_micro_batching(padded) == PaddedTokens(300, "policy.dynamic_batching.train_mb_tokens", 8)
    teacher = TeacherConfig.model_validate(
        {
            "model_name": "m",
            "sequence_packing": {"enabled": True, "logprob_mb_tokens": 70, "algorithm": "concatenative"},
        }
    )
    key = "teachers.math.sequence_packing.logprob_mb_tokens"
    assert teacher_micro_batching(teacher, "teachers.math") == PackedTokens(70, key, "concatenative")
    assert teacher_micro_batching(TeacherConfig(model_name="m", logprob_batch_size=3), "teacher") == SampleCount(3)


@given(
    lengths=st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=9),
    num_ranks=st.integers(1, 3),
    batching=st.sampled_from(
        [
            SampleCount(2),
            PackedTokens(20, "k", "modified_first_fit_decreasing"),
            PackedTokens(18, "k", "concatenative"),
            PaddedTokens(24, "k", 4),
        ]
    ),
)
def test_pairs_are_never_separated(
    lengths: list[tuple[int, int]], num_ranks: int, batching: SampleCount | PackedTokens | PaddedTokens
) -> None:
    batch = make_batch([length for pair in lengths for length in pair])
    rows = torch.arange(len(batch))
    batch.update({"group_id": rows // 2, "preference": 1.0 - 2 * (rows % 2)})
    seen: list[int] = []
    for rank in range(num_ranks):
        layout = RankLayout(
            rank=rank, data_parallel_size=num_ranks, init_method="tcp://127.0.0.1:1" if num_ranks > 1 else None
        )
        for own, part in micro_batches(batch, rows, batching, layout):
            groups = [index // 2 for index in own.tolist()]
            assert all(groups.count(group) == 2 for group in groups)
            seen += own.tolist()
            if isinstance(batching, PackedTokens):
                assert int(part["lengths"].sum() if len(own) else 0) <= batching.tokens
            elif isinstance(batching, PaddedTokens):
                assert len(own) * part["token_ids"].shape[1] <= batching.tokens
            else:
                assert len(own) <= 4
    assert sorted(seen) == rows.tolist()


def test_ranks_of_a_context_share_the_long_samples_and_have_packs_of_the_others_of_their_own() -> None:
    """Of 8 tokens to a rank: 15 and 9 are shared by two ranks, and each of two contexts has one of them."""
    batch, batching = make_batch([3, 15, 8, 5, 9, 2, 6]), PackedTokens(8, "k", "modified_first_fit_decreasing")
    sizes: dict[str, Any] = {"context_parallel_size": 2, "divides_only_long": True, "init_method": "file:///nowhere"}
    shared: list[list[int]] = []
    own: list[list[int]] = []
    for rank in range(4):
        layout = RankLayout(rank, 2, **sizes)
        (long, together, ranks), (others, alone, apart) = divide_rows(batch, torch.arange(7), batching, layout)
        assert ranks is layout
        assert (together, alone) == (replace(batching, tokens=16), batching)
        assert (apart.data_parallel_size, apart.context_parallel_size, apart.is_dp_leader) == (4, 1, True)
        shared += [rows.tolist() for rows, _ in micro_batches(batch, long, together, ranks)]
        own += [rows.tolist() for rows, _ in micro_batches(batch, others, alone, apart)]
    assert shared == [[1], [1], [4], [4]]
    assert sorted(row for rows in own for row in rows) == [0, 2, 3, 5, 6]
    assert all(sum(int(batch["lengths"][row]) for row in rows) <= 8 for rows in own)


def test_a_pair_is_long_if_its_two_answers_together_are() -> None:
    batch = make_batch([5, 2, 3, 4])
    batch.update({"group_id": torch.tensor([7, 4, 7, 4]), "preference": torch.tensor([1.0, -1.0, -1.0, 1.0])})
    layout = RankLayout(context_parallel_size=2, divides_only_long=True, init_method="file:///n")
    batching = PackedTokens(7, "k", "modified_first_fit_decreasing")
    divided = divide_rows(batch, torch.arange(4), batching, layout)
    assert [rows.tolist() for rows, _, _ in divided] == [[0, 2], [1, 3]]
    assert [kind for _, kind, _ in divided] == [replace(batching, tokens=14), batching]
    assert divide_rows(batch, torch.tensor([1, 3]), batching, layout)[0][2].context_parallel_size == 1


@pytest.mark.parametrize(("limit", "longest", "ranks"), [(100, 100, 1), (99, 100, 2), (25, 100, 4), (24, 100, 8)])
def test_as_many_ranks_share_a_long_sample_as_hold_the_longest(limit: int, longest: int, ranks: int) -> None:
    packing = {"enabled": True, "train_mb_tokens": limit, "logprob_mb_tokens": 200}
    base = {"model_name": "m", "max_total_sequence_length": longest, "sequence_packing": packing}
    policy = PolicyConfig.model_validate({**base, "dtensor_cfg": {"context_parallel_size": "auto"}})
    assert (policy.context_parallel_size, policy.model_parallel_size) == (ranks, ranks)
    assert policy.model_copy().context_parallel_size == ranks
    assert pickle.loads(pickle.dumps(policy)).context_parallel_size == ranks
    assert policy.model_dump()["dtensor_cfg"]["context_parallel_size"] == "auto"
