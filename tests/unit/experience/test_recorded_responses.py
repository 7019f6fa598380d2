import asyncio

import pytest

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.loader import PromptLoader
from nemo_rl.errors import DataError
from nemo_rl.experience.sources import RecordedResponseSource
from nemo_rl.types import Message, Prompt, StopReason, Trajectory
from tests.fakes.chat_tokenizer import chat_tokenizer


def source(*responses: str | None, max_total_length: int = 100) -> RecordedResponseSource:
    prompts = [
        Prompt(f"p{i}", "math", (Message("user", "question"),), {} if text is None else {"answer": text})
        for i, text in enumerate(responses)
    ]
    loader = PromptLoader(prompts, shuffle=False, seed=0, max_epochs=1)
    return RecordedResponseSource(
        loader,
        ChatEncoder(chat_tokenizer()),
        num_prompts_per_step=2,
        max_total_length=max_total_length,
    )


def drawn(responses: RecordedResponseSource) -> list[Trajectory]:
    return [t for group in asyncio.run(responses.next_groups(0)).groups for t in group.trajectories]


def test_each_prompt_has_a_group_of_its_own_response() -> None:
    responses = source("a b c", "d", "e")
    first, second = drawn(responses)
    encoder = responses.encoder
    written = [encoder.decode(t.message_log[-1].token_ids).split() for t in (first, second)]
    assert written == [["a", "b", "c"], ["d"]]
    assert all(t.message_log[-1].token_ids[-1] in encoder.stop_token_ids for t in (first, second))
    assert first.message_log[-1].is_generated
    assert not any(message.is_generated for message in first.message_log[:-1])
    assert first.group_id != second.group_id
    assert first.stop_reason is StopReason.DONE
    (third,) = drawn(responses)
    assert third.message_log[-1].message.content == "e"
    with pytest.raises(StopAsyncIteration):
        asyncio.run(responses.next_groups(0))


def test_it_goes_on_where_it_was() -> None:
    responses, again = source("a", "b", "c"), source("a", "b", "c")
    drawn(responses)
    again.load_state_dict(responses.state_dict())
    (left,) = drawn(again)
    assert left.prompt.prompt_id == "p2"


def test_a_response_is_cut_where_the_sequence_ends() -> None:
    (whole,) = drawn(source("a b c d"))
    length = whole.num_tokens
    (cut,) = drawn(source("a b c d", max_total_length=length - 2))
    assert (cut.num_tokens, cut.stop_reason) == (length - 2, StopReason.TRUNCATED)


@pytest.mark.parametrize("response", [None, ""])
def test_a_row_without_a_response_is_named(response: str | None) -> None:
    with pytest.raises(DataError, match=r"p0.*off_policy"):
        drawn(source(response))
