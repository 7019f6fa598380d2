"""Every value that training reads means the same as in NeMo-RL: scripts/acceptance/nemo_rl_meaning.py on its recipes.

NEMO_RL_CHECKOUT may name a working tree of NeMo-RL, of which 60 recipes are drawn; the recipes that are held here are
written in their shape.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HELD = Path(__file__).parent / "recipes"
CHECKOUT = os.environ.get("NEMO_RL_CHECKOUT")
SEED = 38


@pytest.fixture(scope="module")
def meaning() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nemo_rl_meaning", ROOT / "scripts/acceptance/nemo_rl_meaning.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipes_that_are_held_have_no_silent_difference(meaning: ModuleType) -> None:
    findings = [meaning.compare(path, family) for path, family in meaning.draw(HELD, seed=SEED, count=24)]
    assert [(one.path.name, text) for one in findings for text in one.silent] == []
    assert sum(one.counts["equal"] for one in findings) > 40 * len(findings)


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="NEMO_RL_CHECKOUT names no working tree of NeMo-RL")
def test_sixty_recipes_of_nemo_rl_have_no_silent_difference(
    meaning: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(str(CHECKOUT)).resolve()
    monkeypatch.chdir(root)
    findings = [meaning.compare(path, family) for path, family in meaning.draw(root / "examples", seed=SEED, count=60)]
    assert [(one.path.name, text) for one in findings for text in one.silent] == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"grpo": {"batch_multiplier": 2}}, "grpo.batch_multiplier"),
        ({"policy": {"max_grad_norm": 0.5}}, "policy.max_grad_norm"),
        ({"policy": {"optimizer": {"kwargs": {"lr": 1.0e-5}}}}, "policy.optimizer.kwargs.lr"),
        ({"loss_fn": {"use_cispo": True}}, "loss_fn.use_cispo"),
        ({"data": {"train": {"split_validation_size": 0.1}}}, "data.train"),
        ({"policy": {"generation": {"val_temperature": 0.5}}}, "policy.generation.val_temperature"),
        ({"grpo": {"new_key_of_theirs": 3}}, "grpo.new_key_of_theirs"),
    ],
)
def test_a_value_that_is_read_as_another_is_found(
    meaning: ModuleType, change: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The comparison is not blind: what NeMo-RL's reading of a changed recipe has, ours of the unchanged one lacks."""
    base, changed = HELD / "main" / "grpo.yaml", tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump({"defaults": str(base), **change}))
    theirs = meaning.read_theirs(changed)
    monkeypatch.setattr(meaning, "read_theirs", lambda path: theirs)
    (found,) = meaning.compare(base, "grpo").silent
    assert found.startswith(f"{key} = ")
