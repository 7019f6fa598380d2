"""The quickstart's tokenizer: text comes back, and questions are short."""

import string

import pytest
from transformers import AutoTokenizer

from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.quickstart.models import make_tokenizer
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
