import random

from nemo_rl.quickstart.words import extract_words, load_quickstart_prompts, make_preference_pairs, misspell


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
