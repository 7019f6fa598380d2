"""The quickstart's other family: tokens of two letters, other special tokens, another template."""

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.quickstart.models import make_pair_tokenizer, make_tokenizer, pairs_teacher, student
from nemo_rl.types import Message


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
