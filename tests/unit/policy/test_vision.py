"""Log-probs and gradients of models that see, against transformers' own forward pass over each sample alone."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.algorithms.teacher_stages import LogprobsStage, TeacherHandle, Teachers, TopKStage
from nemo_rl.config.policy import TeacherConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.distributed.vision_towers import ImageEmbedder
from nemo_rl.experience.assembly import BatchRow
from nemo_rl.image_features import PlacedImage
from nemo_rl.policy.batch_transfer import merge_rows
from nemo_rl.policy.driver import LocalTeacher
from nemo_rl.policy.hf_model import decoder_layers, freeze_vision, load_model, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import images_of, micro_batches
from nemo_rl.policy.ranks import SINGLE_RANK
from nemo_rl.types import Message, Prompt, TextPart, placed_images
from tests.contracts.policies import make_policy
from tests.fakes.vision import KINDS, picture, save_vision_model
from tests.support.quick import quick
from tests.unit.policy.tiny import WeightedNLL

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=quick(KINDS, [kind for kind in KINDS if kind != "smolvlm"]))
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Vision":
    path = tmp_path_factory.mktemp(request.param)
    model, _ = save_vision_model(request.param, path)
    return Vision(path, model)


class Vision:
    """A tiny model, five samples with 2, 1, 0, 1 and 2 images, and what transformers makes of each alone."""

    def __init__(self, path: Path, model: Any) -> None:
        self.path, self.model = path, model
        self.encoder = ChatEncoder(
            (images := ImageEncoder.load(str(path)))._processor.tokenizer,
            images=images,
        )
        self.token_id = images.token_id
        question = (
            Message("user", (picture(1, 84, 56), TextPart("and"), picture(2), TextPart("are?"))),
            Message("user", (TextPart("what is "), picture(3))),
            Message("user", "no image"),
            Message("user", (picture(2), TextPart("?"))),
            Message("user", (picture(4), picture(4), TextPart("!"))),
        )
        logs = [self.encoder.encode_prompt((message,)) for message in question]
        # a sampled placeholder token is a token like any other
        answers = [(70, 80, 90), (71,), (72, 82, 92, 93), (73, self.token_id, 99), (74, 75)]
        self.images = [placed_images(log) for log in logs]
        self.rows = [flat_token_ids(log) + answer for log, answer in zip(logs, answers, strict=True)]
        self.num_sampled = [len(answer) for answer in answers]

    def batch(self, *, with_images: bool = True) -> TensorDict:
        width = max(map(len, self.rows))
        ids, mask = torch.zeros(len(self.rows), width, dtype=torch.int64), torch.zeros(len(self.rows), width)
        for index, (row, sampled) in enumerate(zip(self.rows, self.num_sampled, strict=True)):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, len(row) - sampled : len(row)] = 1
        batch = TensorDict(
            {keys.TOKEN_IDS: ids, keys.TOKEN_MASK: mask, keys.LENGTHS: torch.tensor([len(row) for row in self.rows])},
            batch_size=[len(self.rows)],
        )
        if with_images:
            keys.add_images(batch, self.images)
        return batch

    def alone(self, model: Any, index: int) -> torch.Tensor:
        """Return transformers' log-probs of the sampled tokens of one sample, by its own forward pass."""
        sampled = torch.tensor(self.rows[index][-self.num_sampled[index] :])
        return self.distributions(model, index).gather(1, sampled[:, None])[:, 0]

    def distributions(self, model: Any, index: int) -> torch.Tensor:
        """Return transformers' log-probs of all tokens in place of each sampled one of one sample: [N, V]."""
        row, images = self.rows[index], self.images[index]
        ids = torch.tensor([row])
        is_image = [position for placed in images for position in placed.positions]
        inputs: dict[str, Any] = {"input_ids": ids}
        if images:
            inputs |= _pixels(images)
            types = torch.zeros_like(ids, dtype=torch.int32)
            types[0, is_image] = 1
            inputs |= {"mm_token_type_ids": types} if "image_grid_thw" in inputs else {}
        extra = [p for p, token in enumerate(row) if token == self.token_id and p not in is_image]
        if extra:  # transformers would look for an image there
            logits = _logits_with_plain_tokens(model, inputs, extra)[0]
        else:
            logits = model(**inputs, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)[:-1][-self.num_sampled[index] :]


