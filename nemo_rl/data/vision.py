"""Images as a model family's processor encodes them: placeholder tokens, and what the vision tower takes.

Every image is processed by itself, once, and kept by the digest of its file while it fits into memory; so it has the
same pixels in every sample, turn and engine. Image processors are those by Pillow, never torchvision's, whose pixels
differ.
"""

import asyncio
import hashlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import transformers
from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerBase
from transformers.processing_utils import VideosKwargs

from nemo_rl.config.images import VISION_FAMILIES
from nemo_rl.data.images import decode
from nemo_rl.errors import ConfigError, DataError, describe_error
from nemo_rl.image_features import ImageFeatures, PlacedImage
from nemo_rl.types import ImagePart

KEPT_BYTES = 2**30  # limit for processed images
UNBATCHED = ("pixel_values", "pixel_attention_mask")  # arrays that processors of tiles give an axis of samples


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedImage:
    """An image as text with its placeholder tokens, and its features' input."""

    text: str
    features: ImageFeatures


class ImageOnly:
    """Mixed in before a processor class: no video processor, hence no torchvision.

    Transformers 5.19 reads a processor's parts from the signature of its constructor, and those for videos need
    torchvision; nothing here is ever asked for a video.
    """

    # What code reads that is never asked for a video: vLLM the kwargs and sizes.
    video_processor = SimpleNamespace(
        valid_kwargs=VideosKwargs,
        merge_size=2,
        temporal_patch_size=2,
        num_frames=1,
        fps=1,
        size={"shortest_edge": 56**2, "longest_edge": 64 * 56**2},
    )

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)  # type: ignore[call-arg]


