"""Every row of nemo_rl/config/peer_keys.yaml loads, and its value is under our key."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.config.key_search import PEER_KEYS
from nemo_rl.config.loading import load_config

PEERS: dict[str, dict[str, Any]] = yaml.safe_load(PEER_KEYS.read_text())
ROWS = [(peer, *row[:3]) for peer, table in PEERS.items() for row in table["rows"]]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work where the files and modules that the examples name exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"input": "1+1", "output": "2"}\n')
    (tmp_path / "my_rewards.py").write_text("def score(messages, metadata):\n    return 1.0\n")
    return tmp_path


def test_each_peer_has_its_most_used_keys_once() -> None:
    fewest = {"verl": 30, "prime-rl": 30, "SkyRL": 30, "TRL": 25, "W&B": 5}
    assert PEERS.keys() == fewest.keys()
    for peer, table in PEERS.items():
        assert len({row[0] for row in table["rows"]}) == len(table["rows"]) >= fewest[peer]


@pytest.mark.parametrize(("peer", "theirs", "key", "value"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_the_example_loads(peer: str, theirs: str, key: str, value: Any, directory: Path) -> None:
    recipe: dict[str, Any] = {"defaults": "grpo_math_1B"}
    node, (*parents, name) = recipe, key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[name] = value
    (directory / "recipe.yaml").write_text(json.dumps(recipe))
    found: Any = load_config(directory / "recipe.yaml").model_dump()
    for part in key.split("."):
        found = found[part]
    assert (found == value) if not isinstance(value, dict) else (value.items() <= found.items())
