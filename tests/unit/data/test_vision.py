"""Conversations with images as tokens that are only ever appended to."""

from pathlib import Path

import pytest

from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import ImagePart, Message, TextPart, TokenizedMessage, ToolResult, placed_images
from tests.fakes.vision import KINDS, TEMPLATE, picture, save_vision_model

BLIND_TOOLS = TEMPLATE.replace("part['type'] == 'image'", "part['type'] == 'image' and m['role'] != 'tool'")


@pytest.fixture(scope="module", params=KINDS)
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageEncoder:
    path: Path = tmp_path_factory.mktemp(request.param)
    save_vision_model(request.param, path)
    return ImageEncoder.load(str(path))


def encoder(images: ImageEncoder, template: str | None = None) -> ChatEncoder:
    mark = "<image>" if images.mark == "<image>" else f"<|vision_start|>{images.mark}<|vision_end|>"
    text = None if template is None else template.replace("IMAGE", mark)
    return ChatEncoder(images._processor.tokenizer, images=images, chat_template=text)


def test_images_in_any_turn_are_appended_and_processed_once(images: ImageEncoder) -> None:
    chat, before = encoder(images), images.num_encoded
    chat.check(("user", "tool"))
    chat.check_images()
    one, two = picture(11), picture(12, 84, 56)
    log = chat.encode_prompt((Message("user", (one, TextPart("first"))),))
    sampled = (70, images.token_id, 71)  # a placeholder that the model sampled
    log = (*log, TokenizedMessage(Message("assistant", "x"), sampled, (0.0, 0.0, 0.0)))
    tokens = flat_token_ids(log)
    result = Message("tool", (ToolResult("c1", (TextPart("screen: "), two)),))
    log = (*log, *chat.encode_turn(log, (result, Message("user", (one, TextPart("again"))))))

    assert flat_token_ids(log)[: len(tokens)] == tokens  # the past is never rendered again
    placed = placed_images(log)
    assert [image.features.digest for image in placed] == [one.digest, two.digest, one.digest]
    marked = [position for image in placed for position in image.positions]
    at_marks = [i for i, token in enumerate(flat_token_ids(log)) if token == images.token_id]
    assert marked == [i for i in at_marks if i != len(tokens) - 2]
    assert all(len(image.positions) == image.features.num_tokens for image in placed)
    assert images.num_encoded - before <= 3  # two pictures, and the grey one of the check
    assert placed[0].features is placed[2].features


def test_a_template_that_drops_images_of_tools_is_noticed(images: ImageEncoder) -> None:
    chat = encoder(images, BLIND_TOOLS)
    log = chat.encode_prompt((Message("user", "open it"),))
    log = (*log, TokenizedMessage(Message("assistant", "x"), (70,), (0.0,)))
    with pytest.raises(DataError, match="renders 0 of 1 images"):
        chat.encode_turn(log, (Message("tool", (picture(1),)),))


def test_a_template_without_images_is_refused_at_the_start(images: ImageEncoder) -> None:
    blind = (
        "{% for m in messages %}{{ m['content'] if m['content'] is string else m['content'][-1]['text'] }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="images are not rendered"):
        encoder(images, blind).check_images()


def test_a_text_cannot_pose_as_an_image(images: ImageEncoder) -> None:
    with pytest.raises(DataError, match="which stands for an image"):
        encoder(images).encode_prompt((Message("user", (picture(1), TextPart(images.mark))),))


def test_images_are_refused_without_an_encoder_or_a_file(images: ImageEncoder) -> None:
    chat = ChatEncoder(images._processor.tokenizer)
    with pytest.raises(DataError, match="1 images in the messages: this policy reads text"):
        chat.encode_prompt((Message("user", (picture(1),)),))
    with pytest.raises(DataError, match="read from a record"):
        encoder(images).encode_prompt((Message("user", (ImagePart("0" * 64),)),))


def test_templates_that_take_lists_of_parts_alone_are_given_them(images: ImageEncoder) -> None:
    """As those of Idefics3 and SmolVLM do: of a string they would see the characters."""
    listed = TEMPLATE.replace("{% if m['content'] is string %}{{ m['content'] }}{% else %}", "", 1).replace(
        "{% endfor %}{% endif %}<|end|>", "{% endfor %}<|end|>"
    )
    chat = encoder(images, listed)
    log = chat.encode_prompt((Message("user", "hello"),))
    assert chat.decode(flat_token_ids(log), keep_special=True) == "user:hello<|end|>assistant:"


def test_a_prompt_fits_by_its_tokens_with_those_of_its_images(images: ImageEncoder) -> None:
    chat, messages = encoder(images), (Message("user", (picture(1),)),)
    length = len(flat_token_ids(chat.encode_prompt(messages)))
    assert chat.prompt_fits(messages, (), length)
    assert not chat.prompt_fits(messages, (), length - 1)
