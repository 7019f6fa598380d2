"""Datasets of pictures by NeMo-RL's names, from directories in the shapes of the hub's."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.config.loading import load_config
from nemo_rl.data.prompt_sets import load_prompt_sets
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.types import ImagePart, Message, TextPart
from tests.fakes.vision import picture
from tests.unit.data.test_images import bomb

VISION = Path(__file__).parents[3] / "examples" / "configs" / "vision.yaml"
PICTURES = [picture(seed) for seed in range(3)]


def saved(directory: Path, column: str, files: list[Any], feature: Any, **columns: list[str]) -> str:
    import datasets

    features = datasets.Features({column: feature, **dict.fromkeys(columns, datasets.Value("string"))})
    datasets.Dataset.from_dict({column: files, **columns}, features=features).save_to_disk(str(directory))
    return str(directory)


def cell(image: ImagePart) -> dict[str, Any]:
    return {"bytes": image.file, "path": "p.png"}


def prompts(name: str, data_path: str, tmp_path: Path) -> Any:
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text("Think.\n{}")
    section = DatasetConfig(dataset_name=name, data_path=data_path, prompt_file=str(prompt_file))
    train, _ = load_prompt_sets(DataConfig(train=section), run_seed=0)
    return list(train.prompts)


def test_rows_of_clevr_are_questions_with_their_picture(tmp_path: Path) -> None:
    import datasets

    columns = {"problem": ["how many?", "red?", "?"], "solution": ["<answer> 3 </answer>", "yes", "no"]}
    path = saved(tmp_path / "rows", "image", [cell(each) for each in PICTURES], datasets.Image(), **columns)
    found = prompts("clevr-cogent", path, tmp_path)
    assert [prompt.env_state["answer"] for prompt in found] == ["3", "yes", "no"]
    assert found[0].messages == (Message("user", (PICTURES[0], TextPart("Think.\nhow many?"))),)
    assert {prompt.task_name for prompt in found} == {"clevr-cogent"}


def test_rows_of_geometry3k_have_their_first_picture(tmp_path: Path) -> None:
    import datasets

    columns = {"problem": ["<image>Find x."], "answer": ["2 \\sqrt { 221 }"]}
    files = [[cell(PICTURES[0]), cell(PICTURES[1])]]
    path = saved(tmp_path / "rows", "images", files, datasets.List(datasets.Image()), **columns)
    (prompt,) = prompts("geometry3k", path, tmp_path)
    assert prompt.messages == (Message("user", (PICTURES[0], TextPart("Think.\nFind x."))),)
    assert prompt.env_state["answer"] == "2 \\sqrt { 221 }"


def test_a_bomb_in_a_table_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    import datasets

    file = {"bytes": bomb(5_000, 5_000), "path": None}
    path = saved(tmp_path / "rows", "image", [file], datasets.Image(), problem=["?"], solution=["1"])
    with pytest.raises(DataError, match="5000 x 5000 pixels"):
        prompts("clevr-cogent", path, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.train={dataset_name: refcoco}"], "its pictures are those of COCO 2014"),
        (["data.train={dataset_name: clevr-cogent, split: valC}"], r"data\.train\.split = 'valC': no such split"),
    ],
)
def test_what_is_not_there_is_said_at_the_start(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(VISION, overrides)
