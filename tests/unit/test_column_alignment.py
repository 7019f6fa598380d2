"""Columns stay with their tokens on every way from an engine to a micro-batch.

The engine's row of a token is a function of the token and its place in the conversation, so that a row that has moved,
or belongs to another token, shows. `experts` has a row for every token but the last sampled one; `drawn` only for
sampled tokens, of a width that differs by request.
"""

import asyncio
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.checkpoint import load_state, save_state
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.replay_buffer import BufferedGroup, ReplayBufferState
from nemo_rl.experience.replay_buffer_state import buffer_state_from_dict, buffer_state_to_dict
from nemo_rl.experience.rollout_rows import encode_json_line, rollout_row
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout, run_multi_turn_rollout
from nemo_rl.gateway.echoes import Claim, EchoedCallStore, build_chains, resolve_claims
from nemo_rl.gateway.sessions import Chain, Echo, PendingCall, Session
from nemo_rl.policy.attention import PackedSequences, SharedPrefixes
from nemo_rl.policy.batch_transfer import SentBatch
from nemo_rl.policy.micro_batches import PackedTokens, PackedTrees, PaddedTokens, SampleCount, columns_of, micro_batches
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.token_columns import NO_COLUMNS, TokenColumns
from nemo_rl.types import (
    Completion,
    FailedRequest,
    GenerationRequest,
    Message,
    StopReason,
    TokenizedMessage,
    Trajectory,
    TrajectoryGroup,
)
from nemo_rl.viewer.replay import read_trajectory
from tests.fakes.environments import FakeEnvironment, episodic
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.rollout_setup import OPTIONS, VOCAB_SIZE, dependencies, jobs
from tests.unit.experience.test_replay_buffer import LOADER
from tests.unit.gateway.engines import codec_of, completion_of, tokens_of

EXPERTS, DRAWN = "experts", "drawn"
BATCHINGS = (
    SampleCount(3),
    PaddedTokens(700, "key", 4),
    PackedTokens(700, "key", "first_fit_decreasing"),
    PackedTrees(700, "key", "first_fit_decreasing"),
)


