"""Preference pairs: every shape of rows, the datasets of the hub from files of their schema, and the pairs' tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.supervised_runs import DPOConfig, PreferenceDataConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.example_sets import ExampleSet
from nemo_rl.data.preferences import Preference, encode_preferences, load_preferences, read_preferences
from nemo_rl.data.supervised_samples import SupervisedSample, make_pair_batch
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.loss_types import TokenScores
from nemo_rl.losses.preference import PreferenceLoss
from nemo_rl.policy.micro_batches import count_valid
from nemo_rl.types import Message, TrainingBatch
from tests.templates import byte_tokenizer

QUESTION = (Message("user", "q"),)
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
CONTEXT = (Message("user", "q"), Message("assistant", "a"), Message("user", "r"))


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(*rows: Any, **section: Any) -> list[Preference]:
    return read_preferences(rows, DatasetConfig(dataset_name="jsonl", **section), key="data.train")


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def ranked(*ranks: int, context: Any = "q") -> dict[str, Any]:
    answers = ("x", "y")
    completions = [{"rank": rank, "completion": said(text)} for rank, text in zip(ranks, answers, strict=True)]
    return {"context": context, "completions": completions}


def test_conversations_that_part_before_their_answers_are_refused() -> None:
    other = [{"role": "user", "content": "another question"}]
    with pytest.raises(DataError, match="same conversation up to their last messages"):
        read({"chosen": [TURNS[0], *said("a")], "rejected": [*other, *said("b")]})


def test_a_prompt_is_a_text_or_messages() -> None:
    first, second = read(
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"messages": [{"role": "system", "content": "s"}, TURNS[0]], "chosen": "c", "rejected": ""},
    )
    assert first == Preference(QUESTION, "a", "b")
    assert second.conversations == (
        (Message("system", "s"), *QUESTION, Message("assistant", "c")),
        (Message("system", "s"), *QUESTION, Message("assistant", "")),
    )


def test_the_fields_are_the_recipes_own() -> None:
    keys_of_row = {"input_key": "context", "chosen_key": "better", "rejected_key": "worse"}
    assert read({"context": TURNS, "better": "x", "worse": "y"}, **keys_of_row) == [Preference(CONTEXT, "x", "y")]


def test_of_two_completions_the_lower_rank_is_preferred() -> None:
    pairs = read(ranked(0, 1), ranked(2, 1), ranked(1, 0, context=TURNS))
    assert pairs == [Preference(QUESTION, "x", "y"), Preference(QUESTION, "y", "x"), Preference(CONTEXT, "y", "x")]


def test_a_tie_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    assert len(read(ranked(1, 1), ranked(0, 1), ranked(3, 3))) == 1
    assert "dropped 2 of 3 pairs without a preference" in caplog.text


def test_prompt_files_surround_texts_and_precede_messages(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Q: {}")
    (tmp_path / "system.txt").write_text("s")
    files = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt_file": str(tmp_path / "system.txt")}
    (pair,) = read({"prompt": "q", "chosen": "a", "rejected": "b"}, **files)
    assert pair.messages == (Message("system", "s"), Message("user", "Q: q"))
    (pair,) = read(ranked(0, 1, context=TURNS), system_prompt_file=str(tmp_path / "system.txt"))
    assert pair.messages == (Message("system", "s"), *CONTEXT)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a", "rejected": "b"}, "has no field 'prompt'"),
        ({"prompt": "q", "rejected": "b"}, "has no field 'chosen'"),
        ({"prompt": "q", "chosen": "a", "rejected": ["b"]}, "rejected must be a text"),
        ({"messages": [], "chosen": "a", "rejected": "b"}, "messages must be a list"),
        ({"messages": TURNS[:2], "chosen": "a", "rejected": "b"}, "the prompt must end with a message that is not"),
        ({"messages": [{"role": "human", "content": "q"}], "chosen": "a", "rejected": "b"}, "role is 'human'"),
        ({"context": "q", "completions": ranked(0, 1)["completions"][:1]}, "must be a list of two"),
        ({"context": "q", "completions": [{"rank": 0, "completion": TURNS}, {"rank": 1, "completion": TURNS}]}, "one"),
        ({"chosen": said("x"), "rejected": said("y")}, "the prompt must end"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row: Any, problem: str) -> None:
    with pytest.raises(DataError, match=rf"data\.train \(jsonl\): row 1: .*{problem}"):
        read({"prompt": "q", "chosen": "a", "rejected": "b"}, row)


HELPSTEER = [
    {"context": TURNS, "response1": "x", "response2": "y", "overall_preference": -2, "domain": "general"},
    {"context": TURNS[:1], "response1": "x", "response2": "y", "overall_preference": 1, "domain": "stem"},
    {"context": TURNS[:1], "response1": "x", "response2": "y", "overall_preference": 0, "domain": "code"},
]
TULU = [{"id": "1", "source": "s", "chosen": [*TURNS, *said("x")], "rejected": [*TURNS, *said("y")]}]


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("HelpSteer3", HELPSTEER, [Preference(CONTEXT, "x", "y"), Preference(QUESTION, "y", "x")]),
        ("Tulu3Preference", TULU, [Preference(CONTEXT, "x", "y")]),
    ],
)
def test_datasets_of_the_hub_are_read_from_files_of_their_schema(
    name: str, rows: Any, expected: list[Preference], tmp_path: Path
) -> None:
    write(tmp_path / "hub" / "train.jsonl", *rows)
    data = {"train": {"dataset_name": name, "data_path": str(tmp_path / "hub")}}
    train, held_out = load_preferences(PreferenceDataConfig.model_validate(data), 0)
    assert list(train.examples) == expected
    assert held_out == ()


def test_helpsteer_in_supervised_training_is_still_the_preferred_answer(tmp_path: Path) -> None:
    from nemo_rl.config.supervised_runs import SFTDataConfig
    from nemo_rl.data.conversations import load_conversations

    write(tmp_path / "hub" / "train.jsonl", *HELPSTEER)
    data = {"train": {"dataset_name": "HelpSteer3", "data_path": str(tmp_path / "hub")}}
    train, _ = load_conversations(SFTDataConfig.model_validate(data), 0)
    assert [each.messages[-1].content for each in train.examples] == ["x", "y", "x"]


def test_a_share_is_held_out_and_shared_prompts_are_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "chosen": "a", "rejected": "b"} for number in range(10)]
    path = write(tmp_path / "pairs.jsonl", *rows)
    other = write(tmp_path / "other.jsonl", rows[3])
    data = {"train": {"data_path": str(path), "split_validation_size": 0.2}, "validation": {"data_path": str(other)}}
    train, held_out = load_preferences(PreferenceDataConfig.model_validate(data), 0)
    assert sorted(len(each.examples) for each in held_out) == [1, 2]
    prompts = {pair.messages for each in held_out for pair in each.examples}
    assert len(train.examples) == 10 - len(prompts)
    assert not prompts & {pair.messages for pair in train.examples}


def test_only_the_answers_are_trained_on() -> None:
    encoder = ChatEncoder(byte_tokenizer("zephyr"))
    pair = Preference(CONTEXT, "xyz", "w")
    (sample,) = encode_preferences(encoder, ExampleSet("pairs", [pair]), max_tokens=500).samples
    texts = [encoder.decode([int(token) for token in row.token_ids[row.token_mask]]) for row in sample.rows]
    assert texts == ["xyz", "w"]
    prompt = [row.token_ids[: np.flatnonzero(row.token_mask)[0]].tolist() for row in sample.rows]
    assert prompt[0] == prompt[1]


def test_pairs_with_a_long_side_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    encoder = ChatEncoder(byte_tokenizer("zephyr"))
    pairs = [Preference(QUESTION, "a", "b"), Preference(QUESTION, "a", "b" * 200)]
    dataset = encode_preferences(encoder, ExampleSet("pairs", pairs), max_tokens=100)
    assert (len(dataset.samples), dataset.num_overlong, dataset.num_dropped) == (1, 1, 1)
    assert "dropped 1 of 2 pairs with more than 100 tokens on a side" in caplog.text
    with pytest.raises(DataError, match="pairs: no pair has at most 100 tokens"):
        encode_preferences(encoder, ExampleSet("pairs", pairs[1:]), max_tokens=100)


def test_a_masked_pair_keeps_its_place_without_weight_in_the_loss() -> None:
    encoder = ChatEncoder(byte_tokenizer("zephyr"))
    pairs = [Preference(QUESTION, "a", "b"), Preference(QUESTION, "a", "b" * 200), Preference(QUESTION, "cc", "d")]
    dataset = encode_preferences(encoder, ExampleSet("pairs", pairs), max_tokens=100, overlong="mask")
    assert (len(dataset.samples), dataset.num_overlong, dataset.num_dropped) == (3, 1, 0)
    batch = make_pair_batch(dataset.samples)
    assert batch[keys.SAMPLE_MASK].tolist() == [1, 1, 0, 0, 1, 1]
    others = make_pair_batch([dataset.samples[0], dataset.samples[2]])

    def loss(pairs: TrainingBatch, rows: list[int]) -> float:
        shape = pairs[keys.TOKEN_IDS].shape
        logprobs = torch.arange(6.0)[rows, None].expand(shape) / -10
        pairs[keys.REFERENCE_LOGPROBS] = torch.zeros(shape)
        normalizer = count_valid(pairs, torch.arange(len(pairs)))
        return float(PreferenceLoss(DPOConfig(sft_loss_weight=0.5))(TokenScores(logprobs), pairs, normalizer)[0])

    assert loss(batch, [0, 1, 2, 3, 4, 5]) == loss(others, [0, 1, 4, 5])
    with pytest.raises(ConfigError, match=r"max_input_seq_length = 100: pair 1 of 'pairs' has \d+ tokens on a side"):
        encode_preferences(encoder, ExampleSet("pairs", pairs), max_tokens=100, overlong="refuse")
    with pytest.raises(DataError, match="no pair has at most 100 tokens"):
        encode_preferences(encoder, ExampleSet("pairs", pairs[1:2]), max_tokens=100, overlong="mask")


def test_a_batch_has_the_rows_of_a_pair_in_one_group() -> None:
    encoder = ChatEncoder(byte_tokenizer("zephyr"))
    pairs = [Preference(QUESTION, "aa", "b"), Preference(QUESTION, "c", "ddd")]
    batch = make_pair_batch(encode_preferences(encoder, ExampleSet("pairs", pairs), max_tokens=100).samples)
    assert batch[keys.GROUP_ID].tolist() == [0, 0, 1, 1]
    assert batch[keys.PREFERENCE].tolist() == [1, -1, 1, -1]
    assert batch[keys.TRAJECTORY_ID].tolist() == [0, 1, 2, 3]


def test_the_last_run_of_trained_tokens_is_the_last_answer() -> None:
    mask = np.array([False, True, True, False, True, True, False])
    kept = SupervisedSample(np.arange(7, dtype=np.int32), mask).with_last_answer()
    assert kept.token_mask.tolist() == [False, False, False, False, True, True, False]
