"""Small copies of the images that recorded rollouts show, by the digest of the file: `<digest>.webp`."""

import io
import logging
from collections.abc import Iterable
from pathlib import Path

from nemo_rl.data.images import decode
from nemo_rl.types import ImagePart, Trajectory

logger = logging.getLogger(__name__)

SIDE = 512  # pixels, at most
QUALITY = 80
MAX_BYTES = 2**27  # per writer, of which a run has two; further images have no thumbnail


class ThumbnailWriter:
    """Writes the thumbnail of each image once. Called by one thread."""

    def __init__(self, directory: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._known = {path.stem for path in directory.glob("*.webp")}
        self._room = max_bytes - sum(path.stat().st_size for path in directory.glob("*.webp"))

    def write(self, trajectories: Iterable[Trajectory]) -> None:
        """Write the images of rollouts that have no thumbnail yet; raises OSError if the disk takes none."""
        for trajectory in trajectories:
            for message in (message for chain in trajectory.chains for message in chain):
                for image in message.message.images:
                    if image.file and image.digest not in self._known:
                        self._known.add(image.digest)
                        self._write(image)

    def _write(self, image: ImagePart) -> None:
        if self._room < 0:
            return
        picture = decode(image.file, f"image {image.digest[:12]}").convert("RGB")
        picture.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        picture.save(file, "WEBP", quality=QUALITY)
        small = file.getvalue()
        self._room -= len(small)
        if self._room < 0:
            logger.warning("%s is full; further images have no thumbnails", self._directory)
            return
        path = self._directory / f"{image.digest}.webp"
        path.with_suffix(".part").write_bytes(small)
        path.with_suffix(".part").replace(path)
