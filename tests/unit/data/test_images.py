"""Images from outside: what is read, and twenty-odd hostile files, each refused with its place in bounded memory."""

import base64
import contextlib
import io
import os
import resource
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nemo_rl.config.images import ImagesConfig
from nemo_rl.data.images import ImageReader
from nemo_rl.data.messages import parse_message, parse_messages, parse_record, to_openai_message, to_record
from nemo_rl.errors import DataError
from nemo_rl.types import ImagePart, Message, TextPart, ToolResult
from tests.fakes.vision import picture, png

LIMITS = ImagesConfig(max_bytes=20_000, max_pixels=10_000)
READER = ImageReader(LIMITS)
PLAIN = png(Image.new("RGB", (8, 8), (1, 2, 3)))


def url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of so many pixels whose data are a few bytes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def text_bomb() -> bytes:
    """A small PNG with a compressed comment of 200 MB."""
    packed = zlib.compress(b"\0" * 200_000_000, 9)
    return PLAIN[:33] + chunk(b"zTXt", b"Comment\0\0" + packed) + PLAIN[33:]


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


FRAME = Image.new("RGB", (8, 8))
HOSTILE: dict[str, Any] = {
    "a bomb of 100 million pixels": url(bomb(10_000, 10_000)),
    "a bomb beyond Pillow's own limit": url(bomb(60_000, 60_000)),
    "one pixel wide, two billion high": url(bomb(1, 2**31 - 1)),
    "no pixels": url(bomb(0, 0)),
    "more pixels than allowed": url(png(Image.new("RGB", (101, 100)))),
    "a truncated PNG": url(png(Image.effect_noise((64, 64), 50))[:2000]),
    "a truncated JPEG": url(saved(Image.effect_noise((64, 64), 50), "JPEG")[:200], "jpeg"),
    "a damaged checksum": url(PLAIN[:45] + b"x" + PLAIN[46:]),
    "SVG": url(b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "svg+xml"),
    "SVG that claims to be PNG": url(b"<svg><!ENTITY x SYSTEM 'file:///etc/passwd'></svg>"),
    "a GIF": url(saved(FRAME, "GIF"), "gif"),
    "a TIFF": url(saved(FRAME, "TIFF"), "png"),
    "PostScript": url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"),
    "an animation": url(saved(FRAME, "PNG", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])),
    "an empty file": url(b""),
    "no base64": "data:image/png;base64,!!!!",
    "a data URL without base64": "data:image/png,abc",
    "more bytes than allowed": url(b"\x89PNG" + b"\0" * 30_000),
    "a web address": "https://example.com/cat.png",
    "a file address": "file:///etc/passwd",
    "an absolute path": "/etc/passwd",
    "a path with a NUL": "a\0b",
    "a path of a million characters": "a" * 1_000_000,
    "a number": 7,
    "a list": [1, 2],
    "raw bytes that are no image": b"\xff\xd8\xff" + b"\0" * 50,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pictures_are_refused_with_their_place(name: str, tmp_path: Path) -> None:
    reader = ImageReader(LIMITS.model_copy(update={"directories": [str(tmp_path)]}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    content = [{"type": "text", "text": "look"}, {"type": "image", "image": HOSTILE[name]}]
    with pytest.raises(DataError, match=r"messages\[0\]\.content\[1\]") as refused:
        parse_messages({"messages": [{"role": "user", "content": content}]}, images=reader)
    assert len(str(refused.value)) < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_compressed_comment_is_not_inflated() -> None:
    file, reader = text_bomb(), ImageReader(ImagesConfig())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(DataError):  # harmless, or refused
        reader.check(file, "picture")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("kind", ["outside", "link", "up", "fifo", "directory", "absent"])
def test_files_outside_the_directories_are_refused(kind: str, tmp_path: Path) -> None:
    (inside := tmp_path / "inside").mkdir()
    (outside := tmp_path / "secret.png").write_bytes(PLAIN)
    (inside / "link").symlink_to(outside)
    (inside / "sub").mkdir()
    os.mkfifo(inside / "pipe")
    paths = {
        "outside": str(outside),
        "link": "link",
        "up": "../secret.png",
        "fifo": "pipe",
        "directory": "sub",
        "absent": "x",
    }
    reader = ImageReader(ImagesConfig(directories=[str(inside)]))
    with pytest.raises(DataError, match="place"):
        reader.read(paths[kind], "place")


def test_paths_data_urls_bytes_and_rows_of_datasets_give_the_same_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PLAIN)
    (tmp_path / "inner.png").symlink_to(tmp_path / "a.png")
    reader = ImageReader(ImagesConfig(directories=[str(tmp_path)]))
    given = ["a.png", "inner.png", str(tmp_path / "a.png"), url(PLAIN), PLAIN, {"bytes": PLAIN, "path": None}]
    assert {reader.read(value, "place") for value in given} == {reader.check(PLAIN, "place")}
    parts = [
        {"type": "image", "path": "a.png"},
        {"type": "image_url", "image_url": {"url": url(PLAIN)}},
        {"type": "input_image", "image_url": url(PLAIN)},
    ]
    assert {reader.read_part(part, "place").file for part in parts} == {PLAIN}


def test_too_many_images_are_refused_before_any_is_read() -> None:
    content = [{"type": "image", "image": "not even an image"}] * 9
    with pytest.raises(DataError, match=r"9 images; allowed: images\.max_count = 8"):
        parse_messages({"messages": [{"role": "user", "content": content}]}, images=READER)


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_only_users_and_tools_show_images(role: str) -> None:
    with pytest.raises(DataError, match=f"an image in a message of role {role}"):
        parse_message({"role": role, "content": [{"type": "image", "image": PLAIN}]}, images=READER)


def test_without_a_reader_images_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"content\[0\] is a part of type 'image': this policy reads text"):
        parse_message({"role": "user", "content": [{"type": "image", "image": PLAIN}]})
    with pytest.raises(DataError, match="'input_audio': this policy reads text and images"):
        parse_message({"role": "user", "content": [{"type": "input_audio"}]}, images=READER)


def test_a_message_with_images_round_trips_through_openais_shape_and_records() -> None:
    image = picture(1)
    message = Message("user", (TextPart("a"), image, TextPart("b")))
    assert parse_message(to_openai_message(message), images=ImageReader(ImagesConfig())) == message
    answer = Message("tool", (ToolResult("c1", (image, TextPart("done"))),))
    assert answer.images == (image,)
    for each in (message, answer):
        assert parse_record(to_record(each)) == each
        assert parse_record(to_record(each)).images[0].file == b""  # a record holds digests
        assert parse_record(to_record(each, keeps_files=True)).images[0].file == image.file
    assert isinstance(message.parts[1], ImagePart)
    assert image.digest in str(to_record(message))
