"""The replay buffer through the plain values of a checkpoint."""

from dataclasses import fields
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.checkpoint import load_state, save_state
from nemo_rl.data.loader import PromptLoader
from nemo_rl.experience.replay_buffer import (
    REPLAY_BUFFER,
    BufferedGroup,
    DroppedGroup,
    ReplayBufferState,
    buffer_state_from_dict,
    buffer_state_to_dict,
    extract_buffer_state,
)
from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    StopReason,
    Timings,
    TokenizedMessage,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from tests.unit.experience.rollout_setup import prompt

NUM_PROMPTS = 5
LOADER = PromptLoader([prompt(i) for i in range(NUM_PROMPTS)], shuffle=True, seed=1, max_epochs=3)
TEXT = st.text(max_size=5)
SECONDS = st.floats(0, 1e6)
MESSAGES = st.builds(
    Message,
    st.sampled_from(("system", "user", "assistant", "tool")),
    TEXT,
    st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple),
    st.none() | TEXT,
)
SPANS = st.lists(st.builds(WeightSpan, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple)


@st.composite
def tokenized(draw) -> TokenizedMessage:
    token_ids = tuple(draw(st.lists(st.integers(0, 2**31), max_size=4)))
    logprobs = None
    if draw(st.booleans()):
        logprobs = tuple(draw(st.floats(max_value=0, allow_nan=False)) for _ in token_ids)
    return TokenizedMessage(draw(MESSAGES), token_ids, logprobs, draw(SPANS))


LOGS = st.lists(tokenized(), max_size=3).map(tuple)


@st.composite
def groups(draw, place: int) -> BufferedGroup:
    loaded = LOADER.at(place)

    def trajectory(index: int) -> Trajectory:
        failure = draw(st.none() | st.builds(Failure, st.sampled_from(FailureClass), TEXT))
        reasons = [reason for reason in StopReason if reason is not StopReason.FAILED]
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
            other_chains=tuple(draw(st.lists(LOGS, max_size=2))),
            loss_weight=draw(st.sampled_from((0.0, 1.0))),
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
        "message", "token_ids", "generation_logprobs", "weight_spans",
    ]  # fmt: skip
    assert [f.name for f in fields(Message)] == ["role", "content", "tool_calls", "tool_call_id"]
    assert [f.name for f in fields(Trajectory)] == [
        "prompt", "group_id", "generation_index", "message_log", "stop_reason", "rewards", "answer", "num_turns",
        "weight_versions", "failure", "timings", "other_chains", "loss_weight",
    ]  # fmt: skip


def test_the_state_of_a_synchronous_run_has_an_empty_buffer() -> None:
    assert extract_buffer_state({}, LOADER) == ReplayBufferState()
    assert (
        extract_buffer_state({REPLAY_BUFFER: buffer_state_to_dict(ReplayBufferState())}, LOADER) == ReplayBufferState()
    )
