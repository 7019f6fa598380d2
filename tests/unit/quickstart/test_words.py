"""The quickstart's words and preference pairs."""

import random
from pathlib import Path

import yaml

from nemo_rl.quickstart.words import (
    QUICKSTART_VALIDATION,
    extract_words,
    load_quickstart_prompts,
    make_preference_pairs,
    misspell,
)

RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "quickstart.yaml"


def test_recipe_validates_on_the_words_that_the_warm_start_leaves_out():
    stated = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["data"]["validation"]
    assert stated == QUICKSTART_VALIDATION.model_dump(exclude_unset=True)


def test_training_and_validation_share_no_word():
    train, validation = (set(extract_words(prompts.prompts)) for prompts in load_quickstart_prompts())
    assert (len(train), len(validation)) == (8355, 219)
    assert not train & validation


def test_a_misspelling_is_never_the_word_backward() -> None:
    draws = random.Random(0)
    for word in ("abc", "level", "aaa", "xyz"):
        assert all(misspell(word, draws) != word[::-1] for _ in range(300))


def test_pairs_follow_prompts_and_seed() -> None:
    prompts = load_quickstart_prompts()[1].prompts
    pairs = make_preference_pairs(prompts, seed=1)
    assert pairs == make_preference_pairs(prompts, seed=1) != make_preference_pairs(prompts, seed=2)
    assert [pair.chosen[::-1] for pair in pairs] == list(extract_words(prompts))
    assert [pair.messages for pair in pairs] == [prompt.messages for prompt in prompts]
