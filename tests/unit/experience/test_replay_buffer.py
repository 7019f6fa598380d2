"""Deadlines, capacity and choice in numbers: steps of two groups; the state that a checkpoint holds."""

from dataclasses import fields
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.checkpoint import load_state, save_state
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.experience.replay_buffer import BufferedGroup, DroppedGroup, ReplayBuffer, ReplayBufferState, WaitReason
from nemo_rl.experience.replay_buffer_state import (
    REPLAY_BUFFER,
    buffer_state_from_dict,
    buffer_state_to_dict,
    extract_buffer_state,
)
from nemo_rl.image_features import ImageFeatures, PlacedImage
from nemo_rl.token_columns import NO_COLUMNS, TokenColumns
from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    StopReason,
    TextPart,
    ThinkingPart,
    Timings,
    TokenizedMessage,
    ToolCall,
    ToolResult,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
    placed_images,
)
from tests.unit.experience.rollout_setup import prompt


def group(version: int) -> TrajectoryGroup:
    """Of one rollout, sampled under this version."""
    one = Trajectory(prompt(0), "g", 0, (), StopReason.DONE, weight_versions=(version, version))
    return TrajectoryGroup("g", prompt(0), (one,))


def buffer(max_age: int, *, running: dict[int, int], complete: dict[int, int]) -> ReplayBuffer:
    """Versions at issue by place."""
    made = ReplayBuffer(num_groups_per_step=2, max_age_steps=max_age)
    for prompt_index, version in (running | complete).items():
        made.issue(prompt_index, version)
    for prompt_index, version in complete.items():
        made.finish(prompt_index, group(version))
    return made


def chosen(made: ReplayBuffer, version: int, count: int = 2):
    choice = made.choose(version, count)
    return choice if isinstance(choice, WaitReason) else [one.prompt_index for one in choice]


def test_room_is_the_age_bound_in_steps_and_one_more_while_the_trainer_waits() -> None:
    made = buffer(2, running={0: 0}, complete={1: 0})
    assert (made.capacity(is_trainer_waiting=False), made.capacity(is_trainer_waiting=True)) == (2, 4)
    assert buffer(0, running={}, complete={}).capacity(is_trainer_waiting=False) == 0
    assert buffer(0, running={0: 0, 1: 0, 2: 0}, complete={}).capacity(is_trainer_waiting=True) == 0


def test_the_oldest_are_chosen_and_come_in_the_order_of_the_prompts() -> None:
    assert chosen(buffer(3, running={}, complete={4: 0, 1: 1, 0: 2, 3: 0}), 2) == [3, 4]


def test_too_few_complete_groups_are_awaited() -> None:
    assert chosen(buffer(3, running={1: 0}, complete={0: 0}), 0) is WaitReason.TOO_FEW


def test_a_running_group_is_passed_over_while_later_steps_have_room_for_it() -> None:
    """Issued at 0 with a bound of 2: versions 0 and 1 may pass over it, version 2 may not."""
    made = buffer(2, running={0: 0}, complete={1: 0, 2: 1})
    assert chosen(made, 1) == [1, 2]
    assert chosen(made, 2) is WaitReason.LATE


def test_as_many_are_passed_over_as_one_step_takes() -> None:
    complete = {5: 0, 6: 1}
    assert chosen(buffer(1, running={0: 0, 1: 0}, complete=complete), 0) == [5, 6]
    assert chosen(buffer(1, running={0: 0, 1: 0, 2: 0}, complete=complete), 0) is WaitReason.LATE


def test_waiting_that_would_change_nothing_is_not_done() -> None:
    """Three complete groups at the bound of a step of two: one is lost whatever is awaited."""
    assert chosen(buffer(0, running={7: 4}, complete={0: 4, 1: 4, 2: 4}), 4) == [0, 1]


def test_complete_groups_are_as_old_as_their_rollouts_say() -> None:
    made = ReplayBuffer(num_groups_per_step=2, max_age_steps=1)
    made.issue(0, 3)
    made.finish(0, group(5))
    made.issue(1, 3)
    made.finish(1, group(2))
    assert [one.weight_version for one in made.complete] == [5, 2]
    assert [one.prompt_index for one in made.expired(4)] == [1]


