"""Prompts that are too long, held out or unusable: found in a sample at start, and when a prompt is drawn."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data import prompt_sets, prompts
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.data.prompt_screen import (
    LengthLimit,
    PromptScreen,
    Verdict,
    check_measured_prompts,
    check_training_prompts,
    trainable_prompts,
)
from nemo_rl.data.prompt_sets import PromptSet, load_prompt_sets
from nemo_rl.data.prompts import LazyPrompts, spread
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import Message, Prompt
from tests.templates import byte_tokenizer

Overlong = Literal["mask", "drop", "refuse"]
OVERHEAD = len("USER: \nASSISTANT: ")  # of the template; a token is a byte


class CountingEncoder(ChatEncoder):
    """An encoder that counts the prompts that it renders."""

    def __init__(self) -> None:
        super().__init__(byte_tokenizer("plain_text"))
        self.num_rendered = 0

    def _render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        self.num_rendered += 1
        return super()._render_prompt(messages, tools)


def make_prompt(index: int, length: int) -> Prompt:
    return Prompt(f"p{index}", "math", (Message("user", "x" * length),), dataset="rows")


# prompts 2, 3 and 6 are longer than the limit
PROMPTS = tuple(make_prompt(index, length) for index, length in enumerate((1, 2, 30, 40, 3, 4, 50)))


def make_limit(max_characters: int = 10, encoder: ChatEncoder | None = None) -> LengthLimit:
    return LengthLimit(encoder or CountingEncoder(), OVERHEAD + max_characters)


def make_loader(
    overlong: Overlong, *, epochs: int = 2, shuffle: bool = False, max_characters: int = 10
) -> PromptLoader:
    screen = PromptScreen(make_limit(max_characters), overlong)
    return PromptLoader(PROMPTS, shuffle=shuffle, seed=3, max_epochs=epochs, screen=screen)


def drawn(taken: Sequence[Any]) -> list[tuple[int, bool]]:
    return [(one.prompt_index, one.is_masked) for one in taken]


def test_the_next_prompt_takes_the_place_of_a_dropped_one_and_both_are_consumed() -> None:
    loader = make_loader("drop")
    assert drawn(loader.take(3)) == [(0, False), (1, False), (4, False)]
    assert loader.consumed == 5
    assert loader.take_metrics() == {"overlong_prompts": 2.0}
    assert loader.take_metrics() == {"overlong_prompts": 0.0}
    assert [index for index, _ in drawn(loader.take(3))] == [5, 7, 8]  # 6 is dropped, 7 begins the next epoch


def test_a_masked_prompt_keeps_its_place_in_the_step() -> None:
    loader = make_loader("mask")
    assert drawn(loader.take(4)) == [(0, False), (1, False), (2, True), (3, True)]
    loader = make_loader("mask")
    assert [drawn(loader.take_step(4)) for _ in range(2)] == [
        [(0, False), (1, False)],
        [(4, False), (5, False), (7, False)],
    ]
    assert loader.consumed == 8


def test_a_step_of_masked_prompts_alone_is_skipped() -> None:
    loader = make_loader("mask", epochs=1)
    assert drawn(loader.take_step(2)) == [(0, False), (1, False)]
    assert drawn(loader.take_step(2)) == [(4, False), (5, False)]  # 2 and 3 are masked
    assert loader.take_step(2) == ()
    assert loader.data_exhausted


@pytest.mark.parametrize("overlong", ["drop", "mask"])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_a_resumed_loader_continues_exactly(overlong: Overlong, steps_before: int) -> None:
    def rest(loader: PromptLoader) -> list[list[tuple[int, bool]]]:
        return [drawn(loader.take_step(2)) for _ in range(8)]

    uninterrupted = make_loader(overlong, shuffle=True)
    for _ in range(steps_before):
        uninterrupted.take_step(2)
    resumed = make_loader(overlong, shuffle=True)
    resumed.load_state_dict(uninterrupted.state_dict())
    assert resumed.consumed == uninterrupted.consumed
    assert rest(resumed) == rest(uninterrupted)


def test_positions_of_a_checkpoint_do_not_depend_on_the_limit() -> None:
    before = make_loader("drop")
    before.take(3)
    after = make_loader("drop", max_characters=45)
    after.load_state_dict(before.state_dict())
    assert drawn(after.take(2)) == [(5, False), (7, False)]


def test_a_prompt_that_was_put_back_is_screened_again() -> None:
    loader = make_loader("drop", max_characters=45)
    loader.take(4)
    loader.put_back([1, 2])
    state = loader.state_dict()
    shorter = make_loader("drop")
    shorter.load_state_dict(state)
    assert drawn(shorter.take(2)) == [(1, False), (4, False)]


def test_refusing_names_the_first_over_long_prompt_and_renders_all() -> None:
    encoder = CountingEncoder()
    limit = make_limit(encoder=encoder)
    with pytest.raises(ConfigError, match=rf"max_input_seq_length = 28: prompt p2 .* has {OVERHEAD + 30} tokens"):
        check_training_prompts(PromptSet("train", PROMPTS), PromptScreen(limit, "refuse"))
    encoder.num_rendered = 0
    check_training_prompts(PromptSet("train", PROMPTS[:2]), PromptScreen(limit, "refuse"))
    assert encoder.num_rendered == 2


def test_only_prompts_that_are_all_over_long_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    screen = PromptScreen(make_limit())
    with caplog.at_level(logging.WARNING):
        check_training_prompts(PromptSet("train", PROMPTS), screen)
    assert "3 of 7 sampled training prompts are longer" in caplog.text
    with pytest.raises(ConfigError, match=r"all training prompts are longer, e\.g\. prompt p2 of 'rows'"):
        check_training_prompts(PromptSet("train", PROMPTS[2:4]), screen)


def test_text_that_is_too_long_to_be_encoded_is_over_long() -> None:
    limit = LengthLimit(CountingEncoder(), 2)
    assert not limit.fits(make_prompt(0, 10_000))
    assert "10000 characters" in limit.describe(make_prompt(0, 10_000))


def test_over_long_prompts_of_a_validation_set_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    measured = PromptSet("held", PROMPTS)
    with caplog.at_level(logging.WARNING):
        assert check_measured_prompts(measured, make_limit(), "drop", None) == 3
        assert check_measured_prompts(measured, make_limit(), "mask", 3) == 1
    assert "validation set held: 3 of 7 prompts are longer" in caplog.text
    assert "p2, p3, p6" in caplog.text
    assert check_measured_prompts(measured, make_limit(), "drop", 2) == 0
    with pytest.raises(ConfigError, match="all prompts of 'long' are longer"):
        check_measured_prompts(PromptSet("long", PROMPTS[2:4]), make_limit(), "drop", None)
    with pytest.raises(ConfigError, match="prompt p2 of 'rows'"):
        check_measured_prompts(measured, make_limit(), "refuse", None)


def test_a_prompt_that_fails_its_check_is_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    def check(prompt: Prompt) -> None:
        if prompt.prompt_id == "p1":
            raise DataError("'answer' is nan")

    screen = PromptScreen(check=check)
    assert [screen.judge(prompt) for prompt in PROMPTS[:2]] == [Verdict.TRAIN, Verdict.DROP]
    assert "prompt p1 of 'rows': 'answer' is nan" in caplog.text
    assert screen.take_metrics() == {"overlong_prompts": 0.0, "unusable_prompts": 1.0}


# ---- large datasets


@pytest.fixture
def small_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take 20 rows for many, and 5 for a sample."""
    monkeypatch.setattr(prompt_sets, "READ_AT_START", 20)
    monkeypatch.setattr(prompts, "SAMPLE_ROWS", 5)


