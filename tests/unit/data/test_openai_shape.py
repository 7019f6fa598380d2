from nemo_rl.data.chat import to_openai_message
from nemo_rl.types import Message, ToolCall


def test_keys_stand_only_where_they_say_something() -> None:
    called = Message("assistant", "", (ToolCall("c1", "add", '{"a": 1}'),))
    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    assert to_openai_message(called) == {"role": "assistant", "content": "", "tool_calls": calls}
    answer = Message("tool", "2", tool_call_id="c1")
    assert to_openai_message(answer) == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert to_openai_message(Message("user", "hi")) == {"role": "user", "content": "hi"}
