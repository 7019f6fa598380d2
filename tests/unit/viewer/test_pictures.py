"""Pictures of recorded rollouts: small copies that a run writes once, and that a page shows as data alone."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from nemo_rl.config.images import ImagesConfig
from nemo_rl.data.images import ImageReader
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.experience.thumbnails import ThumbnailWriter
from nemo_rl.types import ImagePart, Message, Prompt, StopReason, TextPart, TokenizedMessage, ToolResult, Trajectory
from nemo_rl.viewer.rollout_pages import rollout_page
from nemo_rl.viewer.site import Renderer
from nemo_rl.viewer.viewer_sources import ViewerSource
from tests.fakes.vision import picture, png

PICTURE = r'<img class="picture" id="image-[0-9a-f]{12}" src="(data:image/webp;base64,[A-Za-z0-9+/=]+)" alt="([^"]*)"'
SCREEN = ImageReader(ImagesConfig()).check(png(Image.new("RGB", (1600, 900), (1, 2, 3))), "screen")
ASKED, OTHER = picture(1), picture(2)


def rollout(*images: ImagePart) -> Trajectory:
    first, *screens = images
    messages = [Message("user", (first, TextPart("close it")))]
    messages += [Message("tool", (ToolResult("c", (TextPart("screen:"), screen)),)) for screen in screens]
    log = tuple(TokenizedMessage(message, ()) for message in messages)
    return Trajectory(Prompt("p", "e", (messages[0],)), "g", 0, log, StopReason.DONE, {"r": 1.0})


def written(run: Path, *trajectories: Trajectory) -> Path:
    """Write a run's rollouts; return the directory of its pictures."""
    (run / "metrics.jsonl").write_text("")

    async def main() -> None:
        with RolloutWriter(run / "rollouts" / "train.jsonl", write_thumbnails=True) as writer:
            await writer.write(0, trajectories)

    asyncio.run(main())
    return run / "rollouts" / "images"


def shown(run: Path) -> str:
    page = rollout_page(ViewerSource.open(run), "train", "0.0", {})
    return Renderer().page(page)


def test_a_page_shows_the_pictures_of_its_rollout(tmp_path: Path) -> None:
    images = written(tmp_path, rollout(ASKED, SCREEN, ASKED), rollout(OTHER))
    assert {path.stem for path in images.iterdir()} == {ASKED.digest, SCREEN.digest, OTHER.digest}
    with Image.open(images / f"{SCREEN.digest}.webp") as small:
        assert small.size == (512, 288)
    page = shown(tmp_path)
    found = re.findall(PICTURE, page)
    assert [name for _, name in found] == [f"image {each.digest[:12]}" for each in (ASKED, SCREEN)]
    assert re.findall('href="#image-([0-9a-f]{12})"', page) == [ASKED.digest[:12]]  # its second turn
    assert "base64" not in (tmp_path / "rollouts" / "train.jsonl").read_text()


HOSTILE = {
    "a picture as text": b"<svg onload=alert(1)>",
    "too many pixels": png(Image.new("RGB", (4000, 4000))),
    "too many bytes": SCREEN.file + bytes(2**18),
    "damaged": ASKED.file[:200],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_not_shown(case: str, tmp_path: Path) -> None:
    images = written(tmp_path, rollout(ASKED))
    (images / f"{ASKED.digest}.webp").write_bytes(HOSTILE[case])
    assert "<img" not in shown(tmp_path)


@pytest.mark.parametrize("digest", ["../../secret", "a" * 63, f"{'a' * 63}/", '"><img src=x onerror=alert(1)>'])
def test_a_digest_of_a_record_names_no_other_file(digest: str, tmp_path: Path) -> None:
    written(tmp_path, rollout(ASKED))
    parts = [{"type": "image", "digest": digest}, {"type": "image", "digest": 3}, {"type": "tool_result", "content": 3}]
    file = tmp_path / "rollouts" / "train.jsonl"
    row = json.loads(file.read_text())
    row["messages"] = [{"role": "user", "content": "x", "parts": parts}]
    file.write_text(json.dumps(row) + "\n")
    assert "<img" not in shown(tmp_path)


def test_thumbnails_are_bounded_and_go_on_after_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ThumbnailWriter(tmp_path).write([rollout(ASKED)])
    (own,) = tmp_path.iterdir()
    before = own.stat().st_mtime_ns
    again = ThumbnailWriter(tmp_path, max_bytes=own.stat().st_size + 10)
    again.write([rollout(ASKED, OTHER)])
    assert [path.name for path in tmp_path.iterdir()] == [own.name]
    assert own.stat().st_mtime_ns == before
    assert "is full; further images have no thumbnails" in caplog.text
