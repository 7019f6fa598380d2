"""Images in requests: data URLs and base64 within `gateway.images`; nothing is fetched.

Clients send a conversation's images again with each of its calls; each is checked once while it is kept here, and the
messages of all calls share its bytes.
"""

import hashlib
from collections import OrderedDict

from nemo_rl.config.images import ImageLimits, ImagesConfig
from nemo_rl.data.images import ImageReader
from nemo_rl.errors import DataError
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.types import ImagePart

KEPT_BYTES = 2**28  # limit for kept images of a server
STANDARD_ALPHABET = str.maketrans("-_", "+/")  # of base64: Google's clients write the alphabet of URLs


class ImageStore:
    """The images that a server has been sent most recently."""

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        self._reader = ImageReader(ImagesConfig(**limits.model_dump()))
        self._known: OrderedDict[str, ImagePart] = OrderedDict()
        self._kept_bytes = 0

    def read(self, url: str, where: str) -> ImagePart:
        """Return the image of a data URL; raises DataError for anything else."""
        file = self._reader.decode_url(url, where)
        digest = hashlib.sha256(file).hexdigest()
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
            return known
        image = self._known[digest] = self._reader.check(file, where)
        self._kept_bytes += len(file)
        while self._kept_bytes > KEPT_BYTES and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._kept_bytes -= len(oldest.file)
        return image


class RequestImages:
    """Reads the images of one request, and counts them. `store` is None if content has text alone."""

    def __init__(self, store: ImageStore | None) -> None:
        self._store = store
        self._count = 0

    @property
    def are_allowed(self) -> bool:
        """Return whether content may have images; only then may it be read."""
        return self._store is not None

    def read_base64(self, media_type: str, data: str, where: str) -> ImagePart:
        """Return the image that a base64 text encodes, in either of its alphabets."""
        padding = "=" * (-len(data) % 4)
        return self.read(f"data:{media_type};base64,{data.translate(STANDARD_ALPHABET)}{padding}", where)

    def read(self, url: str, where: str) -> ImagePart:
        """Return the image of a data URL; raises RequestError that names the place for anything else, and too many."""
        assert self._store is not None
        self._count += 1
        if self._count > (limit := self._store.limits.max_count):
            raise RequestError(400, f"{where}: image {self._count}; gateway.images.max_count is {limit}", param=where)
        try:
            return self._store.read(url, where)
        except DataError as error:
            raise RequestError(400, str(error), param=where) from error


TEXT_ONLY = RequestImages(None)
