"""Rollouts whose environment shows a screen after each action: every turn appends, and every token has its picture."""

import asyncio
import io
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

from nemo_rl import batch as keys
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.vision import EncodedImage, ImageEncoder
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.rollout_dependencies import RolloutLimits, RolloutOptions
from nemo_rl.experience.rollouts import (
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
    run_multi_turn_rollout_async_generation,
)
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.types import (
    Completion,
    EnvStep,
    FailedRequest,
    FailureClass,
    GenerationRequest,
    ImagePart,
    Message,
    Prompt,
    SamplingParams,
    TextPart,
    TokenizedMessage,
    ToolResult,
    Trajectory,
    TrajectoryGroup,
    placed_images,
)
from tests.fakes.environments import Conversation, FakeEnvironment, State
from tests.fakes.generation import FakeGeneration
from tests.fakes.vision import picture, save_vision_model
from tests.unit.experience.rollout_setup import dependencies

SCHEDULERS = (run_async_multi_turn_rollout, run_multi_turn_rollout_async_generation, run_multi_turn_rollout)
NUM_TURNS = 4
SCREENS = [picture(seed, 56 if seed % 2 else 84, 56) for seed in range(NUM_TURNS)]
TASK = Message("user", (SCREENS[0], TextPart("close the window")))
LIMITS = RolloutLimits(max_turns=NUM_TURNS, max_total_length=400)


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl"])
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageEncoder:
    path: Path = tmp_path_factory.mktemp(request.param)
    save_vision_model(request.param, path)
    return ImageEncoder.load(str(path))


def screen_after(conversation: Conversation, state: State) -> EnvStep:
    """Answer an action with the next screen, the second time with the first one again."""
    shown = [SCREENS[0] if turn == 2 else SCREENS[turn] for turn in range(NUM_TURNS)]
    turn = state.get("turn", 0) + 1
    seen = [image for message in conversation for image in message.images]
    assert seen == shown[:turn]
    if turn == NUM_TURNS:
        return EnvStep(rewards={"closed": 1.0})
    result = ToolResult(f"c{turn}", (TextPart("screen:"), shown[turn]))
    return EnvStep((Message("tool", (result,)),), done=False, state={"turn": turn})


class EndingEngine(FakeGeneration):
    """Samples a placeholder among other tokens, and ends its turns."""

    def __init__(self, placeholder: int, end: int) -> None:
        super().__init__()
        self._tail = (placeholder, end)

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        made = await super()._answer(request)
        assert isinstance(made, Completion)
        ids = (*made.token_ids[:4], *self._tail)
        return Completion(request.request_id, ids, (-0.5,) * len(ids), "stop")


def rollouts_with(
    images: ImageEncoder, environment: FakeEnvironment, limits: RolloutLimits = LIMITS
) -> tuple[FakeGeneration, list[list[Trajectory]]]:
    """Return the last engine, and what each scheduler makes of two rollouts of a prompt."""
    chat = ChatEncoder(images._processor.tokenizer, images=images)
    options = RolloutOptions(SamplingParams(12, stop_token_ids=chat.stop_token_ids), seed=3)
    jobs = [RolloutJob(Prompt("p", "screens", (TASK,)), "g", index) for index in range(2)]
    made, engine = [], FakeGeneration()
    for scheduler in SCHEDULERS:
        engine = EndingEngine(images.token_id, chat.stop_token_ids[0])
        setup = dependencies(engine, {"screens": environment}, limits=limits, encoder=chat)
        made.append(list(asyncio.run(scheduler(jobs, setup, options))))
    return engine, made


