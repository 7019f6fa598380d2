"""What agents do to their histories, and what is trained of it."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.chat import flat_token_ids
from nemo_rl.errors import ConfigError
from nemo_rl.gateway.codec import ReadingRules
from nemo_rl.gateway.markup import strip_thinking
from nemo_rl.gateway.session_api import session_body
from nemo_rl.gateway.sessions import Chain, Echo, Session, history_digest, tools_digest
from nemo_rl.token_columns import NO_COLUMNS, TokenColumns
from nemo_rl.types import Message, ToolCall, WeightSpan
from tests.unit.gateway.engines import CALL_TEXT, TOOL, codec_of, completion_of, text_of, tokens_of

TEMPLATES = ("qwen2_5", "qwen3", "llama3", "llama3_1", "mistral_v3", "deepseek_r1", "chatml")
WITH_TOOLS = {"qwen2_5", "qwen3", "llama3_1", "mistral_v3", "deepseek_r1", "chatml"}
SYSTEM, HI = Message("system", "be brief"), Message("user", "hi")


@dataclass
class Agent:
    """Sends its history, keeps the answer; remembers what it was shown and what was sampled."""

    name: str
    session: Session
    messages: list[Message]
    tools: tuple[dict, ...] = ()
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    sampled: list[tuple[int, ...]] = field(default_factory=list)

    def ask(self, text: str, *, stopped: bool = True, **how: Any) -> Message:
        ids = tokens_of(self.name, text, stopped=stopped)
        return self.ask_ids(ids, **how)

    def ask_ids(self, ids: tuple[int, ...], *, id: str | None = None, is_side_call: bool = False) -> Message:
        call = self.session.begin(tuple(self.messages), self.tools)
        completion_id = id or f"c{self.session.num_calls}"
        said = codec_of(self.name).read(ids, ReadingRules(completion_id, with_tools=bool(self.tools))).message
        completion = completion_of(ids)
        self.session.commit(call, completion, said, completion_id=completion_id, is_side_call=is_side_call)
        self.prompts.append(call.prompt_token_ids)
        self.sampled.append(ids)
        return said


def agent_of(*messages: Message, name: str = "chatml", tools: tuple[dict, ...] = ()) -> Agent:
    return Agent(name, Session(codec_of(name)), list(messages), tools)


def tokens(chain: Chain) -> tuple[int, ...]:
    return flat_token_ids(chain.message_log)


def said_in(chain: Chain) -> list[str]:
    return [each.message.content for each in chain.message_log if each.is_generated]


def words(agent: Agent, ids: tuple[int, ...]) -> str:
    return text_of(agent.name, ids)


sampled_texts = st.sampled_from(
    [
        "plain answer",
        "  padded \n",
        "<think>easy</think>\n\n4",
        "<think>never closed",
        CALL_TEXT,
        f"<think>sum</think>\nLet me.\n{CALL_TEXT}",
        "",
        "Zürich 東京",
    ]
)
turns = st.lists(
    st.tuples(
        sampled_texts,
        st.booleans(),  # stopped by a token, or cut
        st.booleans(),  # a stop token inside what was sampled
        st.sampled_from(["as it is", "without thinking", "other spelling", "rewritten"]),
    ),
    min_size=2,
    max_size=6,
)


def sent_back(said: Message, manner: str, turn: int) -> Message:
    """What a client makes of the assistant's message."""
    if manner == "without thinking":
        return Message("assistant", strip_thinking(said.content).strip(), said.tool_calls)
    if manner == "other spelling":
        respelt = tuple(
            ToolCall(f"other0{turn}{i:02}", call.name, json.dumps(json.loads(call.arguments), indent=1))
            for i, call in enumerate(said.tool_calls)
        )
        return Message("assistant", said.content, respelt)
    return Message("assistant", f"rewrite{turn}") if manner == "rewritten" else said


def answers_to(message: Message, turn: int) -> list[Message]:
    if message.tool_calls:
        return [Message("tool", f"result{turn}x{i}", tool_call_id=c.id) for i, c in enumerate(message.tool_calls)]
    return [Message("user", f"question{turn}x")]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60)