def _pixels(images: Sequence[PlacedImage]) -> dict[str, torch.Tensor]:
    arrays = [placed.features.arrays for placed in images]
    joined = {name: torch.cat([torch.from_numpy(each[name]) for each in arrays]) for name in arrays[0]}
    return joined if "image_grid_thw" in joined else {name: value.unsqueeze(0) for name, value in joined.items()}


def _logits_with_plain_tokens(model: Any, inputs: dict[str, Any], positions: Sequence[int]) -> torch.Tensor:
    """Return the logits of the decoder given embeddings in which only tokens of images are replaced, by hand."""
    ids, base = inputs["input_ids"], model.base_model
    is_image = torch.tensor([[t == model.config.image_token_id for t in ids[0].tolist()]])
    is_image[0, list(positions)] = False
    embeddings = model.get_input_embeddings()(ids)
    pixels = {name: inputs[name] for name in inputs if name.startswith(("pixel", "image"))}
    output = base.get_image_features(**pixels)
    found = output.pooler_output
    features = torch.cat(list(found)) if isinstance(found, tuple | list) else found.flatten(0, 1)
    embeddings = embeddings.masked_scatter(is_image.unsqueeze(-1), features)
    rest: dict[str, Any] = {"inputs_embeds": embeddings}
    if "mm_token_type_ids" in inputs:
        grid = {"image_grid_thw": inputs["image_grid_thw"]}
        rest["position_ids"] = base.get_rope_index(ids, mm_token_type_ids=inputs["mm_token_type_ids"], **grid)[0]
    if model.config.model_type == "qwen3_vl":
        rest["visual_pos_masks"] = is_image
        rest["deepstack_visual_embeds"] = [torch.cat(parts) for parts in output.deepstack_features]
    return model.lm_head(model.get_decoder()(**rest, use_cache=False).last_hidden_state)


def score(module: CausalLogprobs, part: TensorDict) -> torch.Tensor:
    tokens = part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0
    return module(*tokens, lengths=part[keys.LENGTHS].tolist(), images=images_of(part)).logprobs


def make_module(vision: Vision, *, is_packed: bool) -> CausalLogprobs:
    model = load_model(str(vision.path), {})
    key = "policy.sequence_packing.enabled" if is_packed else None
    return CausalLogprobs(model, temperature=1.0, chunk_size=4, packing_key=key)


@pytest.mark.parametrize("is_packed", [False, True])
def test_logprobs_and_gradients_are_those_of_transformers(vision: Vision, is_packed: bool) -> None:
    module = make_module(vision, is_packed=is_packed)
    batch, weights = vision.batch(), torch.linspace(0.5, 1.5, 256)
    logprobs = torch.zeros(batch[keys.TOKEN_IDS].shape)
    recompute_activations(decoder_layers(module))
    for rows, part in micro_batches(batch, torch.arange(len(batch)), 2):  # accumulation: parts of 2, 2 and 1 samples
        scores = score(module, part)
        logprobs[rows, : scores.shape[1]] = scores.detach()
        (scores * weights[: scores.shape[1]]).sum().backward()

    truth = load_model(str(vision.path), {}).eval()
    for index, (row, sampled) in enumerate(zip(vision.rows, vision.num_sampled, strict=True)):
        alone = vision.alone(truth, index)
        where = slice(len(row) - sampled, len(row))
        torch.testing.assert_close(logprobs[index, where], alone.detach(), atol=TOLERANCE, rtol=0)
        (alone * weights[where]).sum().backward()
    own = dict(module.model.named_parameters())
    assert any("vis" in name and float(p.grad.abs().max()) > 1e-3 for name, p in own.items() if p.grad is not None)
    for name, expected in truth.named_parameters():
        gradient = own[name].grad
        if expected.grad is None:
            assert gradient is None or not gradient.any(), name
            continue
        assert gradient is not None, name
        scale = max(1.0, float(expected.grad.abs().max()))
        torch.testing.assert_close(gradient / scale, expected.grad / scale, atol=TOLERANCE, rtol=0, msg=name)


