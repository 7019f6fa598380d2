"""From sections of the configuration to prompt sets: merging, ids, names, held-out prompts, lengths."""

import hashlib
import json
from pathlib import Path

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig, InputDataConfig
from nemo_rl.config.registries import DATASETS
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompt_screen import LengthLimit, refuse_overlong
from nemo_rl.data.prompt_sets import load_input, load_prompt_sets, prompt_digest, split_rows
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, Prompt, TextPart, ThinkingPart, ToolCall
from tests.fakes.gym_stack import row_of
from tests.templates import byte_tokenizer

SPELL = DatasetConfig(dataset_name="reasoning_gym", task="spell_backward", size=50)


def rows_of(section: DatasetConfig, seed: int):
    """A data set of the user's own, found by its dotted path."""
    return [{"input": f"{seed} {section.task} {i}", "output": i} for i in range(3)]


@pytest.fixture
def file(tmp_path: Path):
    def write(*rows: object, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
        return str(path)

    return write


def prompts_of(section: DatasetConfig, **data):
    return load_prompt_sets(DataConfig(train=section, **data), run_seed=5)[0].prompts


def test_question_and_answer_rows_become_math_prompts(file):
    path = file({"input": "2+2", "output": 4}, "", {"input": "3+3", "output": "6"})
    prompts = prompts_of(DatasetConfig(dataset_name="jsonl", data_path=path))
    assert [p.messages for p in prompts] == [(Message("user", "2+2"),), (Message("user", "3+3"),)]
    assert [p.env_state for p in prompts] == [{"answer": "4"}, {"answer": "6"}]
    assert {(p.task_name, p.dataset) for p in prompts} == {("math", "jsonl")}


def test_keys_and_prompt_files_are_applied(file, tmp_path):
    (tmp_path / "ask.txt").write_text("Solve: {}\nBox {x}.\n")
    (tmp_path / "system.txt").write_text("Be brief.\n")
    section = DatasetConfig(
        dataset_name="jsonl",
        data_path=file({"q": "2+2 {}", "a": "4"}),
        input_key="q",
        output_key="a",
        env_name="tutor",
        prompt_file=str(tmp_path / "ask.txt"),
        system_prompt_file=str(tmp_path / "system.txt"),
    )
    (prompt,) = prompts_of(section)
    assert prompt.messages == (Message("system", "Be brief."), Message("user", "Solve: 2+2 {}\nBox {x}."))
    assert prompt.task_name == "tutor"


def test_messages_rows_keep_tools_and_hand_other_fields_to_the_environment(file):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": "add"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "two"},
    ]
    section = DatasetConfig(dataset_name="jsonl", data_path=file({"messages": messages, "tools": [tool], "level": 3}))
    (prompt,) = prompts_of(section)
    assert prompt.messages == (
        Message("user", "1+1"),
        Message("assistant", "", (ToolCall("c1", "add", '{"a": 1}'),)),
        Message("tool", "2", tool_call_id="c1"),
    )
    assert prompt.env_state == {"level": 3, "answer": "two"}
    assert prompt.tools == (tool,)


@pytest.mark.parametrize(
    ("second_line", "problem"),
    [('{"input": ', "no valid JSON"), ("[1, 2]", "a JSON object was expected, not list")],
)
def test_broken_line_is_named_by_file_and_line(file, second_line, problem):
    path = file({"input": "a", "output": "b"}, second_line)
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {problem}"):
        prompts_of(DatasetConfig(dataset_name="jsonl", data_path=path))


def test_row_without_the_answers_field_is_named(file):
    path = file({"input": "a", "output": "b"}, {"input": "a"})
    with pytest.raises(DataError, match=r"data\.train \(jsonl\): row 1: has no field 'output'"):
        prompts_of(DatasetConfig(dataset_name="jsonl", data_path=path))


def test_unknown_role_is_refused(file):
    path = file({"messages": [{"role": "human", "content": "hi"}]})
    with pytest.raises(DataError, match=r"row 0: .*role of system, user, assistant, tool"):
        prompts_of(DatasetConfig(dataset_name="jsonl", data_path=path))


def test_empty_and_missing_files_are_refused(file, tmp_path):
    with pytest.raises(DataError, match="has no rows"):
        prompts_of(DatasetConfig(dataset_name="jsonl", data_path=file("")))
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read: No such file"):
        prompts_of(DatasetConfig(dataset_name="jsonl", data_path=str(tmp_path / "absent.jsonl")))