def test_each_turn_appends_its_screen_and_every_scheduler_agrees(images: ImageEncoder) -> None:
    before = images.num_encoded
    engine, (trajectories, *others) = rollouts_with(images, FakeEnvironment(screen_after))
    assert images.num_encoded - before == 3  # distinct screens of six rollouts
    digests = [SCREENS[turn].digest for turn in (0, 1, 0, 3)]
    for rollout in trajectories:
        assert (rollout.failure, rollout.num_turns, rollout.rewards) == (None, NUM_TURNS, {"closed": 1.0})
        tokens, placed = flat_token_ids(rollout.message_log), placed_images(rollout.message_log)
        assert [each.features.digest for each in placed] == digests
        for each in placed:
            assert {tokens[position] for position in each.positions} == {images.token_id}
        asked = sorted(
            (r for r in engine.requests if r.session_id == f"g:{rollout.generation_index}"),
            key=lambda r: len(r.token_ids),
        )
        assert [len(request.images) for request in asked] == [1, 2, 3, 4]
        for request in asked:
            assert tokens[: len(request.token_ids)] == request.token_ids
            assert placed[: len(request.images)] == request.images
    for rollout, *same in zip(trajectories, *others, strict=True):
        assert all(each.message_log == rollout.message_log for each in same)

    batch, _ = assemble_batch([TrajectoryGroup("g", trajectories[0].prompt, tuple(trajectories))], min_group_size=1)
    rows, table = batch[keys.IMAGE_ROWS], batch[keys.IMAGES]
    assert len(table.images) == 3
    assert not (batch["token_mask"].bool() & (rows >= 0)).any()  # a sampled placeholder is a token like any other
    first = table.starts[[image.digest for image in table.images].index(digests[0])]
    assert torch.equal((rows == first).sum(-1), torch.tensor([2, 2]))  # shown twice in each rollout


def test_pictures_are_encoded_outside_of_the_event_loop(images: ImageEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that cannot be encoded."""
    threads = []

    def process(encoder: ImageEncoder, image: ImagePart, place: str) -> EncodedImage:
        threads.append(threading.current_thread())
        return process_image(encoder, image, place)

    process_image = ImageEncoder._process
    monkeypatch.setattr(ImageEncoder, "_process", process)
    monkeypatch.setattr("nemo_rl.data.vision.KEPT_BYTES", 1)
    shown = iter([picture(seed) for seed in range(40, 60)] + [ImagePart("0" * 64, b"GIF89a")])
    environment = FakeEnvironment(lambda *_: EnvStep((Message("tool", (next(shown),)),), done=False))
    rollouts_with(images, environment)
    assert len(threads) > 3
    assert threading.main_thread() not in threads


def test_a_conversation_has_a_bounded_number_of_pictures(images: ImageEncoder) -> None:
    environment = FakeEnvironment(lambda *_: EnvStep((Message("tool", (SCREENS[1],) * 16),), done=False))
    limits = RolloutLimits(max_turns=8, max_total_length=10_000)
    _, (trajectories, *_) = rollouts_with(images, environment, limits)
    for rollout in trajectories:
        assert rollout.num_turns == 4
        assert rollout.failure is not None
        assert rollout.failure.failure_class is FailureClass.ENVIRONMENT
        assert rollout.failure.cause == "the conversation has 65 images, more than 64"


def test_a_rollout_is_encoded_as_the_models_processor_would(images: ImageEncoder) -> None:
    """The whole conversation rendered anew and expanded by the processor gives the tokens of the history."""
    processor = images._processor
    chat = ChatEncoder(processor.tokenizer, images=images)
    log = chat.encode_prompt((TASK,))
    answer = chat.encode_answer(Message("assistant", "click 3"))
    log = (*log, TokenizedMessage(Message("assistant", "click 3"), answer, (0.0,) * len(answer)))
    log = (*log, *chat.encode_turn(log, (Message("tool", (ToolResult("c", (TextPart("screen:"), SCREENS[1])),)),)))
    marks = "<image>" if images.mark == "<image>" else f"<|vision_start|>{images.mark}<|vision_end|>"
    text = f"user:{marks}close the window<|end|>assistant:click 3<|end|>tool:screen:{marks}<|end|>assistant:"
    pictures = [_open(SCREENS[0]), _open(SCREENS[1])]
    whole = processor(text=[text], images=[pictures] if marks == "<image>" else pictures)["input_ids"][0]
    assert flat_token_ids(log) == tuple(whole)


def _open(image: ImagePart) -> Image.Image:
    return Image.open(io.BytesIO(image.file)).convert("RGB")


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ((ImagePart("0" * 64, b"GIF89a"),), "is no image that can be read"),
        ((ImagePart("0" * 64, SCREENS[0].file),), "is a file of another digest"),
        ((SCREENS[0],) * 17, "holds 17 images, more than 16"),
    ],
)
def test_a_screen_that_is_no_picture_fails_its_rollout(
    shown: tuple[ImagePart, ...], said: str, images: ImageEncoder
) -> None:
    def show(conversation: Conversation, state: State) -> EnvStep:
        return EnvStep((Message("tool", shown),), done=False)

    _, (trajectories, *_) = rollouts_with(images, FakeEnvironment(show))
    for rollout in trajectories:
        assert rollout.failure is not None
        assert rollout.failure.failure_class is FailureClass.ENVIRONMENT
        assert said in rollout.failure.cause
