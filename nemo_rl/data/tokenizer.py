"""Tokenizers with their chat templates: the policy's, and those of reward models."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.errors import ConfigError, describe_error


def load_tokenizer(
    config: TokenizerConfig, model_name: str, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `config.name`, or of the model, with the configured chat template if there is one.

    Raises ConfigError naming the key when it cannot be found, or has no chat template.
    """
    key, name = ("policy.model_name", model_name) if config.name is None else ("policy.tokenizer.name", config.name)
    return load_tokenizer_with_template(
        name,
        config.chat_template,
        name_key=key,
        template_key="policy.tokenizer.chat_template",
        trust_remote_code=trust_remote_code,
    )


def load_tokenizer_with_template(
    name: str, chat_template: str | None, *, name_key: str, template_key: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face name or directory, with `chat_template` (Jinja text or a file) or its own.

    Raises ConfigError under `name_key` when it cannot be found, under `template_key` when there is no such template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # missing, not reachable, of no known kind, or damaged: a bare Exception
        raise ConfigError(name_key, name, f"no tokenizer can be loaded from it: {describe_error(error)}") from error
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template, template_key)
    if not tokenizer.chat_template:
        raise ConfigError(template_key, None, f"the tokenizer of {name} has none: give a Jinja text or a file")
    return tokenizer


def read_template(text_or_file: str, key: str) -> str:
    """Return the template's text; a Jinja text contains braces, a file's path does not.

    Raises ConfigError under `key` for a file that cannot be read.
    """
    if "{" in text_or_file:
        return text_or_file
    try:
        return Path(text_or_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, text_or_file, f"neither a Jinja text nor a readable file: {error}") from error
