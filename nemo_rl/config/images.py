"""Images: which files rows may name, how large they may be, and the models that see. Loads neither torch nor Pillow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from nemo_rl.config.kinds import Section
from nemo_rl.errors import ConfigError

MAX_BYTES, MAX_PIXELS = 2**26, 2**26  # per image, whatever limits are configured
MAX_CONVERSATION_IMAGES = 64  # in all turns of a conversation, whatever limits are configured


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A type of model that sees."""

    tower: Literal["tiles", "patches", "deepstack"]  # key of distributed.vision_towers.TOWERS
    # Name of the class of transformers, if it also reads videos: data.vision takes that part out, and vLLM's module of
    # the type's name is given the result. None: AutoProcessor finds it.
    video_processor_class: str | None = None


VISION_FAMILIES = {
    "idefics3": VisionFamily("tiles"),
    "smolvlm": VisionFamily("tiles", "SmolVLMProcessor"),
    "qwen2_5_vl": VisionFamily("patches", "Qwen2_5_VLProcessor"),
    "qwen3_vl": VisionFamily("deepstack", "Qwen3VLProcessor"),
}


class ImageLimits(Section):
    """Bounds of images from outside, checked before they are decoded."""

    max_count: int = Field(default=8, gt=0)  # images per row, or per request
    max_bytes: int = Field(default=16 * 2**20, gt=0, le=MAX_BYTES)  # bytes of an image's file
    max_pixels: int = Field(default=2**24, gt=0, le=MAX_PIXELS)  # width times height of an image


class ImagesConfig(ImageLimits):
    """Images in the rows of a dataset: data URLs, and files below the named directories. No network is used."""

    directories: list[str] = Field(default_factory=list)  # directories whose files rows may name; links are followed


class GatewayImagesConfig(ImageLimits):
    """Images in requests, as data URLs or base64: those of a whole conversation, which clients repeat."""

    max_count: int = Field(default=64, gt=0, le=MAX_CONVERSATION_IMAGES)  # images per request
    max_total_bytes: int = Field(default=24 * 2**20, gt=0, le=24 * 2**20)  # bytes of all files of a request
    max_total_pixels: int = Field(default=2**27, gt=0, le=2**28)  # pixels of all images of a request


def check_images(key: str, section: ImagesConfig) -> None:
    """Raise ConfigError for a directory that does not exist."""
    for name in section.directories:
        if not Path(name).is_dir():
            raise ConfigError(f"{key}.directories", name, f"no such directory (from {Path.cwd()})")
