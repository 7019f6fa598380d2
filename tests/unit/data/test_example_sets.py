"""Sets of supervised examples."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.supervised_runs import SFTDataConfig
from nemo_rl.data.conversations import load_conversations
from nemo_rl.errors import ConfigError
from tests.unit.data.test_conversations import of, write


def test_what_is_validated_on_is_not_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", of("a"), of("b"), of("c"))
    held_out = write(tmp_path / "held.jsonl", of("b", "no"))
    more = write(tmp_path / "more.jsonl", of("d"))
    sets: dict[str, Any] = {
        "train": [{"data_path": train}, {"data_path": more, "repeat": 2}],
        "validation": [{"data_path": held_out}, {"data_path": held_out, "name": "again"}],
        "default": {"dataset_name": "jsonl"},
    }
    blend, (one, two) = load_conversations(SFTDataConfig.model_validate(sets), run_seed=0)
    assert [each.messages[0].content for each in blend.examples] == ["a", "c", "d", "d"]
    assert (blend.name, one.name, two.name) == ("train", "jsonl", "again")
    kept, _ = load_conversations(SFTDataConfig.model_validate({**sets, "disjoint": False}), run_seed=0)
    assert len(kept.examples) == 5
    with pytest.raises(ConfigError, match=r"data\.disjoint"):
        load_conversations(SFTDataConfig.model_validate({**sets, "train": {"data_path": held_out}}), run_seed=0)