def experts(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the rows of tokens: [..., 2, 1] uint8, none of which is 255."""
    return np.stack([(37 * token_ids + 11 * positions) % 251, (token_ids + 3 * positions) % 251], -1)[..., None].astype(
        np.uint8
    )


def drawn(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the rows of sampled tokens: [..., 3] int32, from one entry on."""
    rows = np.stack([token_ids, 1000 + positions, 7 * token_ids + positions], -1)
    widths = 1 + (token_ids + positions) % 3
    return np.where(np.arange(3) < widths[..., None], rows, -1).astype(np.int32)


def decide(prompt: Sequence[int], sampled: Sequence[int]) -> TokenColumns:
    """Return the columns of a request and its response."""
    token_ids, count = np.array([*prompt, *sampled]), len(sampled)
    positions = np.arange(len(token_ids))
    routed, sets = experts(token_ids, positions), drawn(token_ids, positions)
    routed[-1:] = 255
    sets[: len(prompt)] = -1
    return TokenColumns({EXPERTS: routed, DRAWN: np.pad(sets, ((0, 0), (0, count % 3)), constant_values=-1)})


class DecidingEngine(FakeGeneration):
    """Gives columns with each answer; if `is_partial` only for requests of an even seed."""

    is_partial = False

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        answer = await super()._answer(request)
        if isinstance(answer, FailedRequest) or (self.is_partial and request.seed % 2):
            return answer
        return replace(answer, columns=decide(request.token_ids, answer.token_ids))


# ---- rollouts ----


def from_turns(data: st.DataObject, *, is_partial: bool) -> list[Trajectory]:
    """Return rollouts of the turn engine: of 1 to 4 turns, some cut by their length."""
    engine = DecidingEngine(vocab_size=VOCAB_SIZE)
    engine.is_partial = is_partial
    environment = FakeEnvironment(episodic(data.draw(st.integers(0, 99))))
    setup = dependencies(engine, {"game": environment})
    options = replace(OPTIONS, seed=data.draw(st.integers(0, 99)))
    run = data.draw(st.sampled_from((run_async_multi_turn_rollout, run_multi_turn_rollout)))
    return list(asyncio.run(run(jobs(2, 2), setup, options)))


TEXTS = st.sampled_from(("yes", "no", "a longer answer"))


def answer_to(call: PendingCall, text: str) -> Completion:
    ids = tokens_of("chatml", text)
    return replace(completion_of(ids), columns=decide(call.prompt_token_ids, ids))


def from_session(data: st.DataObject) -> list[Chain]:
    """Return an agent's chains: continued, branched, sampled twice, beside the task."""
    session = Session(codec_of("chatml"))
    histories: list[list[Message]] = [[]]
    for number in range(data.draw(st.integers(1, 6))):
        history = [*data.draw(st.sampled_from(histories)), Message("user", data.draw(TEXTS))]
        call, text = session.begin(history), data.draw(TEXTS)
        said, is_side_call = Message("assistant", text), data.draw(st.booleans()) and number > 0
        session.commit(call, answer_to(call, text), said, completion_id=f"c{number}", is_side_call=is_side_call)
        histories.append([*history, said])
    return list(session.chains())


def from_echoes(data: st.DataObject) -> list[Chain]:
    """Return the chains of some of a client's calls, which sends their tokens back."""
    store = EchoedCallStore(codec_of("chatml"), max_calls=99, ttl_s=60.0, clock=lambda: 0.0)
    calls: list[tuple[Echo, list[Message]]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        echo, history = data.draw(st.sampled_from(calls)) if calls and data.draw(st.booleans()) else (None, [])
        messages = [*history, Message("user", data.draw(TEXTS))]
        call = store.begin(messages, echo=echo, num_known=len(history))
        text = data.draw(TEXTS)
        answer = answer_to(call, text)
        store.commit(call, answer, Message("assistant", text))
        calls.append((Echo(call.prompt_token_ids, answer.token_ids), [*messages, Message("assistant", text)]))
    kept = data.draw(st.lists(st.sampled_from([echo for echo, _ in calls]), min_size=1, unique=True))
    claims = [Claim(echo, completion_of(echo.generation_token_ids).logprobs) for echo in kept]
    return list(build_chains(resolve_claims(claims, store.find)))


def from_gateway(chains: Sequence[Chain]) -> list[Trajectory]:
    prompt = LOADER.at(0).prompt
    log, *others = (chain.message_log for chain in chains)
    return [
        Trajectory(prompt, "g", index, log, StopReason.DONE, {"r": 1.0}, other_chains=tuple(others))
        for index in range(2)
    ]


# ---- storage ----


def kept(trajectories: list[Trajectory], directory: Path) -> list[Trajectory]:
    return trajectories


def resumed(trajectories: list[Trajectory], directory: Path) -> list[Trajectory]:
    """Return what a checkpoint of the replay buffer brings back."""
    loaded = LOADER.at(0)
    group = TrajectoryGroup(loaded.group_id, loaded.prompt, tuple(trajectories))
    save_state(directory / "buffer.pt", buffer_state_to_dict(ReplayBufferState((BufferedGroup(0, 0, group),))))
    (one,) = buffer_state_from_dict(load_state(directory / "buffer.pt"), LOADER).complete
    return list(one.group.trajectories)


def recorded(trajectories: list[Trajectory], directory: Path) -> list[Trajectory]:
    """Return what rows of rollouts/train.jsonl bring back."""
    lines = [
        encode_json_line(rollout_row(each, write_token_ids=True, write_token_columns=True)) for each in trajectories
    ]
    return [read_trajectory(json.loads(line)) for line in lines]


# ---- batches ----


def check(name: str, table: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Check rows of a column [..., T, ...] against their tokens, and return which are given: [..., T] bool."""
    row = {EXPERTS: experts, DRAWN: drawn}[name](ids.numpy(), positions.numpy())
    values = table.numpy()
    fill = 255 if name == EXPERTS else -1
    values, extra = values[..., : row.shape[-1]], values[..., row.shape[-1] :]
    assert (extra == fill).all()
    trailing = tuple(range(ids.ndim, row.ndim))
    is_given = (values != fill).any(axis=trailing)
    assert np.array_equal(values[is_given], row[is_given])
    return torch.from_numpy(is_given)


def check_layout(part: TensorDict, batching: object) -> None:
    """Check the columns in the order in which a policy lays the tokens of a micro-batch out."""
    columns, ids, lengths = columns_of(part), part[keys.TOKEN_IDS], part[keys.LENGTHS].tolist()
    assert columns is not None
    pack = None
    if isinstance(batching, PackedTrees):
        pack = SharedPrefixes.of(ids, lengths)
    elif isinstance(batching, PackedTokens):
        pack = PackedSequences.of(lengths, ids.shape[1], ids.device)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    for name, column in columns.items():
        if pack is None:
            check(name, column, ids, positions)
        else:
            inputs = pack.model_inputs(ids)
            check(name, pack.lay_out(column), inputs["input_ids"], inputs["position_ids"])


@settings(max_examples=40)
@given(
    data=st.data(),
    source=st.sampled_from(("turns", "partial turns", "session", "echoes")),
    store=st.sampled_from((kept, resumed, recorded)),
    batching=st.sampled_from(BATCHINGS),
    num_ranks=st.integers(1, 2),
)
def test_a_column_stays_with_its_tokens(tmp_path_factory, data, source, store, batching, num_ranks) -> None:
    if source in ("session", "echoes"):
        chains = (from_session if source == "session" else from_echoes)(data)
        trajectories = from_gateway(chains)
    else:
        trajectories = from_turns(data, is_partial=source == "partial turns")
    trajectories = store(trajectories, tmp_path_factory.mktemp("columns"))
    groups = [TrajectoryGroup("g", trajectories[0].prompt, tuple(trajectories))]
    batch, _ = assemble_batch(groups, min_group_size=1)
    batch = pickle.loads(pickle.dumps(SentBatch(batch)))
    if columns_of(batch) is None:
        assert source == "partial turns"  # of which no request may have had columns
        return
    length = torch.arange(batch[keys.TOKEN_IDS].shape[1])
    positions = length.expand(batch[keys.TOKEN_IDS].shape)
    given_rows = {name: check(name, c, batch[keys.TOKEN_IDS], positions) for name, c in batch[keys.COLUMNS].items()}
    if source != "partial turns":  # all of them, and none more
        sampled = batch[keys.TOKEN_MASK] > 0
        last = (sampled * length).amax(1, keepdim=True)  # an input of another chain's request alone, if at all
        assert (given_rows[EXPERTS] | (length >= last)).all()
        assert not (given_rows[EXPERTS] & (length > last)).any()
        assert torch.equal(given_rows[DRAWN], sampled)
    seen = []
    for rank in range(num_ranks):
        layout = RankLayout(rank, data_parallel_size=num_ranks, init_method="file:///unused" if num_ranks > 1 else None)
        for rows, part in micro_batches(batch, torch.arange(len(batch)), batching, layout):
            seen += rows.tolist()
            if len(rows):
                check_layout(part, batching)
    assert sorted(seen) == list(range(len(batch)))


def test_nothing_is_made_where_no_engine_gives_a_column() -> None:
    setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment(episodic(3))})
    trajectories = asyncio.run(run_async_multi_turn_rollout(jobs(2, 2), setup, OPTIONS))
    assert all(message.columns is NO_COLUMNS for t in trajectories for log in t.chains for message in log)
    batch, _ = assemble_batch([TrajectoryGroup("g", trajectories[0].prompt, trajectories)], min_group_size=1)
    assert keys.COLUMNS not in batch
    assert columns_of(batch) is None
    row = rollout_row(trajectories[0], write_token_ids=True, write_token_columns=True)
    assert not any("columns" in message for message in row["messages"])


def test_an_engine_with_rows_for_other_tokens_breaks_its_contract() -> None:
    class Careless(FakeGeneration):
        async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
            answer = await super()._answer(request)
            assert isinstance(answer, Completion)
            return replace(answer, columns=decide(request.token_ids[1:], answer.token_ids))

    setup = dependencies(Careless(vocab_size=VOCAB_SIZE), {"game": FakeEnvironment()})
    (trajectory,) = asyncio.run(run_async_multi_turn_rollout(jobs(1), setup, OPTIONS))
    assert trajectory.failure is not None
    assert "the engine gave TokenColumns(experts: uint8[" in trajectory.failure.cause


@pytest.mark.parametrize("limit", [60, 59])
def test_rows_of_rollouts_hold_columns_up_to_their_limit(monkeypatch, limit) -> None:
    """Two messages of 2 and 1 tokens with 20 bytes each: the second does not fit 59."""
    one = TokenColumns({EXPERTS: np.zeros((2, 20), np.uint8)}), TokenColumns({EXPERTS: np.zeros((1, 20), np.uint8)})
    messages = tuple(TokenizedMessage(Message("user", "x"), tuple(range(c.num_tokens)), columns=c) for c in one)
    trajectory = Trajectory(LOADER.at(0).prompt, "g", 0, messages, StopReason.DONE, {"r": 1.0})
    monkeypatch.setattr("nemo_rl.experience.rollout_rows.MAX_COLUMN_BYTES", limit)
    row = rollout_row(trajectory, write_token_ids=True, write_token_columns=True)
    assert ["columns" in message for message in row["messages"]] == [True, limit == 60]
