import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.errors import PolicyError
from nemo_rl.image_features import ImageFeatures, PlacedImage
from nemo_rl.policy.batch_transfer import ScoredRows, SentBatch, bytes_of_step, collect_rows, merge_rows
from nemo_rl.policy.driver import TeacherWorkerGroup
from tests.unit.policy.tiny import make_batch

LENGTHS = [3, 5, 2, 4]


def test_a_sent_batch_arrives_as_it_was_with_its_ids_in_four_bytes() -> None:
    batch = make_batch(LENGTHS)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(SentBatch(batch), protocol=5, buffer_callback=buffers.append)
    received = pickle.loads(stream, buffers=[buffer.raw() for buffer in buffers])
    assert set(received.keys()) == set(batch.keys())
    for name in set(batch.keys()) - {"reward_components"}:
        assert received[name].dtype == batch[name].dtype
        assert torch.equal(received[name], batch[name])
    assert torch.equal(received["reward_components", "r"], batch["reward_components", "r"])
    # 4 x 5 entries of token_ids, token_mask and advantages; 4 of lengths, sample_mask, two ids and a reward
    assert sum(buffer.raw().nbytes for buffer in buffers) == 4 * (3 * 20 + 5 * 4)


def test_numbers_beyond_int32_keep_their_width() -> None:
    batch = make_batch(LENGTHS)
    batch["trajectory_id"] = torch.tensor([0, 1, 2, 2**40])
    received = pickle.loads(pickle.dumps(SentBatch(batch)))
    assert received["trajectory_id"].tolist() == [0, 1, 2, 2**40]


def test_rows_of_micro_batches_of_other_lengths_are_joined() -> None:
    first = (torch.tensor([3, 0]), (torch.ones(2, 4), torch.full((2, 4, 2), 7)))
    second = (torch.tensor([2]), (torch.full((1, 2), 2.0), torch.full((1, 2, 2), 5)))
    scored = collect_rows([first, second])
    assert scored is not None
    assert scored.rows.tolist() == [3, 0, 2]
    assert scored.values[0].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [2, 2, 0, 0]]
    assert scored.values[1].dtype == np.int32
    assert scored.num_bytes == 4 * (3 + 12 + 24)


def test_rows_of_all_ranks_become_the_batch_and_others_are_refused() -> None:
    batch = make_batch(LENGTHS)
    parts = [
        ScoredRows(np.array([2, 0], np.int32), (np.array([[1, 2, 3], [4, 5, 6]], np.float32),)),
        None,
        ScoredRows(np.array([1, 3], np.int32), (np.arange(10, dtype=np.float32).reshape(2, 5),)),
    ]
    merged = merge_rows(parts, batch)[0]
    assert merged.tolist() == [[4, 5, 6, 0, 0], [0, 1, 2, 3, 4], [1, 2, 3, 0, 0], [5, 6, 7, 8, 9]]
    for wrong, problem in ((parts[:1], "scored 2 rows"), ([*parts, parts[0]], r"6 rows \(4 different ones\) of 4")):
        with pytest.raises(PolicyError, match=problem):
            merge_rows(wrong, batch)


class RecordingWorkers:
    """Answers as 2 x tp 2 ranks of which every second one only takes part; counts the bytes that come back."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    async def call_all(self, name: str, batch: Any, k: int, *, timeout_s: float) -> list[ScoredRows | None]:
        received = pickle.loads(pickle.dumps(batch))
        parts: list[ScoredRows | None] = []
        for rank in range(4):
            rows = torch.arange(rank // 2, len(received), 2)
            shape = (len(rows), received["token_ids"].shape[1], k)
            values = (torch.full(shape, rank), torch.full(shape, -float(rank)))
            parts.append(collect_rows([(rows, values)]) if rank % 2 == 0 else None)
        self.num_bytes = [0 if part is None else part.num_bytes for part in parts]
        return parts


def test_each_score_comes_back_once_in_eight_bytes() -> None:
    workers: Any = RecordingWorkers()
    batch, k = make_batch(LENGTHS), 64
    topk = asyncio.run(TeacherWorkerGroup(workers, key="teacher", call_timeout_s=60.0).topk_logprobs(batch, k))
    assert topk.ids[:, 0, 0].tolist() == [0, 2, 0, 2]
    assert topk.ids.dtype == torch.int64
    assert topk.logprobs[:, 0, 0].tolist() == [0, -2, 0, -2]
    assert workers.num_bytes == [4 * 2 + 8 * 2 * 5 * k, 0] * 2  # rows, then an id and a log-prob for each


def test_object_store_holds_a_batch_and_the_scores_it_was_made_of() -> None:
    assert bytes_of_step(512, 2048) == 2 * 512 * 2048 * 40
    assert bytes_of_step(512, 2048, topk=64) == 1_157_627_904
    assert bytes_of_step(512, 2048, set_size=20) == 2 * 512 * 2048 * 120


def test_a_batch_with_images_travels_with_each_image_once() -> None:
    features = ImageFeatures("a" * 64, {"pixel_values": np.ones((1, 3, 100, 100), np.float32)}, 2)
    batch = TensorDict({keys.TOKEN_IDS: torch.arange(20).reshape(4, 5)}, batch_size=[4])
    keys.add_images(batch, [(PlacedImage(features, (1, 2)),)] * 3 + [()])
    sent = pickle.dumps(SentBatch(batch))
    assert len(sent) < 2 * features.num_bytes  # three samples share it
    received = pickle.loads(sent)
    assert received[keys.IMAGES].images == (features,)
    assert received[torch.tensor([0, 3])][keys.IMAGE_ROWS].tolist() == [[-1, 0, 1, -1, -1], [-1] * 5]
    np.testing.assert_array_equal(received[keys.IMAGES].images[0].arrays["pixel_values"], 1)
