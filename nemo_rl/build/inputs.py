"""What a run reads before any model is loaded: tokenizer, chat template and data sets, checked against each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy import ModelConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.datasets import PromptSet, check_prompt_lengths, load_datasets
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import ConfigError
from nemo_rl.policy.hf_model import load_config


@dataclass(frozen=True, slots=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    encoder: ChatEncoder
    train: PromptSet
    validation: tuple[PromptSet, ...]
    probes: tuple[tuple[int, ...], ...]  # prompts on which the engine's weights are verified
    vocab_size: int = 0  # of the model: what pads its embedding included


def load_prompts(config: TrainingRunConfig) -> tuple[PromptSet, tuple[PromptSet, ...]]:
    """Training and validation prompts, each with an environment that is configured; needs no model."""
    train, validation = load_datasets(config.data, config.seed)
    check_tasks(config, (train, *validation))
    return train, validation


def load_inputs(config: TrainingRunConfig, model_path: str, prompts: tuple[PromptSet, tuple[PromptSet, ...]]) -> Inputs:
    """The model's tokenizer, checked against its chat template, its context length and the prompts.

    Raises ConfigError naming the key and the prompt.
    """
    model = load_config(model_path, config.policy.hf_config_overrides).get_text_config()
    check_context_length(config.policy, model)
    tokenizer = load_tokenizer(config.policy.tokenizer, model_path)
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=config.policy.tokenizer.chat_template_kwargs)
    encoder.check()
    train, validation = prompts
    room = config.policy.max_total_sequence_length - 1  # for one sampled token
    check_prompt_lengths((train, *validation), encoder, min(config.data.max_input_seq_length or room, room))
    probes = train.prompts[: config.weight_sync.num_probe_prompts]
    return Inputs(
        tokenizer,
        encoder,
        train,
        validation,
        tuple(flat_token_ids(encoder.encode_prompt(p.messages, p.tools)) for p in probes),
        vocab_size=model.vocab_size,
    )


def check_context_length(policy: ModelConfig, model: PreTrainedConfig) -> None:
    """Raise ConfigError where the model cannot take `policy.max_total_sequence_length` tokens."""
    length = policy.max_total_sequence_length
    longest = getattr(model, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError("policy.max_total_sequence_length", length, f"the model takes {longest} tokens at most")


def check_tasks(config: RolloutRunConfig, prompt_sets: Sequence[PromptSet]) -> None:
    """Raise ConfigError for a prompt without an environment."""
    for prompt_set in prompt_sets:
        for task in sorted(prompt_set.task_names - config.env.keys()):
            raise ConfigError(f"env.{task}", None, f"needed by the data set {prompt_set.name!r}", known=config.env)