@given(conversation=turns)
def test_prompts_begin_with_all_earlier_tokens_and_no_turn_is_lost(name, conversation):
    agent = agent_of(Message("user", "question"), name=name, tools=(TOOL,) if name in WITH_TOOLS else ())
    manners = []
    for turn, (text, stopped, with_stop_inside, manner) in enumerate(conversation):
        inside = tokens_of(name, "a", stopped=True) if with_stop_inside else ()
        said = agent.ask_ids((*inside, *tokens_of(name, text or "e", stopped=stopped)))
        back = sent_back(said, manner, turn)
        agent.messages += [back, *answers_to(back, turn)]
        manners.append(manner)
    agent.ask("the end")
    for turn, manner in enumerate(manners):
        earlier = (*agent.prompts[turn], *agent.sampled[turn])
        if manner != "rewritten":
            assert agent.prompts[turn + 1][: len(earlier)] == earlier
        else:
            assert f"rewrite{turn}" in words(agent, agent.prompts[turn + 1])
    last = words(agent, agent.prompts[-1])
    at = 0
    for message in agent.messages:
        if message.role in ("user", "tool"):
            assert (at := last.find(message.content, at)) >= 0  # all there, in order
    chains = agent.session.chains()
    assert len(chains) == 1 + manners.count("rewritten")
    assert tokens(chains[-1]) == (*agent.prompts[-1], *agent.sampled[-1])
    trained = {each.token_ids for chain in chains for each in chain.message_log if each.is_generated}
    assert trained == set(agent.sampled)


def test_thinking_that_the_template_drops_stays_in_the_tokens():
    agent = agent_of(HI, name="qwen3")
    agent.ask("<think>a secret</think>\n\n4")
    agent.messages += [Message("assistant", "4"), Message("user", "sure?")]
    agent.ask("yes")
    assert "<think>a secret</think>\n\n4<|im_end|>\n<|im_start|>user\nsure?" in words(agent, agent.prompts[1])
    (chain,) = agent.session.chains()
    assert [len(each.generation_logprobs or ()) for each in chain.message_log if each.is_generated] == [
        len(ids) for ids in agent.sampled
    ]


def test_begin_changes_nothing():
    agent = agent_of(HI)
    agent.session.begin(tuple(agent.messages))
    assert agent.session.num_calls == 0
    assert agent.session.chains() == ()


def test_an_edited_history_branches_where_it_was_edited():
    agent = agent_of(HI)
    agent.messages += [agent.ask("hello"), Message("user", "one")]
    agent.messages += [agent.ask("first"), Message("user", "two")]
    agent.ask("second")
    agent.messages[2:] = [Message("user", "edited")]
    agent.ask("third")
    kept = (*agent.prompts[0], *agent.sampled[0])
    assert agent.prompts[3][: len(kept)] == kept
    assert "one" not in words(agent, agent.prompts[3])
    assert [said_in(chain) for chain in agent.session.chains()] == [["hello", "first", "second"], ["hello", "third"]]


def test_sub_agents_and_compaction_are_chains_of_their_own():
    agent = agent_of(SYSTEM, HI)
    agent.messages += [agent.ask("hello"), Message("user", "one")]
    main = agent.messages
    agent.messages = [Message("system", "you search"), HI]
    agent.ask("found")
    agent.messages = main
    agent.messages.append(agent.ask("go on"))
    agent.messages = [SYSTEM, Message("user", "summary: we met"), Message("user", "two")]
    agent.ask("good")
    assert [said_in(chain) for chain in agent.session.chains()] == [["found"], ["hello", "go on"], ["good"]]


def test_other_tools_begin_a_new_chain():
    agent = agent_of(HI, name="qwen2_5")
    agent.messages += [agent.ask("hello"), Message("user", "one")]
    agent.tools = (TOOL,)
    agent.ask("with tools")
    assert [said_in(chain) for chain in agent.session.chains()] == [["hello"], ["with tools"]]
    assert '"name": "add"' in words(agent, agent.prompts[1])


