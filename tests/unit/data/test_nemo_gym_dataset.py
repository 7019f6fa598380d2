"""NeMo Gym's rows as prompts."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.images import to_data_url
from nemo_rl.data.nemo_gym_dataset import TASK_ID
from nemo_rl.data.prompt_sets import PromptSet, load_prompt_sets
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, TextPart, ToolCall
from tests.fakes.vision import picture

MATH, CARDS = {"name": "math_agent"}, {"name": "blackjack_agent", "type": "responses_api_agents"}


def row(text: str = "2+2", agent: Any = MATH, **parameters: Any) -> dict[str, Any]:
    asked = {"input": [{"role": "user", "content": text}], **parameters}
    return {"responses_create_params": asked, "agent_ref": agent, "expected_answer": "4"}


@pytest.fixture
def section(tmp_path: Path):
    def write(*rows: Any, file: str = "rows.jsonl", **keys: Any) -> DatasetConfig:
        path = tmp_path / file
        path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in rows))
        return DatasetConfig(dataset_name="nemo_gym", data_path=str(path), **keys)

    return write


def train_set(*sections: DatasetConfig, **data: Any) -> PromptSet:
    return load_prompt_sets(DataConfig(train=list(sections), **data), run_seed=0)[0]


def test_a_row_names_its_agent_and_goes_to_it_whole(section) -> None:
    train = train_set(section(row(), row("deal", CARDS)))
    first, second = train.prompts
    assert first.messages == (Message("user", "2+2"),)
    assert (first.task_name, first.agent_name, first.dataset) == ("nemo_gym", "math_agent", "nemo_gym")
    assert first.env_state == {"row": row()}
    assert second.agent_name == "blackjack_agent"
    assert train.agent_names == {"math_agent", "blackjack_agent"}
    assert train.task_names == {"nemo_gym"}


def test_the_section_names_environment_set_and_the_agent_of_rows_without_one(section) -> None:
    plain = {"responses_create_params": {"input": "hello"}}
    (prompt,) = train_set(section(plain, env_name="gym", agent_name="greeter", name="greetings")).prompts
    assert (prompt.task_name, prompt.agent_name, prompt.dataset) == ("gym", "greeter", "greetings")
    assert prompt.messages == (Message("user", "hello"),)
    assert prompt.env_state["row"] == plain | {"agent_ref": {"type": "responses_api_agents", "name": "greeter"}}


def task_row(**changes: Any) -> dict[str, Any]:
    task_input = {name: value for name, value in row().items() if name != "agent_ref"} | {"task_id": "flat"}
    return {"task_id": {"taskset": "cards", "task_id": "7"}, "task_input": task_input, **changes}


def test_a_materialized_row_is_opened_and_goes_where_its_taskset_does(section) -> None:
    routed, named, default = (
        train_set(section(each, **keys)).prompts[0]
        for each, keys in ((task_row(), {}), (task_row(agent_ref=CARDS), {}), (task_row(), {"agent_name": "dealer"}))
    )
    assert [prompt.agent_name for prompt in (routed, named, default)] == ["cards", "blackjack_agent", "dealer"]
    assert routed.messages == (Message("user", "2+2"),)
    sent = routed.env_state["row"]
    assert (sent["expected_answer"], sent["task_id"], sent[TASK_ID]) == ("4", "flat", task_row()["task_id"])
    assert "task_input" not in sent


def test_items_of_a_conversation_become_messages_and_tools_those_of_templates(section) -> None:
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
    ]
    tool = {"type": "function", "name": "look", "strict": True, "parameters": {"type": "object"}}
    (prompt,) = train_set(section(row(input=conversation, tools=[tool]))).prompts
    assert prompt.messages == (
        Message("system", "Be brief."),
        Message("user", "a\nb"),
        Message("assistant", "<think>hm</think>I look.", (ToolCall("c1", "look", '{"at": 1}'),)),
        Message("tool", "a cat", tool_call_id="c1"),
    )
    assert prompt.tools == ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("{", "no valid JSON"),
        ({"agent_ref": MATH}, "responses_create_params is missing, not an object"),
        (task_row(task_id={"taskset": "t"}), "task_id is {'taskset': 't'}, not an object with the texts"),
        (task_row(task_input=3), "task_input is 3, not an object"),
        (task_row(task_input={"task_data": 3}), "task_input.task_data is 3, not an object"),
        ({"responses_create_params": "x", "agent_ref": MATH}, "responses_create_params is 'x', not an object"),
        ({"responses_create_params": {"input": "x"}}, r"agent_ref is missing, .* \(agent_name of the dataset"),
        (row(agent={"type": "a"}), "agent_ref is {'type': 'a'}, not an object with the name"),
        (row(agent="math"), "agent_ref is 'math', not an object"),
        (row(input=None), "input is missing, not text or a list"),
        (row(input=[]), r"input is \[\], not text or a list"),
        (row(input=["hi"]), r"input\[0\] is 'hi', not a message"),
        (row(input=[{"role": "human", "content": "x"}]), r"input\[0\]\.role is 'human'; known: developer, system"),
        (row(input=[{"role": "user"}]), r"input\[0\]\.content is missing"),
        (row(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "type 'input_image': this policy reads"),
        (row(input=[{"type": "function_call", "arguments": "{}"}]), "has no field 'name'"),
        (row(tools={}), "tools is {}, not a list"),
        (row(tools=[{"type": "web_search"}]), r"tools\[0\] is {'type': 'web_search'}, not a function"),
    ],
)
def test_a_row_that_no_agent_could_run_is_named_at_the_start(section, broken: Any, problem: str) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: .*{problem}"):
        train_set(section(row(), "", broken))


PICTURE = picture(1)
URL = to_data_url(PICTURE)


def test_images_of_a_row_are_data_urls_which_its_agent_sends(section) -> None:
    shown = {"type": "input_image", "image_url": URL, "detail": "auto"}
    asked = {"role": "user", "content": [shown, {"type": "input_text", "text": "what?"}]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    answered = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "it"}]}
    (prompt,) = train_set(section(row(input=[asked, call, answered]), images={})).prompts
    assert prompt.messages[0] == Message("user", (PICTURE, TextPart("what?")))
    assert prompt.messages[2] == Message("tool", "it", tool_call_id="c")
    assert prompt.env_state["row"]["responses_create_params"]["input"] == [asked, call, answered]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([{"type": "input_image", "image_url": "https://example.com/a.png"}], r"content\[0\]\.image_url .*fetched"),
        ([{"type": "input_image", "file_id": "f"}], r"content\[0\]\.image_url is None; allowed: data:image"),
        ([{"type": "input_image", "image_url": URL[:-60]}], r"content\[0\]\.image_url .*no image"),
        ([{"type": "input_image", "image_url": URL}] * 9, "messages have 9 images; allowed: images.max_count = 8"),
        ([{"type": "input_file"}], "type 'input_file': this policy reads text and images"),
    ],
)
def test_images_that_no_agent_could_show_are_named_at_the_start(section, content: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        train_set(section(row(input=[{"role": "user", "content": content}]), images={}))


def test_images_in_outputs_of_tools_which_gym_refuses_are_named_at_the_start(section) -> None:
    shown = [{"type": "input_image", "image_url": URL}]
    rows = row(input=[{"type": "function_call_output", "call_id": "c", "output": shown}])
    with pytest.raises(DataError, match=r"output\[0\] is a part of type 'input_image'"):
        train_set(section(rows, images={}))
    (prompt,) = train_set(
        section(row(input=[{"type": "function_call_output", "call_id": "c", "output": ["a"]}]))
    ).prompts
    assert prompt.messages[0].content == "['a']"


def test_what_the_policy_would_refuse_is_dropped_with_one_note(section, caplog) -> None:
    caplog.set_level(logging.INFO)
    forced = row(tool_choice="required", top_logprobs=2, temperature=0.5)
    train = train_set(section(forced, forced, row(tool_choice="auto")))
    kept = [prompt.env_state["row"]["responses_create_params"].keys() for prompt in train.prompts]
    assert kept == [{"input", "temperature"}, {"input", "temperature"}, {"input", "tool_choice"}]
    notes = [record.message for record in caplog.records if "dropped" in record.message]
    assert notes == [
        "nemo_gym: dropped tool_choice, top_logprobs of responses_create_params: the policy decides what it samples"
    ]


def test_a_file_without_rows_and_a_section_without_file_are_refused(section) -> None:
    with pytest.raises(DataError, match=r"data\.train\.0: .*rows\.jsonl has no rows"):
        train_set(section(""))
    with pytest.raises(ConfigError, match=r"data\.train\.0\.data_path"):
        train_set(DatasetConfig(dataset_name="nemo_gym"))


def test_rows_of_a_validation_set_are_left_out_of_training(section) -> None:
    rows = [row(str(number)) for number in range(4)]
    validation = section(rows[2], row("2", CARDS), file="held_out.jsonl")
    kept = train_set(section(*rows), validation=validation).prompts
    assert [prompt.messages[0].content for prompt in kept] == ["0", "1", "3"]
    assert len(train_set(section(*rows), validation=validation, disjoint=False).prompts) == 4
    with pytest.raises(ConfigError, match=r"data\.disjoint"):
        train_set(section(rows[2]), validation=validation)