class ImageOnlyTiles(ImageOnly):
    """SmolVLM's: a signature with the number of tokens per tile, and no need of the package num2words."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, image_seq_len: int = 169, chat_template: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        module: Any = sys.modules[transformers.SmolVLMProcessor.__module__]
        module.num2words = module.num2words or str  # the constructor asks for it; only videos use it
        super().__init__(image_processor, tokenizer, chat_template, image_seq_len=image_seq_len, **kwargs)


@cache
def image_only(processor_class: type) -> Any:
    """Return a processor class without its part for videos."""
    mixin = ImageOnlyTiles if processor_class is transformers.SmolVLMProcessor else ImageOnly
    return type(processor_class.__name__, (mixin, processor_class), {})


def _processor_class(model_path: str) -> Any:
    family = VISION_FAMILIES.get(AutoConfig.from_pretrained(model_path).model_type)
    if family is None or family.video_processor_class is None:
        return AutoProcessor
    return image_only(getattr(transformers, family.video_processor_class))


def save_processor(model_path: str, directory: Path) -> None:
    """Write the processor of a model that sees beside weights that were trained from it."""
    _processor_class(model_path).from_pretrained(model_path, backend="pil").save_pretrained(directory)


class ImageEncoder:
    """Encodes images for one model. Safe to use from several threads."""

    def __init__(self, processor: Any) -> None:
        """Use `load`."""
        self._processor = processor
        self._known: OrderedDict[str, EncodedImage] = OrderedDict()
        self._kept_bytes = 0
        self._alive: WeakValueDictionary[str, EncodedImage] = WeakValueDictionary()
        self._lock = threading.Lock()  # of the images above
        self._processing = threading.Lock()  # tokenizers and processors are not safe to use from several threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="image-encoder")
        self.mark = str(processor.image_token)  # the text in a rendered conversation that stands for an image
        self.token_id = int(processor.tokenizer.convert_tokens_to_ids(self.mark))
        self.num_encoded = 0  # images that were processed, for tests and logs

    @classmethod
    def load(cls, model_path: str, *, key: str = "policy.model_name") -> "ImageEncoder":
        """Load the model's processor; raises ConfigError if it has none that reads images."""
        try:
            processor = _processor_class(model_path).from_pretrained(model_path, backend="pil")
        except Exception as error:  # missing or damaged files raise anything
            raise ConfigError(key, model_path, f"its processor cannot be loaded: {describe_error(error)}") from error
        if isinstance(processor, PreTrainedTokenizerBase) or not hasattr(processor, "image_token"):
            raise ConfigError(key, model_path, "has no processor that reads images")
        return cls(processor)

    @property
    def settings(self) -> dict[str, Any]:
        """Return what decides the tokens and pixels of an image; encoders of equal settings make the same features."""
        processor = self._processor
        own = {"processor_class": type(processor).__name__, "image_seq_len": getattr(processor, "image_seq_len", None)}
        return {**own, "image_token": self.mark, **processor.image_processor.to_dict()}

    def encode(self, image: ImagePart, where: str | None = None) -> EncodedImage:
        """Return an image's text and features; raises DataError for one that is only known by its digest.

        `where` is the place that errors name. An encoded image is found for as long as it fits, or anyone holds it.
        """
        if (known := self.find(image.digest)) is not None:
            return known
        if not image.file:
            raise DataError(f"image {image.digest[:12]} was read from a record, which holds no files")
        with self._processing:
            if (known := self.find(image.digest)) is not None:
                return known
            encoded = self._process(image, where or f"image {image.digest[:12]}")
            self._keep(image.digest, encoded)
            return encoded

    async def encode_all(self, images: Sequence[ImagePart]) -> list[EncodedImage]:
        """Encode images in a thread of their own; `encode` finds them for as long as the result is held.

        Raises DataError as `encode` does.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: [self.encode(image) for image in images])

    def find(self, digest: str) -> EncodedImage | None:
        """Return an image that is encoded already; never waits for one that is being encoded."""
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
            return self._alive.get(digest)

    def place(
        self, text: str, images: Sequence[ImagePart], tokenizer: PreTrainedTokenizerBase
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Return the tokens of a rendered text and the images at their placeholders.

        Raises DataError if the text has not exactly one mark per image: the template drops one, or a message spells it.
        """
        pieces = text.split(self.mark)
        if len(pieces) - 1 != len(images):
            problem = f"the chat template renders {len(pieces) - 1} of {len(images)} images as {self.mark}"
            raise DataError(f"{problem}; does it drop those of tools' messages, or does a text contain the mark?")
        encoded = [self.encode(image) for image in images]
        parts = [pieces[0], *(one.text + piece for one, piece in zip(encoded, pieces[1:], strict=True))]
        token_ids = tuple(tokenizer.encode("".join(parts), add_special_tokens=False))
        places = [position for position, token in enumerate(token_ids) if token == self.token_id]
        needed = sum(one.features.num_tokens for one in encoded)
        if len(places) != needed:
            raise DataError(f"{len(places)} placeholder tokens for {needed} rows of image features")
        placed, start = [], 0
        for one in encoded:
            end = start + one.features.num_tokens
            placed.append(PlacedImage(one.features, tuple(places[start:end])))
            start = end
        return token_ids, tuple(placed)

    def _process(self, image: ImagePart, place: str) -> EncodedImage:
        tokenizer = self._processor.tokenizer
        picture = decode(image.file, place).convert("RGB")
        if hashlib.sha256(image.file).hexdigest() != image.digest:
            raise DataError(f"{place} is a file of another digest; data.images.ImageReader makes images")
        try:
            found = self._processor(text=[self.mark], images=[[picture]], return_tensors="np")
        except Exception as error:  # e.g. an aspect ratio that Qwen's refuses
            raise DataError(f"{place} cannot be processed: {describe_error(error)}") from error
        token_ids = [int(token) for token in found["input_ids"][0]]
        text = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if list(tokenizer.encode(text, add_special_tokens=False)) != token_ids:
            raise DataError(f"the tokenizer does not read an image's own text again: {text:.80}")
        names = [name for name in found if name.startswith(("pixel_", "image_"))]
        arrays = {name: np.asarray(found[name]) for name in names}
        if "image_grid_thw" not in arrays:
            arrays = {name: array[0] if name in UNBATCHED else array for name, array in arrays.items()}
        self.num_encoded += 1
        return EncodedImage(text, ImageFeatures(image.digest, arrays, token_ids.count(self.token_id)))

    def _keep(self, digest: str, encoded: EncodedImage) -> None:
        with self._lock:
            self._known[digest] = self._alive[digest] = encoded
            self._kept_bytes += encoded.features.num_bytes
            while self._kept_bytes > KEPT_BYTES and len(self._known) > 1:
                _, oldest = self._known.popitem(last=False)
                self._kept_bytes -= oldest.features.num_bytes
