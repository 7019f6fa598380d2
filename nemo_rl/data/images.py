"""Image files from outside: from data URLs, bytes and configured directories, checked before anything decodes them.

A file's kind is told by its first bytes and its size by its header, so that a bomb is never decompressed; then the
whole picture is decoded once, which finds a damaged one. Whatever is wrong is a DataError that names the place.
"""

import base64
import binascii
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from nemo_rl.config.images import MAX_BYTES, MAX_PIXELS, ImageLimits, ImagesConfig
from nemo_rl.errors import DataError
from nemo_rl.types import ImagePart

FORMATS = ("PNG", "JPEG", "WEBP")
ALLOWED = "allowed: PNG, JPEG and WebP"
IMAGE_TYPES = ("image", "image_url", "input_image")  # types of parts: this project's rows, and OpenAI's two APIs
DATA_URL = re.compile(r"data:([^,;]*)(;[^,]*)?,", re.ASCII)
MAX_SIDE = 32_768  # pixels
LARGEST = ImageLimits(max_bytes=MAX_BYTES, max_pixels=MAX_PIXELS)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads images within the limits of a section; not a network."""

    limits: ImagesConfig

    def read_part(self, part: Mapping[str, Any], where: str) -> ImagePart:
        """Return the image of a part of one of IMAGE_TYPES: `image`, `path`, `url` or OpenAI's `image_url`.

        Raises DataError, with the place, for anything but one image that is allowed.
        """
        given = {name: part[name] for name in ("image", "path", "url", "image_url") if part.get(name) is not None}
        if len(given) != 1:
            problem = "has no image" if not given else f"has {' and '.join(given)}"
            raise DataError(f"{where} {problem}; allowed: one of image, path, url and image_url")
        ((name, value),) = given.items()
        if name == "image_url" and isinstance(value, Mapping):
            name, value = "image_url.url", value.get("url")
        return self.read(value, f"{where}.{name}")

    def read(self, value: Any, where: str) -> ImagePart:
        """Return the image of a data URL, a path, the bytes of a file, or a row of `datasets` ({"bytes", "path"})."""
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return self.check(value, where)
        if not isinstance(value, str) or not value:
            raise DataError(f"{where} is {_short(value)}; allowed: a data URL, a path, or a file's bytes")
        if value[:5].lower() == "data:":
            return self.read_data_url(value, where)
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", value):
            raise DataError(f"{where} is {_short(value)}: nothing is fetched; allowed: a data URL or a path")
        return self.check(self._read_file(value, where), where)

    def check(self, file: bytes, where: str) -> ImagePart:
        """Return the image in a file's bytes; raises DataError for a file that is too large, damaged or no image."""
        decode(file, where, self.limits)
        return ImagePart(hashlib.sha256(file).hexdigest(), file)

    def read_data_url(self, value: Any, where: str) -> ImagePart:
        """Return the image of a data URL; raises DataError for anything else."""
        if not isinstance(value, str):
            raise DataError(f"{where} is {_short(value)}; allowed: data:image/png;base64,...")
        return self.check(self.decode_url(value, where), where)

    def decode_url(self, url: str, where: str) -> bytes:
        """Return the bytes in a data URL, unchecked but for their number; raises DataError for another URL."""
        match = DATA_URL.match(url)
        if match is None or not (match[2] or "").lower().endswith(";base64"):
            problem = "" if match else ": nothing is fetched"
            raise DataError(f"{where} is {_short(url)}{problem}; allowed: data:image/png;base64,...")
        if (len(url) - match.end()) * 3 // 4 > self.limits.max_bytes + 3:
            raise DataError(f"{where} has more bytes than max_bytes = {self.limits.max_bytes}")
        try:
            return base64.b64decode(url[match.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"{where} is {_short(url)}: {error}") from error

    def _read_file(self, name: str, where: str) -> bytes:
        """Return the bytes of a regular file below one of the directories, wherever links lead."""
        roots = [Path(root).resolve() for root in self.limits.directories]
        candidates = [Path(name)] if Path(name).is_absolute() else [root / name for root in roots]
        try:
            found = [path.resolve(strict=True) for path in candidates if path.exists()]
        except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a NUL byte
            raise DataError(f"{where} is {_short(name)}: {getattr(error, 'strerror', None) or error!s:.80}") from error
        allowed = [path for path in found if any(path.is_relative_to(root) for root in roots)]
        if not allowed:
            problem = "outside of images.directories" if found or not roots else "no such file below images.directories"
            raise DataError(f"{where} is {_short(name)}: {problem} = {self.limits.directories}")
        try:
            with open(os.open(allowed[0], os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                state = os.fstat(file.fileno())
                if not stat.S_ISREG(state.st_mode):
                    raise DataError(f"{where} is {_short(name)}: not a regular file")
                return file.read(self.limits.max_bytes + 1)
        except OSError as error:
            raise DataError(f"{where} is {_short(name)}: {error.strerror}") from error


def decode(file: bytes, where: str, limits: ImageLimits = LARGEST) -> Image.Image:
    """Return the picture in a file's bytes; raises DataError for a file that is too large, damaged or no image."""
    with _opened(file, where, limits) as image:
        image.load()
        return image


def count_pixels(file: bytes, where: str, limits: ImageLimits = LARGEST) -> int:
    """Return width times height by a file's header, without decoding it; raises as `decode` for what that shows."""
    with _opened(file, where, limits) as image:
        return image.width * image.height


@contextmanager
def _opened(file: bytes, where: str, limits: ImageLimits) -> Iterator[Image.Image]:
    """Open an image whose header is within the limits; whatever reading it raises becomes a DataError."""
    if len(file) > limits.max_bytes:
        raise DataError(f"{where} has {len(file)} bytes; allowed: max_bytes = {limits.max_bytes}")
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as image:
            _check_size(image, where, limits)
            yield image
    except DataError:
        raise
    except Exception as error:  # decoders raise anything for a damaged file: SyntaxError, struct.error, OSError
        kind = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(f"{where} is no image that can be read ({kind:.120}); {ALLOWED}") from error


def _check_size(image: Image.Image, where: str, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.max_pixels or max(width, height) > MAX_SIDE:
        allowed = f"max_pixels = {limits.max_pixels}, and {MAX_SIDE} a side"
        raise DataError(f"{where} has {width} x {height} pixels; allowed: {allowed}")
    if getattr(image, "n_frames", 1) > 1:
        raise DataError(f"{where} is an animation of {getattr(image, 'n_frames', 0)} frames; {ALLOWED} of one")


def to_data_url(part: ImagePart) -> str:
    """Return an image as a data URL, as servers take it."""
    kind = "png" if part.file[:4] == b"\x89PNG" else "webp" if part.file[8:12] == b"WEBP" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(part.file).decode()}"


def grey_picture(side: int = 56) -> ImagePart:
    """Return a grey square, for checks."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (128, 128, 128)).save(file, "PNG")
    return ImagePart(hashlib.sha256(file.getvalue()).hexdigest(), file.getvalue())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