def write_rows(path: Path, *rows: object) -> DatasetConfig:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return DatasetConfig(dataset_name="jsonl", data_path=str(path))


def questions(count: int) -> list[dict[str, str]]:
    return [{"input": f"What is {index} + 1?", "output": str(index + 1)} for index in range(count)]


def test_a_sample_is_evenly_spread() -> None:
    assert list(spread(10, 3)) == [0, 4, 8]
    assert list(spread(3, 10)) == [0, 1, 2]
    assert list(spread(0, 5)) == []


@pytest.mark.usefixtures("small_start")
@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
def test_a_large_dataset_is_neither_read_nor_rendered_before_its_prompts_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    section = write_rows(tmp_path / "train.jsonl", *questions(500))
    if kind == "huggingface":
        section = DatasetConfig(dataset_name=kind, data_path=str(tmp_path), input_key="input", output_key="output")
    made: list[int] = []
    build = LazyPrompts._build_prompt

    def count(self: LazyPrompts, index: int, row: dict[str, Any]) -> Prompt:
        made.append(index)
        return build(self, index, row)

    monkeypatch.setattr(LazyPrompts, "_build_prompt", count)
    train, _ = load_prompt_sets(DataConfig(train=section), run_seed=0)
    encoder = CountingEncoder()
    screen = PromptScreen(make_limit(200, encoder))
    check_training_prompts(train, screen)
    assert (set(made), encoder.num_rendered) == ({0, 100, 200, 300, 400}, 5 + 1)  # and one that is trained on
    loader = PromptLoader(train.prompts, shuffle=True, seed=0, max_epochs=1, screen=screen)
    made.clear()
    encoder.num_rendered = 0
    taken = loader.take(8)
    assert (len(made), encoder.num_rendered) == (8, 8)
    assert sorted(one.prompt.messages[0].content for one in taken) == sorted(f"What is {i} + 1?" for i in made)
    assert {one.prompt.env_state["answer"] for one in taken} == {str(index + 1) for index in made}


