"""Supervised samples with images: loss and gradients are those of transformers over whole conversations."""

import base64
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_rl import batch as keys
from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.images import ImagesConfig
from nemo_rl.config.supervised_runs import DPOConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.conversations import encode_conversations, read_conversations
from nemo_rl.data.example_sets import ExampleSet
from nemo_rl.data.preferences import encode_preferences, read_preferences
from nemo_rl.data.supervised_samples import (
    SampleImage,
    SampleLoader,
    SupervisedSample,
    make_pair_batch,
    make_supervised_batch,
)
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.errors import DataError
from nemo_rl.loss_types import TokenScores
from nemo_rl.losses.likelihood import NegativeLogLikelihood
from nemo_rl.losses.preference import PreferenceLoss
from nemo_rl.policy.hf_model import load_model
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import count_valid, micro_batches, trim
from nemo_rl.types import ImagePart
from tests.fakes.vision import QWEN_MARK, picture, save_vision_model
from tests.unit.policy.test_vision import score

TOLERANCE = 1e-5
SCREENS = (picture(1, 84, 56), picture(2), picture(3))
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}


def shown(image: ImagePart) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image.file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def row(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


ROWS = [
    row(
        ("user", [shown(SCREENS[0]), {"type": "text", "text": "and"}, shown(SCREENS[1])]),
        ("assistant", "two"),
        ("user", [{"type": "text", "text": "now "}, shown(SCREENS[0])]),
        ("assistant", "one"),
    ),
    row(("user", "no image"), ("assistant", "none")),
    row(("user", [shown(SCREENS[2])]), ("assistant", "yes")),
]
TEXTS = [  # as the chat template renders them
    "user:IMAGEandIMAGE<|end|>assistant:two<|end|>user:now IMAGE<|end|>assistant:one<|end|>",
    "user:no image<|end|>assistant:none<|end|>",
    "user:IMAGE<|end|>assistant:yes<|end|>",
]
PICTURES = [(SCREENS[0], SCREENS[1], SCREENS[0]), (), (SCREENS[2],)]
SECTION = DatasetConfig(dataset_name="jsonl", images=ImagesConfig())


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl"])
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return path, save_vision_model(request.param, path)[1]


def samples_of(path: Path, rows: list[Any], **options: Any) -> tuple[list[Any], ImageEncoder]:
    images = ImageEncoder.load(str(path))
    encoder = ChatEncoder(images._processor.tokenizer, images=images)
    loaded = ExampleSet("train", read_conversations(rows, SECTION, key="data.train"))
    dataset = encode_conversations(encoder, loaded, **{"max_tokens": 512, "overlong": "refuse", **options})
    return list(dataset.samples), images


def inputs_of(processor: Any, index: int) -> Mapping[str, torch.Tensor]:
    """Return what the processor of transformers makes of a whole conversation."""
    mark = "<image>" if processor.image_token == "<image>" else QWEN_MARK
    pictures = [Image.open(io.BytesIO(each.file)).convert("RGB") for each in PICTURES[index]]
    given = pictures or None
    return processor(text=[TEXTS[index].replace("IMAGE", mark)], images=given, return_tensors="pt")


@pytest.mark.parametrize("is_packed", [False, True])
def test_loss_and_gradients_are_those_of_transformers(vision: tuple[Path, Any], is_packed: bool) -> None:
    path, processor = vision
    samples, images = samples_of(path, ROWS)
    batch = make_supervised_batch(samples, images)
    packing_key = "policy.sequence_packing.enabled" if is_packed else None
    module = CausalLogprobs(load_model(str(path), {}), temperature=1.0, chunk_size=4, packing_key=packing_key)
    normalizer, total = count_valid(batch, torch.arange(len(batch))), 0.0
    for _, part in micro_batches(batch, torch.arange(len(batch)), 2):
        loss, _ = NegativeLogLikelihood()(TokenScores(score(module, part)), part, normalizer)
        loss.backward()
        total += float(loss.detach())

    truth, losses = load_model(str(path), {}).eval(), []
    for index, sample in enumerate(samples):
        inputs = inputs_of(processor, index)
        assert inputs["input_ids"][0].tolist() == sample.token_ids.tolist()
        logits = truth(**inputs, use_cache=False).logits[0, :-1].float()
        wanted = torch.from_numpy(sample.token_mask)[1:]
        losses.append(
            torch.nn.functional.cross_entropy(logits[wanted], inputs["input_ids"][0, 1:][wanted], reduction="sum")
        )
    num_trained = sum(int(sample.token_mask.sum()) for sample in samples)
    assert num_trained == len("twoonenoneyes") + 4  # and the end of each answer
    expected = torch.stack(losses).sum() / num_trained
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    own = dict(module.model.named_parameters())
    for name, parameter in truth.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(own[name].grad, parameter.grad, atol=TOLERANCE, rtol=0, msg=name)


BETA = 0.3
PAIRS = [  # prompt, its text as rendered, its pictures, chosen, rejected
    ([shown(SCREENS[0]), {"type": "text", "text": "and"}, shown(SCREENS[1])], "IMAGEandIMAGE", SCREENS[:2], "two", "a"),
    ("no image", "no image", (), "none", "some"),
    ([{"type": "text", "text": "is "}, shown(SCREENS[2])], "is IMAGE", SCREENS[2:], "yes", "never"),
]


def pair_inputs(processor: Any, text: str, pictures: Any, answer: str) -> tuple[Mapping[str, torch.Tensor], int]:
    """Return what the processor of transformers makes of one side of a pair, and the number of the answer's tokens."""
    mark = "<image>" if processor.image_token == "<image>" else QWEN_MARK
    opened = [Image.open(io.BytesIO(each.file)).convert("RGB") for each in pictures] or None
    whole = f"user:{text}<|end|>assistant:{answer}<|end|>".replace("IMAGE", mark)
    return processor(text=[whole], images=opened, return_tensors="pt"), len(answer) + 1


def answer_logprob(model: Any, inputs: Mapping[str, torch.Tensor], num_answer: int) -> torch.Tensor:
    logits = model(**inputs, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[-num_answer:].sum()


@pytest.mark.parametrize("is_packed", [False, True])
def test_preferences_over_pictures_have_the_loss_and_gradients_of_transformers(
    vision: tuple[Path, Any], is_packed: bool
) -> None:
    """DPO against a reference with other weights; both sides of a pair share the features of its pictures."""
    path, processor = vision
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "chosen": chosen, "rejected": rejected}
        for prompt, _, _, chosen, rejected in PAIRS
    ]
    images = ImageEncoder.load(str(path))
    encoder = ChatEncoder(images._processor.tokenizer, images=images)
    pairs = ExampleSet("train", read_preferences(rows, SECTION, key="data.train"))
    batch = make_pair_batch(encode_preferences(encoder, pairs, max_tokens=512).samples, images)
    assert [each.digest for each in batch[keys.IMAGES].images] == [each.digest for each in SCREENS]
    packing_key = "policy.sequence_packing.enabled" if is_packed else None
    own, reference = (
        CausalLogprobs(load_model(str(path), {}), temperature=1.0, chunk_size=4, packing_key=packing_key)
        for _ in range(2)
    )
    truth = load_model(str(path), {}).eval()
    with torch.no_grad():
        for module in (own.model, truth):
            module.get_submodule("lm_head").get_parameter("weight").mul_(1.1)
        batch[keys.REFERENCE_LOGPROBS] = score(reference, batch)
    normalizer, total, loss_fn = (
        count_valid(batch, torch.arange(len(batch))),
        0.0,
        PreferenceLoss(DPOConfig(reference_policy_kl_penalty=BETA)),
    )
    for start in range(0, len(batch), 2):  # a pair is never cut
        part = trim(batch[start : start + 2])
        loss, _ = loss_fn(TokenScores(score(own, part)), part, normalizer)
        loss.backward()
        total += float(loss.detach())

    frozen, margins = load_model(str(path), {}).eval(), []
    for _, text, pictures, *answers in PAIRS:
        sides = [pair_inputs(processor, text, pictures, answer) for answer in answers]
        with torch.no_grad():
            before = [answer_logprob(frozen, *side) for side in sides]
        rewards = [answer_logprob(truth, *side) - old for side, old in zip(sides, before, strict=True)]
        margins.append(rewards[0] - rewards[1])
    expected = -torch.nn.functional.logsigmoid(BETA * torch.stack(margins)).mean()
    expected.backward()
    assert abs(float(expected.detach()) - math.log(2)) > 1e-2
    assert total == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    found = dict(own.model.named_parameters())
    for name, parameter in truth.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name].grad, parameter.grad, atol=TOLERANCE, rtol=0, msg=name)


