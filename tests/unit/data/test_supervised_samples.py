"""Supervised samples, batches of them, and their order in training."""

import numpy as np
import pytest
import torch

from nemo_rl.data.supervised_samples import SampleLoader, SupervisedSample, make_supervised_batch
from nemo_rl.errors import DataError


def sample_of(*token_ids: int) -> SupervisedSample:
    return SupervisedSample(np.array(token_ids, dtype=np.int32), np.array([i > 1 for i in range(len(token_ids))]))


def test_batch_is_padded_and_every_sample_counts_alone() -> None:
    batch = make_supervised_batch([sample_of(5, 6, 7), sample_of(8, 9, 10, 11)])
    assert batch["token_ids"].tolist() == [[5, 6, 7, 0], [8, 9, 10, 11]]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert batch["lengths"].tolist() == [3, 4]
    assert batch["group_id"].tolist() == batch["trajectory_id"].tolist() == [0, 1]
    assert torch.equal(batch["sample_mask"], torch.ones(2))


def firsts(samples) -> list[int]:
    return [int(sample.token_ids[0]) for sample in samples]


def loader(seed: int = 1, *, num_samples: int = 5) -> SampleLoader:
    return SampleLoader([sample_of(i, 0, 0) for i in range(num_samples)], shuffle=True, seed=seed, max_epochs=3)


def test_each_sample_comes_once_an_epoch_and_a_resumed_loader_goes_on_with_the_next() -> None:
    whole, stopped = loader(), loader()
    order = firsts(whole.take(100))
    assert [sorted(order[start : start + 5]) for start in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert whole.data_exhausted
    assert whole.take(1) == []
    assert firsts(stopped.take(4)) == order[:4]
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert firsts(resumed.take(4)) + firsts(resumed.take(100)) == order[4:]
    assert resumed.state_dict() == {"consumed_prompts": 15, "epoch": 3, "data": stopped.state_dict()["data"]}


@pytest.mark.parametrize("other", [loader(2), loader(num_samples=6)], ids=["seed", "samples"])
def test_a_checkpoint_of_other_data_is_refused(other: SampleLoader) -> None:
    with pytest.raises(DataError, match="other training conversations"):
        other.load_state_dict(loader().state_dict())


def test_edges_are_written_where_the_template_lacks_them() -> None:
    """`data.add_bos` and `data.add_eos`: the first token is context, the last one is trained on."""
    sample = SupervisedSample(np.array([5, 6, 7], np.int32), np.array([False, True, False]))
    both = sample.with_edges(1, 2)
    assert both.token_ids.tolist() == [1, 5, 6, 7, 2]
    assert both.token_mask.tolist() == [False, False, True, False, True]
    there = sample.with_edges(5, 7)
    assert (there.token_ids.tolist(), there.token_mask.tolist()) == ([5, 6, 7], [False, True, False])
    assert sample.with_edges(None, None).token_ids.tolist() == [5, 6, 7]
