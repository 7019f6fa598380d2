from typing import Any

import pytest
import torch

from nemo_rl.errors import PolicyError
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout, join

CPU = torch.device("cpu")


def test_ranks_of_a_row_follow_each_other() -> None:
    layouts = [RankLayout(rank, 2, 3, init_method="file:///nowhere") for rank in range(6)]
    assert [layout.data_parallel_rank for layout in layouts] == [0, 0, 0, 1, 1, 1]
    assert [layout.is_dp_leader for layout in layouts] == [True, False, False, True, False, False]
    assert {layout.world_size for layout in layouts} == {6}


def test_stages_follow_each_other_and_the_last_one_speaks() -> None:
    layouts = [RankLayout(rank, 2, 2, 2, init_method="file:///nowhere") for rank in range(8)]
    assert [layout.data_parallel_rank for layout in layouts] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.rank for layout in layouts if layout.is_dp_leader] == [4, 6]
    assert {layout.world_size for layout in layouts} == {8}


def test_ranks_of_a_context_are_one_data_parallel_rank_and_several_shards() -> None:
    layouts = [RankLayout(rank, 2, 2, context_parallel_size=2, init_method="file:///nowhere") for rank in range(8)]
    assert [layout.data_parallel_rank for layout in layouts] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.context_parallel_rank for layout in layouts] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.rank for layout in layouts if layout.is_dp_leader] == [0, 4]
    assert {(layout.world_size, layout.num_shards) for layout in layouts} == {(8, 4)}


def test_ranks_that_share_long_samples_alone_each_return_rows_of_their_own() -> None:
    sizes: dict[str, Any] = {"context_parallel_size": 2, "divides_only_long": True, "init_method": "file:///nowhere"}
    layouts = [RankLayout(rank, 2, 2, **sizes) for rank in range(8)]
    assert [layout.rank for layout in layouts if layout.returns_rows] == [0, 2, 4, 6]
    assert [layout.undivided.data_parallel_rank for layout in layouts] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_rank_outside_its_layout_or_without_a_way_to_the_others_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        RankLayout(2, 2, init_method="file:///nowhere")
    with pytest.raises(ValueError, match="init_method"):
        RankLayout(0, 2)


def test_rank_alone_exchanges_nothing() -> None:
    assert SINGLE_RANK.all_gather_data_parallel("value") == ["value"]
    assert SINGLE_RANK.all_reduce_sum(torch.ones(2)).tolist() == [1, 1]


def test_process_is_in_one_group_only() -> None:
    join(SINGLE_RANK, CPU)
    join(SINGLE_RANK, CPU)
    with pytest.raises(PolicyError, match="rank 1 of 2: the process is rank 0 of 1"):
        join(RankLayout(1, 2, init_method="file:///nowhere"), CPU)
