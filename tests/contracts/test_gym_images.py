"""Rows with pictures that NeMo Gym ships, by its own servers through a real gateway to an engine that sees."""

import base64
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.distributed.machine import unused_port
from nemo_rl.gateway.codec import Codec
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, placed_images
from tests.contracts.gym_rollouts import KEY_VARIABLE, run_rows
from tests.contracts.real_gym import POLICY_API_KEY, VERSIONS, example_rows, gym_environment, real_gym
from tests.fakes.generation import FakeGeneration
from tests.fakes.vision import save_vision_model

pytestmark = pytest.mark.timeout(900)  # the first run of a machine installs NeMo Gym

AGENT = "circle_count_simple_agent"
CONFIG_PATHS = (
    "resources_servers/circle_count/configs/circle_count.yaml",
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
)


class CountingEngine(FakeGeneration):
    """Says how many circles each picture shows that it is given."""

    def __init__(self, encoder: ChatEncoder, counts: Mapping[str, int]) -> None:
        super().__init__()
        self._encoder = encoder
        self._counts = counts

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        text = "".join(f"\\boxed{{{self._counts[placed.features.digest]}}}" for placed in request.images)
        assert self._encoder.tokenizer is not None
        ids = (*self._encoder.tokenizer.encode(text, add_special_tokens=False), self._encoder.stop_token_ids[0])
        return Completion(request.request_id, ids, (-0.5,) * len(ids), "stop")


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a row that is its picture."""
    (part,) = (part for part in row["responses_create_params"]["input"][-1]["content"] if part["type"] == "input_image")
    return part


def file_of(row: Mapping[str, Any]) -> bytes:
    return base64.b64decode(shown(row)["image_url"].partition(",")[2])


def digest_of(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(file_of(row)).hexdigest()


def count_of(row: Mapping[str, Any]) -> int:
    return sum(circle["color"] == row["target_color"] for circle in row["circles"])


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_of_circle_count_are_rewarded_for_what_their_picture_shows(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that shows another's picture gets the count of that one, which is wrong."""
    gym = gym_environment(version)
    save_vision_model("idefics3", tmp_path)
    images = ImageEncoder.load(str(tmp_path))
    encoder = ChatEncoder(images._processor.tokenizer, images=images)
    rows = example_rows("circle_count", gym)
    counts = {digest_of(row): count_of(row) for row in rows}
    other = example_rows("circle_count", gym)[0]
    shown(other)["image_url"] = next(shown(row)["image_url"] for row in rows if count_of(row) != count_of(rows[0]))
    monkeypatch.setenv(KEY_VARIABLE, POLICY_API_KEY)
    port, engine, asked = unused_port(), CountingEngine(encoder, counts), [*rows, other]
    with real_gym(f"http://127.0.0.1:{port}/v1", environment=gym, config_paths=CONFIG_PATHS) as head_url:
        rollouts = run_rows(
            [(AGENT, row) for row in asked], engine=engine, codec=Codec(encoder), head_url=head_url, port=port
        )
    assert [rollout.failure for rollout in rollouts] == [None] * len(asked)
    assert [rollout.reward for rollout in rollouts] == [1.0] * len(rows) + [0.0]
    for rollout, row in zip(rollouts, asked, strict=True):
        assert [placed.features.digest for placed in placed_images(rollout.message_log)] == [digest_of(row)]
    system, user = rows[0]["responses_create_params"]["input"]
    text = f"system:{system['content']}<|end|>user:<image>{user['content'][-1]['text']}<|end|>assistant:"
    picture = Image.open(io.BytesIO(file_of(rows[0]))).convert("RGB")
    expected = images._processor(text=[text], images=[[picture]])["input_ids"][0]
    tokens = flat_token_ids(rollouts[0].message_log)
    assert tokens[: len(expected)] == tuple(expected)