def test_images_in_results_of_tools_are_placed(vision: tuple[Path, Any]) -> None:
    talk = row(("user", "look"), ("assistant", None), ("tool", [shown(SCREENS[1])]), ("assistant", "closed"))
    talk["messages"][1]["tool_calls"] = [CALL]
    talk["messages"][2]["tool_call_id"] = "c"
    (sample,), images = samples_of(vision[0], [talk])
    (image,) = sample.images
    assert image.image == SCREENS[1]
    assert {int(sample.token_ids[at]) for at in image.positions} == {images.token_id}
    assert not sample.token_mask[list(image.positions)].any()


def test_an_image_is_never_cut(vision: tuple[Path, Any]) -> None:
    (sample, *_), images = samples_of(vision[0], ROWS)
    last = sample.images[2].positions
    short = sample.truncate(last[-1])
    assert len(short.token_ids) == last[0]
    assert short.images == sample.images[:2]
    edged = sample.with_edges(7, None)
    assert edged.images[0].positions == tuple(at + 1 for at in sample.images[0].positions)
    assert keys.IMAGES not in make_supervised_batch([sample.masked()], images)
    kept = make_supervised_batch([sample.with_last_answer(), sample.with_openings(2)], images)[keys.IMAGES]
    assert [each.digest for each in kept.images] == [SCREENS[0].digest, SCREENS[1].digest]


def test_another_picture_is_another_training_set() -> None:
    def loader(image: ImagePart) -> SampleLoader:
        sample = SupervisedSample(np.array([1, 2], np.int32), np.array([False, True]), (SampleImage(image, (0,)),))
        return SampleLoader([sample], shuffle=False, seed=0, max_epochs=1)

    loader(SCREENS[0]).load_state_dict(loader(SCREENS[0]).state_dict())
    with pytest.raises(DataError, match="other training conversations"):
        loader(SCREENS[0]).load_state_dict(loader(SCREENS[1]).state_dict())


def test_images_are_encoded_for_the_batches_that_have_them(
    vision: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set keeps files and positions: features are as large as the pictures, and there are many."""
    monkeypatch.setattr("nemo_rl.data.vision.KEPT_BYTES", 1)
    samples, images = samples_of(vision[0], ROWS)
    before = images.num_encoded
    make_supervised_batch(samples[2:], images)
    assert images.num_encoded - before <= 1
    assert len(images._alive) == 1
