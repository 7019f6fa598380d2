import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.gateway.codec import Codec
from nemo_rl.types import Message
from tests.unit.gateway.engines import CALL_TEXT, codec_of, encoder_of, tokens_of


def test_thinking_text_and_calls_are_read_apart():
    ids = tokens_of("qwen3", f"<think>sum</think>\nLet me add.\n{CALL_TEXT}")
    response = codec_of("qwen3").read(ids, call_id_seed="1")
    assert response.reasoning == "sum"
    assert response.message.content == "Let me add."
    (call,) = response.message.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 3, "b": 4}')


def test_ids_of_calls_are_nine_letters_or_digits_and_follow_the_seed():
    ids = tokens_of("qwen3", CALL_TEXT + CALL_TEXT)
    first, again, other = (codec_of("qwen3").read(ids, call_id_seed=seed).message for seed in ("1", "1", "2"))
    assert first == again
    call_ids = [call.id for call in (*first.tool_calls, *other.tool_calls)]
    assert len(set(call_ids)) == 4
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in call_ids)


def test_without_tools_or_parsers_calls_and_thinking_stay_text():
    text = f"<think>sum</think>{CALL_TEXT}"
    ids = tokens_of("qwen3", text)
    assert Codec(encoder_of("qwen3")).read(ids, call_id_seed="1").message == Message("assistant", text)
    assert codec_of("qwen3").read(ids, call_id_seed="1", with_tools=False).message == Message("assistant", CALL_TEXT)


@pytest.mark.parametrize(
    ("stop", "content"), [(("b",), "a"), (("cd", "bc"), "a"), (("z",), "abcd"), (("cd", "z"), "ab")]
)
def test_text_ends_before_the_first_stop_string(stop, content):
    response = codec_of("chatml").read(tokens_of("chatml", "abcd"), call_id_seed="1", stop_strings=stop)
    assert response.message.content == content


def test_a_tools_answer_that_the_template_would_drop_is_refused_at_the_start_of_a_chain():
    messages = (Message("user", "3+4"), Message("assistant", "call"), Message("tool", "7"))
    with pytest.raises(ConfigError, match="role tool"):
        codec_of("zephyr").encode_first_turn(messages, ())
    assert codec_of("chatml").encode_first_turn(messages, ())