def test_running_groups_at_the_bound_are_named() -> None:
    made = buffer(2, running={0: 0, 1: 1}, complete={2: 0})
    assert [made.running_at_age_limit(version) for version in (1, 2, 3)] == [(), (0,), (0, 1)]


def test_what_a_smaller_bound_cannot_train_in_time_is_named() -> None:
    made = buffer(1, running={}, complete={0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 0})
    assert [one.prompt_index for one in made.unschedulable(1)] == [3, 4]  # versions 1 and 2 take two each, p5 first


NUM_PROMPTS = 5
LOADER = PromptLoader([prompt(i) for i in range(NUM_PROMPTS)], shuffle=True, seed=1, max_epochs=3)
TEXT = st.text(max_size=5)
SECONDS = st.floats(0, 1e6)
CALLS = st.builds(ToolCall, TEXT, TEXT, TEXT)
PARTS = st.lists(st.builds(TextPart, TEXT) | st.builds(ThinkingPart, TEXT) | CALLS, max_size=4)
RESULTS = st.builds(ToolResult, st.none() | TEXT, st.lists(st.builds(TextPart, TEXT), max_size=2).map(tuple))
MESSAGES = (
    st.builds(Message, st.sampled_from(("system", "user", "assistant")), TEXT, st.lists(CALLS, max_size=2).map(tuple))
    | st.builds(Message, st.just("tool"), TEXT, tool_call_id=st.none() | TEXT)
    | st.builds(Message, st.just("assistant"), PARTS)
    | st.builds(Message, st.just("tool"), st.tuples(RESULTS))
)
SPANS = st.lists(st.builds(WeightSpan, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple)


@st.composite
def columns(draw, num_tokens: int) -> TokenColumns:
    names = draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from(("uint8", "uint16", "int32")), max_size=2))
    shape, generator = (num_tokens, draw(st.integers(1, 3))), np.random.default_rng(len(names))
    arrays = {name: generator.integers(0, 255, shape).astype(dtype) for name, dtype in names.items()}
    return TokenColumns(arrays) if names else NO_COLUMNS


FEATURES = [
    ImageFeatures(name * 64, {"pixel_values": np.full((1, 2), number, np.float32)}, 1)
    for number, name in enumerate("ab")
]


@st.composite
def tokenized(draw) -> TokenizedMessage:
    token_ids = tuple(draw(st.lists(st.integers(0, 2**31), max_size=4)))
    logprobs = None
    if draw(st.booleans()):
        logprobs = tuple(draw(st.floats(max_value=0, allow_nan=False)) for _ in token_ids)
    images = tuple(draw(st.lists(st.sampled_from(FEATURES), max_size=2))) if token_ids else ()
    placed = tuple(PlacedImage(one, (len(token_ids) - 1,)) for one in images)
    policy = draw(st.sampled_from(("", "first")))
    own = draw(columns(len(token_ids)))
    return TokenizedMessage(draw(MESSAGES), token_ids, logprobs, draw(SPANS), own, placed, policy)


LOGS = st.lists(tokenized(), max_size=3).map(tuple)


