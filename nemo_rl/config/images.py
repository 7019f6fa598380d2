"""Images: which files rows may name, how large they may be, and the models that see. Loads neither torch nor Pillow."""

from pathlib import Path

from pydantic import Field

from nemo_rl.config.kinds import Section
from nemo_rl.errors import ConfigError

VISION_MODEL_TYPES = ("idefics3", "qwen2_5_vl")  # types of models whose policies see


class ImagesConfig(Section):
    """Images in the rows of a dataset: data URLs, and files below the named directories. No network is used."""

    directories: list[str] = Field(default_factory=list)  # directories whose files rows may name; links are followed
    max_count: int = Field(default=8, gt=0)  # images per row
    max_bytes: int = Field(default=16 * 2**20, gt=0)  # bytes of an image's file
    max_pixels: int = Field(default=2**24, gt=0)  # width times height of an image


def check_images(key: str, section: ImagesConfig) -> None:
    """Raise ConfigError for a directory that does not exist."""
    for name in section.directories:
        if not Path(name).is_dir():
            raise ConfigError(f"{key}.directories", name, f"no such directory (from {Path.cwd()})")
