"""Tokenizers that cannot be used are refused by the key that names them."""

from pathlib import Path

import pytest

from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import ConfigError
from tests.templates import byte_tokenizer, template_text


@pytest.fixture
def directory(tmp_path: Path) -> str:
    byte_tokenizer("chatml").save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_the_models_own_tokenizer_and_template_are_the_default(directory):
    tokenizer = load_tokenizer(TokenizerConfig(), directory)
    assert tokenizer.chat_template == template_text("chatml")
    assert tokenizer.decode(tokenizer.encode("Zürich<|im_end|>", add_special_tokens=False)) == "Zürich<|im_end|>"


def test_named_tokenizer_wins_over_the_models(directory):
    assert load_tokenizer(TokenizerConfig(name=directory), "/no/such/model").eos_token == "<|im_end|>"


def test_template_may_be_text_or_a_file(directory, tmp_path):
    text = "{{ messages[0]['content'] }}"
    (tmp_path / "short.jinja").write_text(text)
    assert load_tokenizer(TokenizerConfig(chat_template=text), directory).chat_template == text
    assert load_tokenizer(TokenizerConfig(chat_template=str(tmp_path / "short.jinja")), directory).chat_template == text


def test_missing_template_file_names_its_key(directory):
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template = 'no/such\.jinja'"):
        load_tokenizer(TokenizerConfig(chat_template="no/such.jinja"), directory)


@pytest.mark.parametrize(
    ("section", "model", "key"),
    [
        (TokenizerConfig(), "/no/such/model", "policy.model_name"),
        (TokenizerConfig(name="/no/such/directory"), "model", "policy.tokenizer.name"),
    ],
)
def test_missing_directory_names_the_key_that_points_to_it(section, model, key):
    with pytest.raises(ConfigError, match=rf"{key} = '/no/such"):
        load_tokenizer(section, model)


def test_directory_without_a_tokenizer_names_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.model_name"):
        load_tokenizer(TokenizerConfig(), str(tmp_path))


def test_tokenizer_without_a_template_names_the_key_that_gives_one(tmp_path):
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template.*has none"):
        load_tokenizer(TokenizerConfig(), str(tmp_path))