@st.composite
def groups(draw, place: int) -> BufferedGroup:
    loaded = LOADER.at(place)

    def trajectory(index: int) -> Trajectory:
        failure = draw(st.none() | st.builds(Failure, st.sampled_from(FailureClass), TEXT))
        reasons = [reason for reason in StopReason if reason is not StopReason.FAILED]
        other_chains = tuple(draw(st.lists(LOGS, max_size=2)))
        chain_rewards = [draw(st.dictionaries(TEXT, SECONDS, max_size=2)) for _ in range(1 + len(other_chains))]
        return Trajectory(
            prompt=loaded.prompt,
            group_id=loaded.group_id,
            generation_index=index,
            message_log=draw(LOGS),
            stop_reason=StopReason.FAILED if failure else draw(st.sampled_from(reasons)),
            rewards={} if failure else draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2)),
            answer=draw(st.none() | TEXT),
            num_turns=draw(st.integers(0, 5)),
            weight_versions=draw(st.tuples(st.integers(0, 5), st.integers(0, 5))),
            failure=failure,
            timings=draw(st.builds(Timings, SECONDS, SECONDS, SECONDS)),
            other_chains=other_chains,
            loss_weight=draw(st.sampled_from((0.0, 1.0))),
            chain_rewards=tuple(chain_rewards) if draw(st.booleans()) else (),
            response_faults=tuple(draw(st.lists(TEXT, max_size=2))),
            policy_rewards=draw(st.dictionaries(TEXT, st.dictionaries(TEXT, SECONDS, max_size=2), max_size=2)),
        )

    members = tuple(trajectory(index) for index in range(draw(st.integers(1, 3))))
    return BufferedGroup(place, draw(st.integers(0, 5)), TrajectoryGroup(loaded.group_id, loaded.prompt, members))


@st.composite
def states(draw) -> ReplayBufferState:
    places = draw(st.lists(st.integers(0, 3 * NUM_PROMPTS - 1), unique=True, max_size=4))
    return ReplayBufferState(
        complete=tuple(draw(groups(place)) for place in places[1:]),
        in_flight=tuple(places[:1]),
        dropped=tuple(draw(st.lists(st.builds(DroppedGroup, TEXT, TEXT), max_size=2))),
    )


@settings(max_examples=25, deadline=None)
@given(states())
def test_a_buffer_comes_back_as_it_was(tmp_path_factory, state: ReplayBufferState) -> None:
    path: Path = tmp_path_factory.mktemp("state") / "replay_buffer.pt"
    save_state(path, buffer_state_to_dict(state))
    assert buffer_state_from_dict(load_state(path), LOADER) == state


def test_no_field_of_a_rollout_is_forgotten() -> None:
    """A new field must be written down and drawn above; then it belongs here."""
    assert [f.name for f in fields(TokenizedMessage)] == [
        "message", "token_ids", "generation_logprobs", "weight_spans", "columns", "images", "policy",
    ]  # fmt: skip
    assert [f.name for f in fields(Message)] == ["role", "parts"]
    assert [f.name for f in fields(Trajectory)] == [
        "prompt", "group_id", "generation_index", "message_log", "stop_reason", "rewards", "answer", "num_turns",
        "weight_versions", "failure", "timings", "other_chains", "loss_weight", "chain_rewards", "response_faults",
        "policy_rewards",
    ]  # fmt: skip


def test_the_pixels_of_images_come_back_once_each(tmp_path: Path) -> None:
    placed = [PlacedImage(FEATURES[number], (number,)) for number in (0, 1)]
    log = tuple(TokenizedMessage(Message("user", "x"), (1, 2), images=(each,)) for each in (*placed, placed[0]))
    loaded = LOADER.at(0)
    rollout = Trajectory(loaded.prompt, loaded.group_id, 0, log, StopReason.DONE)
    group = TrajectoryGroup(loaded.group_id, loaded.prompt, (rollout,))
    plain = buffer_state_to_dict(ReplayBufferState(complete=(BufferedGroup(0, 0, group),)))
    assert len(plain["images"]) == 2
    save_state(tmp_path / "state.pt", plain)
    (read,) = buffer_state_from_dict(load_state(tmp_path / "state.pt"), LOADER).complete
    found = [image.features for image in placed_images(read.group.trajectories[0].message_log)]
    assert found[0] is found[2]
    for features, own in zip(found, (0, 1, 0), strict=True):
        assert np.array_equal(features.arrays["pixel_values"], FEATURES[own].arrays["pixel_values"])


def test_the_state_of_a_synchronous_run_has_an_empty_buffer() -> None:
    assert extract_buffer_state({}, LOADER) == ReplayBufferState()
    assert (
        extract_buffer_state({REPLAY_BUFFER: buffer_state_to_dict(ReplayBufferState())}, LOADER) == ReplayBufferState()
    )
