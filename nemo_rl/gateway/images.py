"""Images in requests: data URLs and base64 within `gateway.images`; nothing is fetched.

Parsing a request takes its files out of their base64; `RequestImages.check` then decodes and encodes them in threads,
one at a time, so that other calls go on and large requests take turns. Clients send a conversation's images again with
each of its calls; each is checked once while it is kept here, and the messages of all calls share its bytes.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from nemo_rl.config.images import GatewayImagesConfig, ImagesConfig
from nemo_rl.data.images import ImageReader, count_pixels
from nemo_rl.data.vision import EncodedImage, ImageEncoder
from nemo_rl.errors import DataError
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.types import ImagePart

KEPT_BYTES = 2**28  # limit for kept images of a server
NUM_THREADS = 2  # per server; each holds one decoded image
STANDARD_ALPHABET = str.maketrans("-_", "+/")  # of base64: Google's clients write the alphabet of URLs

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """An image that was decoded, and its size."""

    image: ImagePart
    num_pixels: int


@dataclass(frozen=True, slots=True)
class RequestImage:
    """An image in a request, and the path of its field."""

    image: ImagePart
    where: str


class ImageStore:
    """The images that a server has been sent most recently, and the threads that read new ones."""

    def __init__(self, limits: GatewayImagesConfig, encoder: ImageEncoder) -> None:
        self.limits = limits
        self.encoder = encoder
        self._reader = ImageReader(ImagesConfig(max_bytes=limits.max_bytes, max_pixels=limits.max_pixels))
        self._known: OrderedDict[str, CheckedImage] = OrderedDict()
        self._kept_bytes = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gateway-images")

    def read(self, url: str, where: str) -> ImagePart:
        """Return the file of a data URL, not decoded yet; raises DataError for another URL."""
        file = self._reader.decode_url(url, where)
        digest = hashlib.sha256(file).hexdigest()
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return known.image
        return ImagePart(digest, file)

    def find(self, digest: str) -> CheckedImage | None:
        """Return an image that was checked before."""
        return self._known.get(digest)

    def count_pixels(self, images: Sequence[RequestImage]) -> list[int]:
        """Return the size of each image by its header; raises RequestError for the first that is not allowed."""
        sizes = []
        for each in images:
            with _refused_at(each.where):
                sizes.append(count_pixels(each.image.file, each.where, self._reader.limits))
        return sizes

    def encode(self, each: RequestImage) -> EncodedImage:
        """Return an image as the policy takes it; raises RequestError for a damaged one."""
        with _refused_at(each.where):
            return self.encoder.encode(each.image, each.where)

    def keep(self, image: ImagePart, num_pixels: int) -> None:
        """Keep an image that was checked, in place of the oldest ones."""
        if image.digest in self._known:
            return
        self._known[image.digest] = CheckedImage(image, num_pixels)
        self._kept_bytes += len(image.file)
        while self._kept_bytes > KEPT_BYTES and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._kept_bytes -= len(oldest.image.file)

    async def in_thread(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Return the result of a function that runs in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        """Drop the work that has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _refused_at(where: str) -> Iterator[None]:
    """Turn the error of an image into a 400 that names its field."""
    try:
        yield
    except DataError as error:
        raise RequestError(400, str(error), param=where) from error


class RequestImages:
    """The images of one request, which it may have up to the limits. `store` is None if content has text alone."""

    def __init__(self, store: ImageStore | None) -> None:
        self._store = store
        self._images: list[RequestImage] = []
        self._num_bytes = 0
        self._encoded: list[EncodedImage] = []  # held, so that the call finds them encoded

    @property
    def are_allowed(self) -> bool:
        """Return whether content may have images; only then may it be read."""
        return self._store is not None

    def read_base64(self, media_type: str, data: str, where: str) -> ImagePart:
        """Return the image that a base64 text encodes, in either of its alphabets."""
        if "-" in data or "_" in data:
            data = data.translate(STANDARD_ALPHABET)
        padding = "=" * (-len(data) % 4)
        return self.read(f"data:{media_type};base64,{data}{padding}", where)

    def read(self, url: str, where: str) -> ImagePart:
        """Return the image of a data URL, which `check` decodes.

        Raises RequestError that names the place for anything else, and for more images or bytes than are allowed.
        """
        assert self._store is not None
        limits, number = self._store.limits, len(self._images) + 1
        if number > limits.max_count:
            text = f"{where}: image {number}; gateway.images.max_count is {limits.max_count}"
            raise RequestError(400, text, param=where)
        with _refused_at(where):
            image = self._store.read(url, where)
        self._num_bytes += len(image.file)
        if self._num_bytes > limits.max_total_bytes:
            text = f"{where}: {self._num_bytes} bytes of images up to here; gateway.images.max_total_bytes is"
            raise RequestError(400, f"{text} {limits.max_total_bytes}", param=where)
        self._images.append(RequestImage(image, where))
        return image

    async def check(self, max_tokens: int) -> int:
        """Decode and encode the images; return the number of their tokens, counted no further than `max_tokens`.

        Raises RequestError that names the place of a damaged image, and of one that exceeds the request's pixels.
        """
        if self._store is None or not self._images:
            return 0
        sizes = await self._measure(self._store)
        num_tokens = 0
        for each in self._images:
            num_tokens += await self._encode(self._store, each, sizes[each.image.digest])
            if num_tokens >= max_tokens:
                break
        return num_tokens

    async def _measure(self, store: ImageStore) -> dict[str, int]:
        """Return the pixels of each image by its digest; raises RequestError for too many of them."""
        new = list({each.image.digest: each for each in self._images if store.find(each.image.digest) is None}.values())
        counted = await store.in_thread(store.count_pixels, new) if new else []
        sizes = {each.image.digest: size for each, size in zip(new, counted, strict=True)}
        total, limit = 0, store.limits.max_total_pixels
        for each in self._images:
            known = store.find(each.image.digest)
            total += sizes.setdefault(each.image.digest, 0 if known is None else known.num_pixels)
            if total > limit:
                text = f"{each.where}: {total} pixels of images up to here; gateway.images.max_total_pixels is {limit}"
                raise RequestError(400, text, param=each.where)
        return sizes

    async def _encode(self, store: ImageStore, each: RequestImage, num_pixels: int) -> int:
        encoded = store.encoder.find(each.image.digest)
        if encoded is None:
            encoded = await store.in_thread(store.encode, each)
        store.keep(each.image, num_pixels)
        self._encoded.append(encoded)
        return encoded.features.num_tokens


TEXT_ONLY = RequestImages(None)
