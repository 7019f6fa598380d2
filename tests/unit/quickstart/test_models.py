"""The quickstart's tokenizers."""

import string

import pytest
from transformers import AutoTokenizer

from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.quickstart.models import make_pair_tokenizer, make_tokenizer, pairs_teacher, student
from nemo_rl.quickstart.words import load_quickstart_prompts
from nemo_rl.types import Message


@pytest.fixture(scope="module")
def prompt_sets():
    return load_quickstart_prompts()


@pytest.mark.parametrize("text", ["", "nus", " a  b\n\nC", "Spell this word (user: sun)", string.printable[:95]])
def test_text_comes_back_from_its_tokens(text):
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_saved_tokenizer_is_the_same(tmp_path):
    made = make_tokenizer()
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    conversation = [{"role": "user", "content": "Spell this: abc!"}]
    assert loaded.chat_template == made.chat_template
    assert loaded.apply_chat_template(conversation) == made.apply_chat_template(conversation)


def test_every_question_is_known_tokens_and_29_at_most(prompt_sets):
    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer)
    for prompts in prompt_sets:
        for prompt in prompts.prompts:
            ids = flat_token_ids(encoder.encode_prompt(prompt.messages))
            assert tokenizer.unk_token_id not in ids
            assert len(ids) <= 29


def test_template_renders_all_roles():
    encoder = ChatEncoder(make_tokenizer())
    encoder.check(roles=("user", "tool"))
    encoder.encode_prompt((Message("system", "Be brief."), Message("user", "hi")))


def test_pairs_are_read_from_the_left_and_decode_to_the_text():
    tokenizer = make_pair_tokenizer()
    token_ids = tokenizer.encode("heaters", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(token_ids) == ["he", "at", "er", "s"]
    assert tokenizer.decode(token_ids) == "heaters"


def test_no_id_and_no_special_token_is_shared_by_purpose_with_the_student():
    pairs, characters = make_pair_tokenizer(), make_tokenizer()
    assert not set(pairs.all_special_tokens) & set(characters.all_special_tokens)
    assert pairs.get_vocab()["a"] != characters.get_vocab()["a"]


def test_the_template_is_understood():
    encoder = ChatEncoder(make_pair_tokenizer())
    encoder.check(["user", "system"])
    assert encoder.decode(encoder.encode_prompt((Message("user", "q"),))[0].token_ids, keep_special=True) == (
        "<|user|>\nq<|end|>\n<|assistant|>\n"
    )


def test_the_students_recipe_says_nothing_of_its_tokenizer():
    """So that models made before there was another are kept."""
    assert "tokenizer" not in student(0).text
    assert "tokenizer pairs" in pairs_teacher(0).text
