"""Conversations to train on: read from rows and encoded."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.conversations import Conversation, encode_conversation, encode_conversations, read_conversations
from nemo_rl.data.example_sets import ExampleSet
from nemo_rl.data.supervised_samples import MASKED_TOKENS, SupervisedSample, make_supervised_batch
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.losses.likelihood import negative_log_likelihood
from nemo_rl.policy.micro_batches import count_valid
from nemo_rl.types import Message, TokenizedMessage, ToolCall
from tests.templates import SPECIAL_TOKENS, byte_tokenizer

ASKED, ANSWERED = Message("user", "2+2"), Message("assistant", "4")


def read(*rows: dict[str, Any], **section: Any) -> list[Conversation]:
    return read_conversations(rows, DatasetConfig(dataset_name="jsonl", **section), key="data.train")


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def of(question: str, answer: str = "yes") -> dict[str, Any]:
    return {"input": question, "output": answer}


@pytest.mark.parametrize(
    "row",
    [
        {"input": "2+2", "output": "4"},
        {"prompt": "2+2", "response": "4"},
        {"prompt": "2+2", "completion": "4"},
        {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]},
        {"task": "sums", "entry": {"question": "2+2", "answer": "4"}},
    ],
)
def test_rows_of_every_shape_are_a_question_and_its_answer(row: dict[str, Any]) -> None:
    assert read(row) == [Conversation((ASKED, ANSWERED))]


def test_named_fields_win_over_those_that_are_known() -> None:
    row = {"input": "x", "output": "y", "q": "2+2", "a": "4"}
    assert read(row, input_key="q", output_key="a") == [Conversation((ASKED, ANSWERED))]


def test_calls_and_tools_are_kept_and_what_nobody_answers_is_left_out(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "thanks"},
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    prompt = tmp_path / "system.txt"
    prompt.write_text("Be brief.")
    (conversation,) = read({"messages": messages, "tools": [tool]}, system_prompt_file=str(prompt))
    assert conversation.messages == (
        Message("system", "Be brief."),
        ASKED,
        Message("assistant", "", (ToolCall("c1", "add", '{"a": 2}'),)),
        Message("tool", "4", (), "c1"),
        ANSWERED,
    )
    assert conversation.tools == (tool,)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "2+2"}, "has no field 'input'"),
        ({"input": "2+2", "output": 4}, "4 is int, not text"),
        ({"messages": [{"role": "user", "content": "2+2"}]}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, "nothing opens its turn"),
        ({"messages": [{"role": "robot", "content": "hello"}]}, "is not a message with a role"),
    ],
)
def test_a_row_that_cannot_be_learnt_from_is_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=rf"data\.train \(jsonl\): row 1: .*{problem}"):
        read(of("2+2"), row)


REFUSED = ("deepseek_r1", "hides_assistant")
TERMINATORS = {
    "chatml": "<|im_end|>", "smollm2": "<|im_end|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama2": "</s>",
    "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "mistral_v1": "</s>", "mistral_v3": "</s>",
    "gemma": "<end_of_turn>", "zephyr": "</s>", "phi3": "<|end|>", "plain_text": "</s>",
}  # fmt: skip
REWRITING = ("qwen3", "plain_text")  # of earlier turns thinking is dropped; no token ends a turn
TALK = Conversation(
    (Message("user", "hi"), Message("assistant", "yes"), Message("user", "and?"), Message("assistant", "4 <b>\n5"))
)


def learnt(tokenizer, sample: SupervisedSample) -> list[str]:
    """The runs of tokens with a mask, as texts."""
    pairs = zip(sample.token_ids.tolist(), sample.token_mask.tolist(), strict=True)
    runs = [(mask, [token for token, _ in run]) for mask, run in itertools.groupby(pairs, key=lambda pair: pair[1])]
    return [tokenizer.decode(tokens) for mask, tokens in runs if mask]


def rendered(tokenizer, conversation: Conversation) -> str:
    messages = [{"role": each.role, "content": each.content} for each in conversation.messages]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


@pytest.mark.parametrize("name", TERMINATORS)
def test_the_assistants_turns_with_their_ends_are_learnt_and_nothing_else(name: str) -> None:
    tokenizer = byte_tokenizer(name)
    first, second = learnt(tokenizer, encode_conversation(ChatEncoder(tokenizer), TALK))
    thinking = "<think>\n\n</think>\n\n" if name == "qwen3" else ""  # what that template lets a last turn begin with
    for run, answer in ((first, "yes"), (second, "4 <b>\n5")):
        assert run.endswith(TERMINATORS[name])
        assert run.removesuffix(TERMINATORS[name]).strip() == thinking + answer


@pytest.mark.parametrize("name", [name for name in TERMINATORS if name not in REWRITING])
def test_the_whole_text_is_the_templates_own(name: str) -> None:
    tokenizer = byte_tokenizer(name)
    sample = encode_conversation(ChatEncoder(tokenizer), TALK)
    text = str(tokenizer.decode(sample.token_ids.tolist()))
    rest = rendered(tokenizer, TALK).removeprefix(text)
    assert rest in ("", " ", "\n", "\n<|endoftext|>")  # what stands behind the last turn's end
    assert sample.token_mask[-1]


@pytest.mark.parametrize("name", TERMINATORS)
def test_context_is_what_a_rollout_would_hold(name: str) -> None:
    """Tokens before each answer: those of the prompt, then of the bridge behind a sampled message."""
    encoder = ChatEncoder(byte_tokenizer(name))
    sample = encode_conversation(encoder, TALK)
    log = encoder.encode_prompt(TALK.messages[:1])
    for message, following in ((TALK.messages[1], TALK.messages[2:3]), (TALK.messages[3], ())):
        ids = flat_token_ids(log)
        assert tuple(sample.token_ids[: len(ids)]) == ids
        answer = encoder.encode_answer(message)
        log = (*log, TokenizedMessage(message, answer, (0.0,) * len(answer)))
        log = (*log, *encoder.encode_turn(log, following))
    assert tuple(sample.token_ids) == flat_token_ids(log)
    generated = np.concatenate([[each.is_generated] * len(each.token_ids) for each in log if each.token_ids])
    assert (sample.token_mask == generated).all()


def test_thinking_of_earlier_turns_is_learnt_though_the_template_drops_it() -> None:
    tokenizer = byte_tokenizer("qwen3")
    talk = Conversation((Message("user", "2+2"), Message("assistant", "<think>so</think>\n4"), *TALK.messages[2:]))
    runs = learnt(tokenizer, encode_conversation(ChatEncoder(tokenizer), talk))
    assert runs[0] == "<think>\nso\n</think>\n\n4<|im_end|>"
    assert "so" not in rendered(tokenizer, talk)


def test_white_space_of_an_answer_stays_where_no_token_ends_the_turn() -> None:
    tokenizer = byte_tokenizer("plain_text")
    talk = Conversation((Message("user", "hi"), Message("assistant", "a list:\n")))
    assert learnt(tokenizer, encode_conversation(ChatEncoder(tokenizer), talk)) == ["a list:\n</s>"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'),
        ("mistral_v3", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "call00001"}]</s>'),
    ],
)
def test_tool_calls_are_learnt_and_their_answers_are_not(name: str, text: str) -> None:
    tokenizer = byte_tokenizer(name)
    call = ToolCall("call00001", "add", '{"a": 1}')
    messages = (
        Message("user", "1?"),
        Message("assistant", "", (call,)),
        Message("tool", "7", tool_call_id="call00001"),
        Message("assistant", "It is 7"),
    )
    first, second = learnt(tokenizer, encode_conversation(ChatEncoder(tokenizer), Conversation(messages)))
    assert first.replace("\n<tool_call>", "<tool_call>").replace("[TOOL_CALLS] [", "[TOOL_CALLS][") == text
    assert second.strip() == f"It is 7{TERMINATORS[name]}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_hides_what_is_to_be_learnt_is_refused(name: str) -> None:
    assert SPECIAL_TOKENS.keys() == {*TERMINATORS, *REFUSED}
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template.*role assistant"):
        encode_conversation(ChatEncoder(byte_tokenizer(name)), TALK)


def talks(*answers: str) -> ExampleSet:
    return ExampleSet("talks", [Conversation((Message("user", "q"), Message("assistant", a))) for a in answers])


PROMPT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
COMPLETION = [{"role": "assistant", "content": "d"}]


def test_only_the_completion_of_messages_in_two_columns_is_trained_on(tmp_path: Path) -> None:
    system = tmp_path / "system.txt"
    system.write_text("short")
    tokenizer = byte_tokenizer("chatml")
    for options, number in (({}, 3), ({"system_prompt_file": str(system)}, 4)):
        (conversation,) = read({"prompt": PROMPT, "completion": COMPLETION}, **options)
        assert [message.content for message in conversation.messages][-4:] == ["a", "b", "c", "d"]
        assert conversation.num_context == number
        (answer,) = learnt(tokenizer, encode_conversation(ChatEncoder(tokenizer), conversation))
        assert answer.startswith("d")


@pytest.mark.parametrize(
    ("completion", "problem"),
    [("d", "completion is 'd': prompt is a list"), ([], "ends with the assistant's"), (PROMPT, "ends with the assist")],
)
def test_a_completion_that_does_not_end_with_an_answer_is_refused(completion: object, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read({"prompt": PROMPT, "completion": completion})


def test_overlong_conversations_are_left_out_or_cut_and_counted() -> None:
    encoder = ChatEncoder(byte_tokenizer("zephyr"))
    length = len(encode_conversation(encoder, talks("abc").examples[0]).token_ids)
    dropped = encode_conversations(encoder, talks("abc", "abcd", "ab"), max_tokens=length, overlong="drop")
    assert [len(sample.rows[0].token_ids) for sample in dropped.samples] == [length, length - 1]
    assert (dropped.num_overlong, dropped.num_dropped) == (1, 1)
    cut = encode_conversations(encoder, talks("abc", "abcd", "ab"), max_tokens=length, overlong="truncate")
    assert [len(sample.rows[0].token_ids) for sample in cut.samples] == [length, length, length - 1]
    assert (cut.num_overlong, cut.num_dropped) == (1, 0)
    with pytest.raises(DataError, match="no conversation has at most 5 tokens"):
        encode_conversations(encoder, talks("abc"), max_tokens=5, overlong="truncate")  # cut before its answer


def test_a_masked_conversation_keeps_its_place_without_weight_in_the_loss() -> None:
    encoder = ChatEncoder(byte_tokenizer("zephyr"))
    length = len(encode_conversation(encoder, talks("abc").examples[0]).token_ids)
    masked = encode_conversations(encoder, talks("abc", "abcd", "ab"), max_tokens=length, overlong="mask")
    assert [len(sample.rows[0].token_ids) for sample in masked.samples] == [length, MASKED_TOKENS, length - 1]
    assert (masked.num_overlong, masked.num_dropped) == (1, 0)
    batch = make_supervised_batch(masked.samples)
    others = make_supervised_batch([masked.samples[0], masked.samples[2]])
    assert batch[keys.SAMPLE_MASK].tolist() == [1, 0, 1]
    assert count_valid(batch, torch.arange(3)) == count_valid(others, torch.arange(2))
    logprobs = torch.full(batch[keys.TOKEN_IDS].shape, -0.5)
    assert negative_log_likelihood(logprobs, batch) == negative_log_likelihood(logprobs[:2], others)
    with pytest.raises(DataError, match="no conversation has at most"):
        encode_conversations(encoder, talks("abcd"), max_tokens=length, overlong="mask")


def test_a_refused_conversation_is_named_with_its_length() -> None:
    encoder = ChatEncoder(byte_tokenizer("zephyr"))
    length = len(encode_conversation(encoder, talks("abc").examples[0]).token_ids)
    problem = rf"data\.max_input_seq_length = {length}: conversation 1 of 'talks' has {length + 1} tokens"
    with pytest.raises(ConfigError, match=problem):
        encode_conversations(encoder, talks("abc", "abcd"), max_tokens=length, overlong="refuse")


def test_the_edges_of_a_set_are_its_tokenizers() -> None:
    tokenizer = byte_tokenizer("zephyr")
    tokenizer.bos_token = "<|user|>" if tokenizer.bos_token is None else tokenizer.bos_token
    encoder = ChatEncoder(tokenizer)
    first, last = encoder.edge_token_ids

    def encoded(**edges: bool) -> SupervisedSample:
        loaded = encode_conversations(encoder, talks("abc"), max_tokens=500, overlong="drop", **edges)
        return loaded.samples[0].rows[0]

    plain = encoded()
    expected = plain.with_edges(first, last)
    found = encoded(add_bos=True, add_eos=True)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.token_mask.tolist() == expected.token_mask.tolist()
    assert (found.token_ids[0], found.token_ids[-1]) == (first, last)
    assert encoded(add_bos=True).token_ids.tolist() == plain.with_edges(first, None).token_ids.tolist()


def test_without_an_end_of_its_own_an_answer_ends_as_add_eos_says() -> None:
    """A template that ends turns by text alone: the conversation's text, with or without the last token."""
    tokenizer = byte_tokenizer("plain_text")
    encoder = ChatEncoder(tokenizer)
    talk = (ASKED, ANSWERED, Message("user", "3+3"), Message("assistant", "6"))
    whole = rendered(tokenizer, Conversation(talk))
    _, last = encoder.edge_token_ids
    loaded = ExampleSet("talks", (Conversation(talk),))

    def encoded(add_eos: bool | None) -> list[int]:
        dataset = encode_conversations(encoder, loaded, max_tokens=500, overlong="refuse", add_eos=add_eos)
        return dataset.samples[0].rows[0].token_ids.tolist()

    assert last is not None
    plain = tokenizer.encode(whole, add_special_tokens=False)
    assert encoded(False) == plain
    assert encoded(True) == [*plain, last]
    assert encoded(None).count(last) == 2
