"""A policy that sees, over ranks of which some have no image in a micro-batch: as on one rank."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.types import Message, TextPart, placed_images
from tests.contracts.layouts import Layouts, assert_near, assert_same_metrics
from tests.contracts.policies import SGD, clones
from tests.contracts.rank_pool import RankPool
from tests.fakes.vision import picture, save_vision_model
from tests.support.quick import quick
from tests.unit.policy.tiny import WeightedNLL, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")
RANK_CASES = [(kind, packed) for kind in ("idefics3", "qwen2_5_vl", "qwen3_vl") for packed in (False, True)]


def picture_batch(path: Path) -> TensorDict:
    """Return five samples, of which two have images."""
    images = ImageEncoder.load(str(path))
    encoder = ChatEncoder(images._processor.tokenizer, images=images)
    messages = [
        Message("user", (picture(1), TextPart("a"), picture(2))),
        *(Message("user", text) for text in ("no image", "none", "nor here")),
        Message("user", (picture(3, 84, 56), TextPart("?"))),
    ]
    logs = [encoder.encode_prompt((message,)) for message in messages]
    batch = make_batch([len(flat_token_ids(log)) for log in logs])
    for index, log in enumerate(logs):
        batch["token_ids"][index, : batch["lengths"][index]] = torch.tensor(flat_token_ids(log))
    keys.add_images(batch, [placed_images(log) for log in logs])
    return batch


@pytest.mark.parametrize("kind", quick(["idefics3", "smolvlm", "qwen2_5_vl"], ["idefics3", "qwen2_5_vl"]))
def test_a_checkpoint_is_a_model_that_sees(kind: str, pool: RankPool, tmp_path: Path) -> None:
    save_vision_model(kind, tmp_path / "model")
    calls = [("save", tmp_path / "saved", {"save_optimizer": False}), ("finish_save",)]
    Layouts(pool, {kind: tmp_path / "model"})("plain", kind, *calls)
    first, again = (ImageEncoder.load(str(tmp_path / path)) for path in ("model", "saved/weights"))
    assert first.encode(picture(1)).text == again.encode(picture(1)).text
    arrays = (encoder.encode(picture(1)).features.arrays for encoder in (first, again))
    for own, read in zip(*(each.items() for each in arrays), strict=True):
        assert own[0] == read[0]
        assert (own[1] == read[1]).all()


@pytest.mark.parametrize(("kind", "packed"), quick(RANK_CASES, [case for case in RANK_CASES if case[0] != "qwen3_vl"]))
def test_two_ranks_are_as_one(kind: str, packed: bool, pool: RankPool, tmp_path: Path) -> None:
    save_vision_model(kind, tmp_path)
    batch, run = picture_batch(tmp_path), Layouts(pool, {kind: tmp_path})
    packing = {"sequence_packing": {"enabled": True, "train_mb_tokens": 80, "logprob_mb_tokens": 80}}
    batching = packing if packed else {"train_micro_batch_size": 1}
    calls = [("logprobs", batch), ("train_step", batch, WeightedNLL()), ("run_with_weights", clones)]
    one, two = (run(layout, kind, *calls, optimizer=SGD, **batching) for layout in ("plain", "2 ranks"))
    torch.testing.assert_close(two[0], one[0], atol=1e-5, rtol=0)
    assert_same_metrics({name: two[1][name] for name in ("loss", "grad_norm")}, one[1])
    assert_near(two[2], one[2])
