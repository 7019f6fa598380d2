"""What a run reads before any model is loaded: tokenizer, chat template and data sets, checked against each other."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.master import GRPOConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.datasets import PromptSet, check_prompt_lengths, load_datasets
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    encoder: ChatEncoder
    train: PromptSet
    validation: tuple[PromptSet, ...]
    probes: tuple[tuple[int, ...], ...]  # prompts on which the engine's weights are verified


def load_inputs(config: GRPOConfig, model_path: str) -> Inputs:
    """Load and check; raises ConfigError or DataError naming the key, the file or the prompt."""
    tokenizer = load_tokenizer(config.policy.tokenizer, model_path)
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=config.policy.tokenizer.chat_template_kwargs)
    encoder.check()
    train, validation = load_datasets(config.data, config.grpo.seed)
    _check_tasks(config, (train, *validation))
    room = config.policy.max_total_sequence_length - 1  # for one sampled token
    check_prompt_lengths((train, *validation), encoder, min(config.data.max_input_seq_length or room, room))
    probes = train.prompts[: config.weight_sync.num_probe_prompts]
    return Inputs(
        tokenizer,
        encoder,
        train,
        validation,
        tuple(flat_token_ids(encoder.encode_prompt(p.messages, p.tools)) for p in probes),
    )


def _check_tasks(config: GRPOConfig, prompt_sets: tuple[PromptSet, ...]) -> None:
    for prompt_set in prompt_sets:
        for task in sorted({prompt.task_name for prompt in prompt_set.prompts} - config.env.keys()):
            raise ConfigError(f"env.{task}", None, f"needed by the data set {prompt_set.name!r}", known=config.env)
