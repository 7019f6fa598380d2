"""What the warm start may see, and what the recipe measures on."""

from pathlib import Path

import yaml

from nemo_rl.quickstart.words import QUICKSTART_VALIDATION, extract_words, load_quickstart_prompts

RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "quickstart.yaml"


def test_recipe_validates_on_the_words_that_the_warm_start_leaves_out():
    stated = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["data"]["validation"]
    assert stated == QUICKSTART_VALIDATION.model_dump(exclude_unset=True)


def test_training_and_validation_share_no_word():
    train, validation = (set(extract_words(prompts.prompts)) for prompts in load_quickstart_prompts())
    assert (len(train), len(validation)) == (8355, 219)
    assert not train & validation