@pytest.mark.usefixtures("small_start")
def test_equal_rows_of_a_large_dataset_have_ids_of_their_own_that_stay(tmp_path: Path) -> None:
    rows = questions(30)
    one, _ = load_prompt_sets(DataConfig(train=write_rows(tmp_path / "one.jsonl", *rows, rows[3])), run_seed=0)
    two, _ = load_prompt_sets(DataConfig(train=write_rows(tmp_path / "two.jsonl", rows[9], *rows)), run_seed=0)
    ids = [prompt.prompt_id for prompt in one.prompts]
    assert len(set(ids)) == 31
    assert ids[30] == f"{ids[3]}-1"
    assert [prompt.prompt_id for prompt in two.prompts][1:10] == ids[:9]


@pytest.mark.usefixtures("small_start")
def test_held_out_prompts_of_a_large_dataset_are_dropped_when_they_are_drawn(tmp_path: Path) -> None:
    rows = questions(30)
    data = DataConfig(
        train=write_rows(tmp_path / "train.jsonl", *rows),
        validation=write_rows(tmp_path / "held.jsonl", rows[2], rows[0]),
    )
    train, _ = load_prompt_sets(data, run_seed=0)
    screen = PromptScreen(held_out=train.held_out)
    loader = PromptLoader(train.prompts, shuffle=False, seed=0, max_epochs=1, screen=screen)
    assert [index for index, _ in drawn(loader.take(3))] == [1, 3, 4]
    assert loader.take_metrics()["held_out_prompts"] == 2
    assert next(trainable_prompts(train.prompts, screen)).messages[0].content == "What is 1 + 1?"
    everything, _ = load_prompt_sets(data.model_copy(update={"disjoint": False}), run_seed=0)
    assert everything.held_out == frozenset()


@pytest.mark.usefixtures("small_start")
def test_rows_of_a_large_dataset_can_be_split_off_for_validation(tmp_path: Path) -> None:
    section = write_rows(tmp_path / "train.jsonl", *questions(40)).model_copy(update={"split_validation_size": 0.25})
    train, (held,) = load_prompt_sets(DataConfig(train=section), run_seed=0)
    trained, validated = ({p.messages for p in one.prompts} for one in (train, held))
    assert (len(train.prompts), len(held.prompts), trained & validated) == (30, 10, set())


@pytest.mark.usefixtures("small_start")
def test_a_row_that_cannot_be_read_is_dropped_and_named_when_it_is_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[object] = [*questions(30)]
    rows[1], rows[2] = '{"input": ', {"input": "no answer"}
    train, _ = load_prompt_sets(DataConfig(train=write_rows(tmp_path / "train.jsonl", *rows)), run_seed=0)
    loader = PromptLoader(train.prompts, shuffle=False, seed=0, max_epochs=1)
    assert [index for index, _ in drawn(loader.take(2))] == [0, 3]
    assert loader.take_metrics()["unusable_prompts"] == 2
    assert "train.jsonl:2: no valid JSON" in caplog.text
    assert "train.jsonl:3: has no field 'output'" in caplog.text


@pytest.mark.usefixtures("small_start")
def test_a_sampled_row_that_cannot_be_read_ends_the_run_at_start(tmp_path: Path) -> None:
    section = write_rows(tmp_path / "train.jsonl", {"input": "no answer"}, *questions(30))
    with pytest.raises(DataError, match=r"train\.jsonl:1: has no field 'output'"):
        load_prompt_sets(DataConfig(train=section), run_seed=0)
