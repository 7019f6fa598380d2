"""Blends of prompts, also of large files: ids, slices, memory."""

import json
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.prompt_loader import PromptLoader, fingerprint
from nemo_rl.data.prompt_sets import load_prompt_sets
from nemo_rl.data.prompts import Blend, InMemoryPrompts
from nemo_rl.errors import DataError
from nemo_rl.types import Message, Prompt


def held(*contents: str) -> InMemoryPrompts:
    prompts = [Prompt("", "echo", (Message("user", content),)) for content in contents]
    return InMemoryPrompts(prompts, [ord(content) for content in contents])


def contents(prompts: Sequence[Prompt]) -> str:
    return "".join(prompt.messages[0].content for prompt in prompts)


def test_parts_follow_each_other_and_repeated_ids_are_numbered() -> None:
    blend = Blend.of([held("a", "b"), held("b", "c", "b")])
    assert contents(blend) == "abbcb"
    a, b, c = (f"{ord(content):016x}" for content in "abc")
    assert list(blend.prompt_ids()) == [a, b, f"{b}-1", c, f"{b}-2"] == [prompt.prompt_id for prompt in blend]
    assert blend[-1] == blend[4] == list(blend)[4]


def test_repeats_are_counted_whatever_the_first_bytes_of_digests() -> None:
    digests = [random.Random(seed % 40).getrandbits(64) >> (seed % 3 * 8) for seed in range(300)]
    blend = Blend.of([InMemoryPrompts([Prompt("", "math", ()) for _ in digests], digests)])
    assert list(blend.repeats) == [digests[:index].count(digest) for index, digest in enumerate(digests)]
    assert max(blend.repeats) > 1


def test_the_text_of_a_blend_does_not_list_its_prompts() -> None:
    """Python writes the result of asyncio.run into a text at its end, which took 20 MB for a million prompts."""
    assert len(repr(Blend.of([held(*"ab" * 5_000)]))) < 1_000


def test_a_slice_is_a_blend_of_the_same_prompts() -> None:
    blend = Blend.of([held("a", "b"), held("b", "c", "b")])
    for part in (slice(1, 4), slice(None, None), slice(None, None, -1), slice(4, 2), slice(-2, None)):
        assert list(blend[part]) == list(blend)[part]
    assert [blend[2:][index] for index in range(3)] == list(blend)[2:]


def test_left_out_places_do_not_count_as_repeats() -> None:
    blend = Blend.of([held("a", "b", "a")], without={0})
    assert contents(blend) == "ba"
    assert blend[1].prompt_id == f"{ord('a'):016x}"


def test_a_place_beyond_the_end_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        Blend.of([held("a")])[1]


@pytest.fixture
def blended(tmp_path: Path) -> Blend:
    """Two plain prompts between four rows of a file and the same file again, from which one is left out."""
    gym = [{"responses_create_params": {"input": str(number)}, "agent_ref": {"name": "a"}} for number in range(4)]
    (tmp_path / "gym.jsonl").write_text("".join(json.dumps(row) + "\n" for row in gym))
    (tmp_path / "held_out.jsonl").write_text(json.dumps(gym[1]) + "\n")
    (tmp_path / "plain.jsonl").write_text('{"input": "x", "output": "y"}\n{"input": "z", "output": "y"}\n')
    rows = DatasetConfig(dataset_name="nemo_gym", data_path=str(tmp_path / "gym.jsonl"))
    held_out = DatasetConfig(dataset_name="nemo_gym", data_path=str(tmp_path / "held_out.jsonl"))
    plain = DatasetConfig(dataset_name="jsonl", data_path=str(tmp_path / "plain.jsonl"))
    train, _ = load_prompt_sets(DataConfig(train=[rows, plain, rows], validation=held_out), run_seed=0)
    assert isinstance(train.prompts, Blend)
    assert (train.task_names, train.agent_names) == ({"nemo_gym", "math"}, {"a"})
    return train.prompts