def test_unknown_data_set_lists_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"data\.train\.dataset_name = 'json'.*did you mean jsonl"):
        prompts_of(DatasetConfig(dataset_name="json"))
    with pytest.raises(ConfigError, match=r"known: .*AIME2024.*reasoning_gym"):
        prompts_of(DatasetConfig())


def test_registered_name_is_found():
    DATASETS.register("counted")(rows_of)
    assert [p.messages[0].content for p in prompts_of(DatasetConfig(dataset_name="counted", size=1))] == ["5 None 0"]
    del DATASETS.registered["counted"]
    with pytest.raises(ValueError, match="registered already"):
        DATASETS.register("jsonl")(rows_of)


def test_dataset_of_ones_own_reads_its_kwargs(monkeypatch):
    def repeat(section: DatasetConfig, seed: int):
        return [{"input": section.kwargs["text"], "output": seed}] * section.kwargs["times"]

    monkeypatch.setitem(DATASETS.registered, "repeated", repeat)
    section = DatasetConfig(dataset_name="repeated", kwargs={"text": "hello", "times": 2})
    assert [p.messages[0].content for p in prompts_of(section)] == ["hello", "hello"]


def test_dotted_path_to_no_function_is_refused():
    with pytest.raises(ConfigError, match=r"must be a function \(section, seed\) -> rows, not str"):
        prompts_of(DatasetConfig(dataset_name="string.digits"))


def test_dotted_path_names_a_function_of_rows():
    section = DatasetConfig(dataset_name=f"{__name__}.rows_of", task="t", size=2)
    assert [p.messages[0].content for p in prompts_of(section)] == ["5 t 0", "5 t 1"]
    with pytest.raises(ConfigError, match="cannot be imported"):
        prompts_of(DatasetConfig(dataset_name="no_such_module.rows"))


def test_defaults_fill_what_a_section_leaves_open(file):
    default = DatasetConfig(dataset_name="jsonl", input_key="q", env_name="tutor")
    path = file({"q": "1", "output": "x", "other": "2"})
    train = [DatasetConfig(data_path=path), DatasetConfig(data_path=path, input_key="other", name="others")]
    prompts = prompts_of(train, default=default)  # type: ignore[arg-type]
    assert [(p.messages[0].content, p.task_name, p.dataset) for p in prompts] == [
        ("1", "tutor", "jsonl"),
        ("2", "tutor", "others"),
    ]


def test_repeated_names_are_numbered_and_ids_stay_unique(file):
    path = file({"input": "1", "output": "x"}, {"input": "1", "output": "x"})
    same = DatasetConfig(dataset_name="jsonl", data_path=path)
    train, validation = load_prompt_sets(DataConfig(train=same, validation=[same, same], disjoint=False), run_seed=0)
    assert [held_out.name for held_out in validation] == ["jsonl", "jsonl_2"]
    first, second = train.prompts
    assert second.prompt_id == f"{first.prompt_id}-1"


def test_ids_do_not_depend_on_the_rows_around(file):
    one, two = {"input": "1", "output": "x"}, {"input": "2", "output": "y"}
    forward = prompts_of(DatasetConfig(dataset_name="jsonl", data_path=file(one, two, name="a.jsonl")))
    reverse = prompts_of(DatasetConfig(dataset_name="jsonl", data_path=file(two, one, name="b.jsonl")))
    assert [p.prompt_id for p in forward] == [p.prompt_id for p in reversed(reverse)]


def test_validation_prompts_are_left_out_of_training(file):
    train = DatasetConfig(dataset_name="jsonl", data_path=file(*({"input": str(i), "output": "x"} for i in range(4))))
    held_out = DatasetConfig(dataset_name="jsonl", data_path=file({"input": "2", "output": "x"}, name="v.jsonl"))
    kept = prompts_of(train, validation=held_out)
    assert [p.messages[0].content for p in kept] == ["0", "1", "3"]
    assert len(prompts_of(train, validation=held_out, disjoint=False)) == 4
    with pytest.raises(ConfigError, match=r"data\.disjoint"):
        prompts_of(train, validation=train)


