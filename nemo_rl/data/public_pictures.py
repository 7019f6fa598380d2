"""Public datasets of questions about pictures, by NeMo-RL's names."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.config.images import ImagesConfig
from nemo_rl.data.row_sources import load_hub_rows
from nemo_rl.data.rows import Row
from nemo_rl.data.table_rows import Table
from nemo_rl.errors import ConfigError

CLEVR_SPLITS = {  # names on the hub
    "train": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
    "valA": "MMInstruction/Clevr_CoGenT_ValA",
    "valB": "MMInstruction/Clevr_CoGenT_ValB",
}
ANSWER = re.compile(r"<answer>(.*?)</answer>")
NO_PICTURES = (
    "its pictures are those of COCO 2014, which are no part of it; write rows with data.*.images.directories "
    "(docs/images.md), scored by env type tagged_answers"
)


def read_question(picture: Any, question: str, answer: str) -> Row:
    """Return a row with one picture, its question and the answer."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def read_clevr(row: Mapping[str, Any]) -> Row:
    """Read a row of Clevr_CoGenT: the answer is that between tags, if there are any."""
    found = ANSWER.search(row["solution"])
    return read_question(row["image"], row["problem"], (found[1] if found else row["solution"]).strip())


def read_geometry3k(row: Mapping[str, Any]) -> Row:
    """Read a row of geometry3k: its first picture, and the problem without its mark."""
    return read_question(row["images"][0], row["problem"].replace("<image>", ""), row["answer"])


def _load_clevr(section: DatasetConfig, seed: int) -> Table:
    if section.data_path is None:
        section = section.model_copy(update={"data_path": CLEVR_SPLITS[section.split or "train"], "split": "train"})
    return replace(load_hub_rows(section, None), convert=read_clevr)


def _check_clevr(key: str, section: DatasetConfig, config: Any) -> None:
    if section.data_path is None and section.split not in (None, *CLEVR_SPLITS):
        raise ConfigError(f"{key}.split", section.split, "no such split", known=CLEVR_SPLITS)


def _load_geometry3k(section: DatasetConfig, seed: int) -> Table:
    section = section.model_copy(update={"data_path": section.data_path or "hiyouga/geometry3k"})
    return replace(load_hub_rows(section, None), convert=read_geometry3k)


def _refuse(key: str, section: DatasetConfig, config: Any) -> None:
    raise ConfigError(f"{key}.dataset_name", section.dataset_name, NO_PICTURES)


WITH_IMAGES = DatasetConfig(images=ImagesConfig())
CLEVR_COGENT = DatasetEntry(
    DatasetConfig,
    make=_load_clevr,
    check=_check_clevr,
    defaults=WITH_IMAGES,
    env_name="clevr-cogent",
    reads_tables=True,
)
GEOMETRY3K = DatasetEntry(
    DatasetConfig, make=_load_geometry3k, defaults=WITH_IMAGES, env_name="geometry3k", reads_tables=True
)
REFCOCO = DatasetEntry(DatasetConfig, make=_load_clevr, check=_refuse, env_name="refcoco")