def test_files_and_plain_sets_blend_in_the_order_of_the_configuration(blended: Blend) -> None:
    assert contents(blended) == "023xz023"
    assert [prompt.dataset for prompt in blended] == ["nemo_gym"] * 3 + ["jsonl"] * 2 + ["nemo_gym_2"] * 3
    assert [blended[index] for index in range(len(blended))] == list(blended)
    ids = [prompt.prompt_id for prompt in blended]
    assert list(blended.prompt_ids()) == ids
    assert len(set(ids)) == 8
    assert ids[5:] == [f"{prompt_id}-1" for prompt_id in ids[:3]]


def test_the_loader_takes_a_blend_as_it_takes_prompts(blended: Blend) -> None:
    in_memory = tuple(blended)
    assert fingerprint(blended, shuffle=True, seed=1) == fingerprint(in_memory, shuffle=True, seed=1)
    loaders = [PromptLoader(prompts, shuffle=True, seed=1, max_epochs=2) for prompts in (blended, in_memory)]
    first, second = (loader.take(16) for loader in loaders)
    assert first == second
    unshuffled = PromptLoader(blended, shuffle=False, seed=1, max_epochs=1).take(8)
    assert contents([each.prompt for each in unshuffled]) == "023xz023"


def test_a_set_is_repeated_as_often_as_its_section_says(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text('{"input": "x", "output": "y"}\n{"input": "z", "output": "y"}\n')
    train, _ = load_prompt_sets(
        DataConfig(train=DatasetConfig(dataset_name="jsonl", data_path=str(path), repeat=2)), run_seed=0
    )
    assert contents(train.prompts) == "xzxz"


def test_a_row_changed_during_the_run_stops_it_at_that_row(blended: Blend, tmp_path: Path) -> None:
    path = tmp_path / "gym.jsonl"
    path.write_text(path.read_text().replace('"3"', '"9"'))
    assert blended[0].messages[0].content == "0"
    with pytest.raises(DataError, match=r"gym\.jsonl: was changed while it is in use"):
        blended[2]


def test_a_blend_travels_to_another_process(blended: Blend) -> None:
    assert list(pickle.loads(pickle.dumps(blended))) == list(blended)


ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "x"}], "tools": []},
    "agent_ref": {"type": "responses_api_agents", "name": "agent"},
    "expected_answer": "y" * 700,
}
LOAD = """
import json, resource, sys, time
from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.prompt_sets import load_prompt_sets
from nemo_rl.data.prompt_loader import PromptLoader

def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before, began = megabytes(), time.perf_counter()
section = DatasetConfig(dataset_name="nemo_gym", data_path=sys.argv[1])
held_out = DatasetConfig(**{**section.model_dump(), "size": 10})
train, _ = load_prompt_sets(DataConfig(train=section, validation=held_out), run_seed=0)
loader = PromptLoader(train.prompts, shuffle=True, seed=0, max_epochs=2)
loaded_s = time.perf_counter() - began
for _ in range(20):
    loader.take(64)
rows = sum(1 for _ in train.prompts)
print(json.dumps({"growth": megabytes() - before, "rows": rows, "loaded_s": loaded_s, "agents": [*train.agent_names]}))
"""


def growth_over(path: Path, num_bytes: int) -> dict:
    """Peak memory that loading, 20 steps and a pass over all prompts add, in megabytes."""
    num_rows = 0
    with path.open("w") as rows:
        while rows.tell() < num_bytes:
            rows.writelines(json.dumps(ROW | {"id": num_rows + i}) + "\n" for i in range(1000))
            num_rows += 1000
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert (figures["rows"], figures["agents"]) == (num_rows - 10, ["agent"])
    return figures


def test_rows_of_a_file_are_not_held_in_memory(tmp_path: Path) -> None:
    assert growth_over(tmp_path / "rows.jsonl", 20_000_000)["growth"] < 15


@pytest.mark.slow
def test_a_file_of_300_megabytes_takes_less_than_50(tmp_path: Path) -> None:
    figures = growth_over(tmp_path / "rows.jsonl", 300_000_000)
    assert figures["growth"] < 50, figures