def test_reasoning_gym_rows_carry_the_whole_entry_and_never_repeat():
    section = SPELL.model_copy(update={"task_kwargs": {"max_word_len": 3}, "size": 1000, "seed": 0})
    prompts = prompts_of(section)
    assert len({p.messages for p in prompts}) == len(prompts) < 1000
    entry = prompts[0].env_state["entry"]
    assert prompts[0].task_name == prompts[0].env_state["task"].replace("spell_backward", "reasoning_gym")
    assert prompts[0].messages == (Message("user", entry["question"]),)
    assert entry["answer"] == entry["metadata"]["word"][::-1]
    json.dumps(dict(prompts[0].env_state))


def test_near_seeds_give_shifted_copies_which_do_not_reach_training():
    train, (validation,) = load_prompt_sets(
        DataConfig(train=SPELL.model_copy(update={"seed": 0}), validation=SPELL.model_copy(update={"seed": 1})),
        run_seed=0,
    )
    assert len(train.prompts) == 1  # 49 of 50 are validation questions
    assert not {p.messages for p in train.prompts} & {p.messages for p in validation.prompts}


def test_sets_without_a_seed_draw_different_rows_and_the_first_uses_the_runs():
    train, (validation,) = load_prompt_sets(DataConfig(train=SPELL, validation=SPELL), run_seed=5)
    assert not {p.messages for p in train.prompts} & {p.messages for p in validation.prompts}
    named = prompts_of(SPELL.model_copy(update={"seed": 5}))
    assert {p.prompt_id for p in train.prompts} <= {p.prompt_id for p in named}


@pytest.mark.parametrize(
    "task",
    ["chain_sum", "gcd", "number_sequence", "basic_arithmetic", "countdown", "maze", "sudoku", "color_cube_rotation"],
)
def test_entries_still_score_their_own_answer(task):
    import reasoning_gym

    for prompt in prompts_of(DatasetConfig(dataset_name="reasoning_gym", task=task, size=2)):
        entry = prompt.env_state["entry"]
        json.dumps(entry)
        if entry["answer"] is not None:
            assert reasoning_gym.create_dataset(task, size=1).score_answer(entry["answer"], entry) == 1.0


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (SPELL.model_copy(update={"task": "spell_backwards"}), r"data\.train\.task = .* did you mean 'spell_ba.*\?"),
        (SPELL.model_copy(update={"task_kwargs": {"x": 1}}), r"data\.train\.task_kwargs = \{'x': 1\}"),
    ],
)
def test_unknown_task_or_option_is_a_config_error(section, expected):
    with pytest.raises(ConfigError, match=expected):
        prompts_of(section)


def test_directory_of_the_datasets_library_loads(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "so #### 1,002"}\n')
    section = DatasetConfig(
        dataset_name="huggingface",
        data_path=str(tmp_path),
        split="train",
        input_key="question",
        output_key="answer",
        processor="final_answer",
    )
    (prompt,) = prompts_of(section)
    assert prompt.env_state == {"answer": "1002"}


def test_too_long_prompt_names_the_key_the_prompt_and_its_length(file):
    encoder = ChatEncoder(byte_tokenizer("plain_text"))  # one token a byte: "USER: 123\nASSISTANT: " has 21
    train, _ = load_prompt_sets(
        DataConfig(train=DatasetConfig(dataset_name="jsonl", data_path=file({"input": "123", "output": "x"}))),
        run_seed=0,
    )
    refuse_overlong(train.prompts, LengthLimit(encoder, 21))
    prompt_id = train.prompts[0].prompt_id
    with pytest.raises(ConfigError, match=rf"data\.max_input_seq_length = 20: prompt {prompt_id} of 'jsonl' has 21"):
        refuse_overlong(train.prompts, LengthLimit(encoder, 20))


def written(path: Path, *rows: dict[str, str]) -> DatasetConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(dataset_name="jsonl", data_path=str(path), env_name="e")


def letters(path: Path, text: str) -> DatasetConfig:
    return written(path, *({"input": letter, "output": letter.upper()} for letter in text))


def test_prompts_have_the_ids_that_they_have_in_training(tmp_path: Path) -> None:
    section = letters(tmp_path / "a.jsonl", "xyx")
    train, _ = load_prompt_sets(DataConfig(train=section), 42)
    assert list(load_input(InputDataConfig(input=section)).prompts) == list(train.prompts)