def test_a_rewritten_last_message_is_rolled_back_and_becomes_context():
    agent = agent_of(HI)
    agent.messages += [agent.ask("hello"), Message("user", "one")]
    agent.ask("a b c")
    agent.messages += [Message("assistant", "a"), Message("user", "two")]
    agent.ask("done")
    first = (*agent.prompts[0], *agent.sampled[0])
    behind = words(agent, agent.prompts[2][len(first) :])
    assert agent.prompts[2][: len(first)] == first
    assert behind == (
        "\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [said_in(chain) for chain in agent.session.chains()] == [["hello", "a b c"], ["hello", "done"]]


def test_a_template_that_cannot_go_on_begins_a_new_chain():
    agent = agent_of(HI, name="gemma")  # refuses two turns of one role behind each other
    agent.messages += [agent.ask("hello"), Message("user", "one")]
    agent.ask("a b c")
    agent.messages += [Message("assistant", "a"), Message("user", "two")]
    agent.ask("done")
    assert [said_in(chain) for chain in agent.session.chains()] == [["hello", "a b c"], ["done"]]
    assert all(text in words(agent, agent.prompts[2]) for text in ("hi", "hello", "one", "a", "two"))


def test_an_answer_that_did_not_reach_its_client_is_left_out():
    agent = agent_of(HI)
    agent.ask("lost on the way", id="lost")
    agent.session.mark_undelivered("lost")
    agent.messages += [agent.ask("arrived"), Message("user", "one")]
    agent.ask("good")
    assert agent.prompts[0] == agent.prompts[1]
    assert [said_in(chain) for chain in agent.session.chains()] == [["arrived", "good"]]


def test_an_answer_that_is_continued_or_rewarded_was_received_after_all():
    agent = agent_of(HI)
    agent.messages += [agent.ask("a", id="a"), Message("user", "one")]
    agent.session.mark_undelivered("a")
    agent.ask("b", id="b")
    agent.session.mark_undelivered("b")
    assert agent.session.chains() == ()
    agent.session.reward({"judge": 1.0}, completion_id="b")
    assert [said_in(chain) for chain in agent.session.chains()] == [["a", "b"]]


def test_equal_requests_one_after_another_are_all_kept():
    agent = agent_of(HI)
    for text in ("first", "second", "second"):
        agent.ask(text)
    assert [said_in(chain) for chain in agent.session.chains()] == [["first"], ["second"], ["second"]]


def test_best_of_n_keeps_the_answers_that_were_not_chosen():
    agent = agent_of(HI)
    chosen = [agent.ask(text) for text in ("a", "b", "c")][1]
    agent.messages += [chosen, Message("user", "one")]
    agent.ask("good")
    assert [said_in(chain) for chain in agent.session.chains()] == [["a"], ["c"], ["b", "good"]]


def test_siblings_that_are_both_continued_are_both_kept():
    agent = agent_of(HI)
    one, other = agent.ask("a"), agent.ask("b")
    for said in (one, other):
        agent.messages = [HI, said, Message("user", "on")]
        agent.ask(f"after {said.content}")
    assert [said_in(chain) for chain in agent.session.chains()] == [["a", "after a"], ["b", "after b"]]


def test_a_rewarded_sibling_is_kept():
    agent = agent_of(HI)
    agent.ask("a", id="first")
    agent.ask("b")
    agent.session.reward({"judge": 0.5}, completion_id="first")
    assert [(said_in(c), dict(c.rewards)) for c in agent.session.chains()] == [(["a"], {"judge": 0.5}), (["b"], {})]


def test_a_side_call_of_its_own_is_no_chain():
    agent = agent_of(SYSTEM, HI)
    agent.ask("a title", is_side_call=True)
    agent.messages = [HI]
    agent.ask("hello")
    assert [said_in(chain) for chain in agent.session.chains()] == [["hello"]]


def test_a_side_call_at_the_end_of_a_chain_leaves_the_chain_as_it_was():
    agent = agent_of(HI)
    agent.messages += [agent.ask("hello")]
    main = [*agent.messages]
    agent.messages += [Message("user", "summarize")]
    agent.ask("we met", is_side_call=True)
    assert [said_in(chain) for chain in agent.session.chains()] == [["hello"]]
    agent.messages = [*main, Message("user", "one")]
    agent.ask("good")
    assert [said_in(chain) for chain in agent.session.chains()] == [["hello", "good"]]


def test_a_side_call_that_is_continued_is_context_and_each_token_is_trained_once():
    agent = agent_of(HI)
    agent.messages += [agent.ask("hello"), Message("user", "summarize")]
    agent.messages += [agent.ask("we met", is_side_call=True), Message("user", "shorter")]
    agent.messages += [agent.ask("met", is_side_call=True), Message("user", "one")]
    agent.ask("good")
    (chain,) = agent.session.chains()
    assert tokens(chain) == (*agent.prompts[-1], *agent.sampled[-1])
    assert said_in(chain) == ["hello", "good"]


def test_tool_calls_that_come_back_without_their_text_continue_the_chain():
    agent = agent_of(HI, tools=(TOOL,))
    said = agent.ask(f"Let me add.\n{CALL_TEXT}")
    agent.messages += [Message("assistant", "", said.tool_calls), *answers_to(said, 0)]
    agent.ask("7")
    (chain,) = agent.session.chains()
    assert said_in(chain) == ["Let me add.", "7"]
    assert agent.prompts[1][: len(agent.prompts[0]) + len(agent.sampled[0])] == agent.prompts[0] + agent.sampled[0]


def test_another_text_beside_the_same_calls_is_an_edited_history():
    agent = agent_of(HI, tools=(TOOL,))
    said = agent.ask(f"Let me add.\n{CALL_TEXT}")
    agent.messages += [Message("assistant", "Other words.", said.tool_calls), *answers_to(said, 0)]
    agent.ask("7")
    assert len(agent.session.chains()) == 2


def test_of_siblings_that_read_the_same_the_last_is_continued():
    agent = agent_of(HI, name="qwen3")
    agent.ask("<think>one</think>\n\n4")
    agent.messages += [agent.ask("<think>two</think>\n\n4"), Message("user", "on")]
    agent.ask("good")
    assert "two" in words(agent, agent.prompts[2])
    assert "one" not in words(agent, agent.prompts[2])


def test_of_calls_that_read_the_same_the_one_with_the_clients_id_is_continued():
    agent = agent_of(HI, name="qwen3", tools=(TOOL,))
    first = agent.ask("<think>one</think>\n\n" + CALL_TEXT)
    agent.ask("<think>two</think>\n\n" + CALL_TEXT)
    agent.messages += [first, *answers_to(first, 0)]
    agent.ask("good")
    assert "one" in words(agent, agent.prompts[2])


def test_of_calls_that_read_the_same_each_is_found_by_its_own_id():
    for chosen in (0, 1):
        agent = agent_of(HI, name="qwen3", tools=(TOOL,))
        said = [agent.ask(f"<think>{word}</think>\n\n" + CALL_TEXT) for word in ("one", "two", "three")]
        agent.messages += [said[chosen], *answers_to(said[chosen], 0)]
        agent.ask("good")
        assert ("one", "two")[chosen] in words(agent, agent.prompts[3])


def test_any_number_of_new_messages_continues_the_chain():
    for count in (1, 2, 3):
        agent = agent_of(HI)
        agent.messages += [agent.ask("hello"), *(Message("user", f"and {i}") for i in range(count))]
        agent.ask("good")
        assert [said_in(chain) for chain in agent.session.chains()] == [["hello", "good"]]


def test_a_request_that_ends_with_the_assistants_message_has_it_as_context():
    agent = agent_of(HI)
    agent.messages += [agent.ask("hello")]
    agent.ask("again")
    assert words(agent, agent.prompts[1]).endswith("hello<|im_end|>\n<|im_start|>assistant\n")


def test_rewards_are_the_runs_or_a_chains_and_the_last_post_counts():
    agent = agent_of(HI)
    agent.messages += [agent.ask("a", id="first"), Message("user", "one")]
    agent.ask("b")
    agent.session.reward({"correct": 0.0})
    agent.session.reward({"correct": 1.0})
    agent.session.reward({"format": 0.5}, completion_id="first")
    (chain,) = agent.session.chains()
    assert agent.session.rewards == {"correct": 1.0}
    assert chain.rewards == {"format": 0.5}
    with pytest.raises(KeyError):
        agent.session.reward({"format": 0.5}, completion_id="unknown")


def test_a_chain_knows_its_oldest_and_newest_weights():
    session = Session(codec_of("chatml"))
    messages = (HI,)
    for i, versions in enumerate([(4, 5), (3, 3), (5, 6)]):
        call = session.begin(messages)
        said = Message("assistant", "abc"[i])
        completion = completion_of(tokens_of("chatml", "abc"[i]), versions=versions)
        session.commit(call, completion, said, completion_id=str(i))
        messages = (*messages, said, Message("user", "on"))
    assert session.chains()[0].weight_versions == (3, 6)


def test_a_sampled_message_keeps_which_of_its_tokens_are_whose():
    session = Session(codec_of("chatml"))
    spans = (WeightSpan(4, 0, 1), WeightSpan(5, 1, 2))
    completion = replace(completion_of(tokens_of("chatml", "a"), versions=(4, 5)), weight_spans=spans)
    session.commit(session.begin((HI,)), completion, Message("assistant", "a"), completion_id="0")
    (chain,) = session.chains()
    assert chain.message_log[-1].weight_spans == spans
    prompt_length = len(flat_token_ids(chain.message_log[:-1]))
    assert session_body("s", session)["chains"][0]["weight_spans"] == [
        (4, prompt_length, prompt_length + 1),
        (5, prompt_length + 1, prompt_length + 2),
    ]


def test_a_chain_knows_whether_its_last_response_was_cut():
    for reason, is_truncated in (("stop", False), ("length", True)):
        session = Session(codec_of("chatml"))
        completion = replace(completion_of(tokens_of("chatml", "hello", stopped=False)), finish_reason=reason)
        session.commit(session.begin((HI,)), completion, Message("assistant", "hello"), completion_id="c")
        assert [chain.is_truncated for chain in session.chains()] == [is_truncated]


def test_of_calls_with_the_same_tokens_an_echo_continues_the_last():
    session = Session(codec_of("chatml"))
    ids = tokens_of("chatml", "hello")
    for name in ("first", "second"):
        call = session.begin((HI,))
        session.commit(call, completion_of(ids), Message("assistant", "hello"), completion_id=name)
    echo = Echo(call.prompt_token_ids, tuple(ids))
    first, second = session.find(echo)
    assert first is not second
    history = (HI, Message("assistant", "hello"), Message("user", "on"))
    assert session.begin_from_echo(history, (), echo=echo, num_known=2).parent is second


def test_messages_that_the_template_refuses_are_refused():
    with pytest.raises(ConfigError, match="role system"):
        agent_of(SYSTEM, HI, name="gemma").ask("hello")


def digest(message: Message) -> bytes:
    return history_digest(b"", message)


def call(arguments: str, *, id: str = "call1", name: str = "f") -> Message:
    return Message("assistant", "", (ToolCall(id, name, arguments),))


@pytest.mark.parametrize(
    ("said", "sent_back"),
    [
        (call('{"a": 1, "b": 2}'), call('{"b":2,"a":1}')),
        (call("{}", id="call1"), call("{}", id="other")),
        (call("{broken"), call(" {broken ")),
        (Message("assistant", "<think>so</think>\n\n4"), Message("assistant", "4")),
        (Message("assistant", "so</think>4"), Message("assistant", "4")),
        (Message("assistant", "4\n"), Message("assistant", "4")),
        (Message("tool", "7", tool_call_id="x"), Message("tool", "7", tool_call_id="y")),
    ],
)
def test_what_clients_re_serialise_is_the_same_message(said, sent_back):
    assert digest(said) == digest(sent_back)


@pytest.mark.parametrize(
    ("said", "sent_back"),
    [
        (Message("user", "4"), Message("user", "4 ")),
        (Message("user", "4"), Message("system", "4")),
        (Message("user", "<think>a</think>4"), Message("user", "4")),
        (call('{"a": 1}'), call('{"a": 2}')),
        (call("{}"), call("{}", name="g")),
        (call("{}"), Message("assistant", "")),
        (call("{broken"), call("{broken}")),
        (Message("assistant", "4"), Message("assistant", "5")),
    ],
)
def test_what_changes_the_conversation_is_another_message(said, sent_back):
    assert digest(said) != digest(sent_back)


def test_a_history_is_its_tools_and_all_its_messages_in_order():
    hi, ho = Message("user", "hi"), Message("user", "ho")
    start = tools_digest(())
    assert history_digest(history_digest(start, hi), ho) != history_digest(history_digest(start, ho), hi)
    assert tools_digest((TOOL,)) != start
    assert tools_digest((dict(reversed(TOOL.items())),)) == tools_digest((TOOL,))


def test_arguments_nested_too_deep_are_compared_as_text():
    assert digest(call("[" * 100_000)) != digest(call("[" * 100_001))


def test_half_a_surrogate_pair_has_a_digest():
    assert digest(Message("user", "\ud800")) != digest(Message("user", "\ud801"))


def test_a_call_that_was_continued_keeps_the_columns_of_its_own_messages_alone() -> None:
    """A chain of n calls holds n messages' rows, not those of n whole requests."""
    agent = agent_of(HI)
    call = agent.session.begin((HI,))
    ids = tokens_of("chatml", "hello")
    count = len(call.prompt_token_ids) + len(ids)
    first = replace(completion_of(ids), columns=TokenColumns({"c": np.arange(count, dtype=np.uint8)}))
    agent.session.commit(call, first, Message("assistant", "hello"), completion_id="a")
    (node,) = agent.session.find(Echo(call.prompt_token_ids, ids))
    assert node.columns == first.columns
    again = agent.session.begin((HI, Message("assistant", "hello"), HI))
    agent.session.commit(again, completion_of(ids), Message("assistant", "hello"), completion_id="b")
    assert node.columns is NO_COLUMNS
    assert node.sampled.columns == first.sampled_columns
