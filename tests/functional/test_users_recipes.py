"""Eighteen recipes in the shapes that users of NeMo-RL have: 15 train two steps with a tiny model, the others are told
what to write."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.errors import CombinedConfigError, ConfigError
from tests.functional.cli import ROOT
from tests.functional.test_nemo_rl_recipes import LOADERS, loading, overrides, train
from tests.support.quick import quick

pytestmark = pytest.mark.timeout(900)
DIRECTORY = ROOT / "tests" / "compat" / "users"
FAMILIES = {
    "flat_sft": "sft",
    "chat_sft": "sft",
    "flat_dpo": "dpo",
    "distillation": "distillation",
    "reward_model": "rm",
}
REFUSED = {
    "run_script": r"env\.spelling .*write env\.spelling\.type: .*, and data\.default\.env_name: spelling",
    "own_processor": r"data\.train\.processor = 'spelling_processor'.*known: .*question_answer",
    "images": r"data\.train\.dataset_name = 'refcoco'",
}
RUN = sorted(path.stem for path in DIRECTORY.glob("*.yaml") if path.stem not in REFUSED)
QUICK = ("background_rollouts", "directory_of_rows", "reward_model", "sliding_puzzle")


@pytest.fixture(autouse=True)
def _words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the users' files, and name their directory in the environment, which the recipes read."""
    words = [f"{first}{second}t" for first in "abcdefgh" for second in "aeiou"]
    files: dict[str, list[dict[str, Any]]] = {
        "words": [{"word": word, "reversed": word[::-1]} for word in words[8:]],
        "held_out": [{"word": word, "reversed": word[::-1]} for word in words[:8]],
        "hub/train": [{"question": word, "answer": word[::-1]} for word in words[8:]],
        "hub/test": [{"question": word, "answer": word[::-1]} for word in words[:8]],
        "pairs": [{"prompt": word, "chosen_response": word[::-1], "rejected_response": word} for word in words],
        "chat": [
            {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
            for word in words
        ],
    }
    (tmp_path / "hub").mkdir()
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("WORDS", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def small(family: str, model: Path, directory: Path) -> list[str]:
    """Return what makes a recipe small, and leaves its data and environments."""
    shared = [text for text in overrides(family, model, directory) if not text.startswith("env=")]
    return [*shared, f"++logger.log_dir={directory / 'logs'}"]


LONGER = {
    "sliding_puzzle": [
        "policy.max_total_sequence_length=512",
        "policy.hf_config_overrides={max_position_embeddings: 512}",
    ]
}  # room for its rules


def test_there_are_eighteen_recipes_of_which_fifteen_run() -> None:
    assert (len(RUN), len(REFUSED)) == (15, 3)


@pytest.mark.parametrize("name", quick(RUN, QUICK))
def test_a_users_recipe_trains_two_steps(name: str, fresh: Path, tmp_path: Path) -> None:
    family = FAMILIES.get(name, "grpo")
    steps = train(DIRECTORY / f"{name}.yaml", family, [*small(family, fresh, tmp_path), *LONGER.get(name, [])])
    assert sorted(step for step, values in steps.items() if "train/loss" in values) == [1, 2]


@pytest.mark.parametrize("name", REFUSED)
def test_a_users_recipe_that_cannot_run_says_what_to_write(name: str) -> None:
    with pytest.raises((ConfigError, CombinedConfigError), match=REFUSED[name]):
        LOADERS.get(FAMILIES.get(name, "grpo"), loading.load_config)(DIRECTORY / f"{name}.yaml")