def test_sets_stand_one_behind_the_other_and_the_limit_counts_over_all(tmp_path: Path) -> None:
    sets = [letters(tmp_path / "a.jsonl", "ab"), letters(tmp_path / "b.jsonl", "cd")]
    loaded = load_input(InputDataConfig(input=sets), 3)
    assert [prompt.messages[0].content for prompt in loaded.prompts] == ["a", "b", "c"]
    found = list(loaded.rows())
    assert [row for _, row in found] == [{"input": c, "output": c.upper()} for c in "abc"]
    assert [prompt for prompt, _ in found] == list(loaded.prompts)
    assert loaded.prompts[2].dataset == "jsonl_2"


def test_generated_rows_are_drawn_from_the_inputs_own_seed() -> None:
    section = DatasetConfig(dataset_name="reasoning_gym", task="chain_sum", size=4, env_name="e")
    first, again = (list(load_input(InputDataConfig(input=section)).rows()) for _ in range(2))
    other = list(load_input(InputDataConfig(input=section, seed=7)).rows())
    assert first == again != other
    assert first[0][1].keys() == {"task", "entry"}


def test_rows_of_a_file_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    loaded = load_input(InputDataConfig(input=letters(tmp_path / "a.jsonl", "ab")))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        loaded.prompts[1]


@pytest.mark.parametrize(("name", "expected"), [(None, ["spell", "play"]), ("words", ["words", "words"])])
def test_rows_of_nemo_gym_without_a_name_of_their_set_are_measured_by_agent(
    tmp_path: Path, name: str | None, expected: list[str]
) -> None:
    (tmp_path / "gym.jsonl").write_text("".join(json.dumps(row_of("a", agent)) + "\n" for agent in ("spell", "play")))
    section = DatasetConfig(dataset_name="nemo_gym", data_path=str(tmp_path / "gym.jsonl"), name=name)
    assert [prompt.dataset for prompt in load_input(InputDataConfig(input=section)).prompts] == expected


def test_a_row_that_cannot_be_used_is_named_by_its_line(tmp_path: Path) -> None:
    section = written(tmp_path / "a.jsonl", {"input": "a", "output": "b"}, {"input": "c"})
    with pytest.raises(DataError, match=r"a\.jsonl:2: has no field 'output'"):
        load_input(InputDataConfig(input=section))


def test_a_set_without_rows_or_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.input: .*has no rows"):
        load_input(InputDataConfig(input=written(tmp_path / "a.jsonl")))
    with pytest.raises(ConfigError, match=r"data\.input\.dataset_name"):
        load_input(InputDataConfig(input=DatasetConfig(env_name="e")))


def test_digest_tells_prompts_apart_by_thinking_and_answered_call_and_keeps_that_of_others():
    def digest(*messages: Message) -> int:
        return prompt_digest(Prompt("p", "math", messages))

    assert digest(Message("user", "2+2")) == int(
        hashlib.sha256(json.dumps(["math", [["user", "2+2", []]], {}, []]).encode()).hexdigest()[:16], 16
    )
    thoughts = [Message("assistant", (ThinkingPart(text), TextPart("4"))) for text in ("a", "b")]
    results = [Message("tool", "4", tool_call_id=call_id) for call_id in ("c1", "c2", None)]
    assert len({digest(message) for message in (*thoughts, thoughts[0].without_thinking(), *results)}) == 6


def test_a_share_or_a_number_of_rows_is_held_out() -> None:
    kept, held_out = split_rows(40, 0.05, seed=1)
    assert len(held_out) == 2
    assert sorted(kept + held_out) == list(range(40))
    assert split_rows(40, 0.05, seed=1) == (kept, held_out)
    assert len(split_rows(40, 8, seed=1)[1]) == 8


def test_a_validation_split_is_a_set_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input": f"q{i}", "output": str(i)}) + "\n" for i in range(20)))
    train = DatasetConfig(dataset_name="jsonl", data_path=str(path), split_validation_size=0.25, repeat=2)
    trained, validation = load_prompt_sets(DataConfig(train=train), 42)
    assert [len(one.prompts) for one in validation] == [5]
    assert len(trained.prompts) == 30
    held_out = {prompt.messages for prompt in validation[0].prompts}
    assert not held_out & {prompt.messages for prompt in trained.prompts}
    with pytest.raises(ConfigError, match="holds out 20 of 20 rows"):
        load_prompt_sets(DataConfig(train=train.model_copy(update={"split_validation_size": 50})), 42)