def test_in_bfloat16_scores_are_nearly_those_of_float32(vision: Vision) -> None:
    batch = vision.batch()
    batch["advantages"], batch["sample_mask"] = torch.ones(batch["token_mask"].shape), torch.ones(len(vision.rows))
    batch["group_id"] = batch["trajectory_id"] = torch.arange(len(vision.rows))
    policy = make_policy(SINGLE_RANK, vision.path, num_samples=len(vision.rows), precision="bfloat16")
    logprobs = merge_rows([policy.logprobs(batch)], batch)[0]
    metrics = policy.train_step(batch, WeightedNLL())
    policy.close()
    for index, (row, sampled) in enumerate(zip(vision.rows, vision.num_sampled, strict=True)):
        with torch.no_grad():
            expected = vision.alone(vision.model, index)
        found = logprobs[index, len(row) - sampled : len(row)]
        torch.testing.assert_close(found, expected, atol=0.3, rtol=0)  # of log-probs near -10
    assert metrics["grad_norm"] > 0


def test_a_teacher_that_sees_has_the_scores_of_transformers(vision: Vision) -> None:
    """Given the features of the policy's images, over rows with and without images."""
    section = TeacherConfig(model_name=str(vision.path), precision="float32", device="cpu")
    teacher = LocalTeacher(section, section="teacher", model_path=str(vision.path), temperature=1.0)
    teachers = Teachers({"teacher": TeacherHandle(teacher, False, sees=True)}, {"math": "teacher"})
    rows, batch, k = [BatchRow(Prompt("p", "math", ()), (), ("g", 0), 0)] * len(vision.rows), vision.batch(), 4

    async def score_both() -> None:
        await LogprobsStage(teachers)(batch, rows)
        await TopKStage(teachers, k=k, vocab_size=10_000)(batch, rows)
        await teacher.close()

    asyncio.run(score_both())
    for index, (row, sampled) in enumerate(zip(vision.rows, vision.num_sampled, strict=True)):
        where = slice(len(row) - sampled, len(row))
        with torch.no_grad():
            expected = vision.distributions(vision.model, index)
        tokens = torch.tensor(row[where])[:, None]
        own = batch[keys.TEACHER_LOGPROBS][index, where]
        torch.testing.assert_close(own, expected.gather(1, tokens)[:, 0], atol=TOLERANCE, rtol=0)
        likeliest = expected.topk(k)
        assert batch[keys.TEACHER_TOPK_IDS][index, where].tolist() == likeliest.indices.tolist()
        found = batch[keys.TEACHER_TOPK_LOGPROBS][index, where]
        torch.testing.assert_close(found, likeliest.values, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_an_image_of_several_samples_is_towered_once_per_micro_batch(vision: Vision) -> None:
    module = make_module(vision, is_packed=False)
    assert isinstance(module.images, ImageEmbedder)
    score(module, vision.batch())
    assert module.images.num_towered == 4  # of six in the samples


@torch.no_grad()
def test_logprobs_depend_on_the_picture(vision: Vision) -> None:
    module = make_module(vision, is_packed=True)
    seen, blind = (score(module, vision.batch(with_images=images)) for images in (True, False))
    changed = (seen - blind).abs().amax(dim=1)
    assert changed[2] == 0  # without an image
    assert all(difference > 1e-2 for index, difference in enumerate(changed) if index != 2)


def test_a_frozen_tower_has_no_gradient_and_its_projector_has_one(vision: Vision) -> None:
    module = make_module(vision, is_packed=False)
    freeze_vision(module.model)
    score(module, vision.batch()).sum().backward()
    trained = {name for name, parameter in module.model.named_parameters() if parameter.grad is not None}
    projector = "merger" if "qwen" in vision.model.config.model_type else "connector"
    projectors = {name for name, _ in module.model.named_parameters() if projector in name}
    assert projectors
    assert projectors <= trained
    assert not any(("vision_model" in name or "visual" in name) and "merger" not in name for name in trained)


@torch.no_grad()
def test_ranks_without_an_image_call_the_tower_too(vision: Vision) -> None:
    module = make_module(vision, is_packed=False)
    batch = vision.batch(with_images=False)
    plain = score(module, batch)
    assert module.images is not None
    module.images.always_runs = True
    torch.testing.assert_close(score(module, batch), plain, atol=TOLERANCE, rtol=0)
