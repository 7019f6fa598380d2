"""A run of supervised training from its configuration: everything opened in order, closed in reverse, a summary at the
end."""

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.interrupt import Interrupt, cancel_on_sigterm
from nemo_rl.algorithms.loop import TrainingProgress
from nemo_rl.algorithms.sft import SFTRun, train_sft
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.supervised import (
    ConversationSet,
    SampleLoader,
    SupervisedDataset,
    encode_conversations,
    load_conversations,
)
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.interfaces import Logger
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.rollouts import check_context_length
from nemo_rl.launch.training import make_checkpoint_store, open_console, open_records, write_summary
from nemo_rl.launch.workers import check_model, find_layout, open_policy
from nemo_rl.observability.progress import make_progress
from nemo_rl.observability.summary import summarize_losses
from nemo_rl.policy.hf_model import load_config
from nemo_rl.policy.optim import check_optimizer


@dataclass(frozen=True, slots=True)
class SFTInputs:
    """Inputs read before any weights are loaded."""

    tokenizer: PreTrainedTokenizerBase
    train: SupervisedDataset
    validation: tuple[SupervisedDataset, ...]


async def run_sft(config: SFTRunConfig, command: str) -> TrainingProgress:
    """Train, then write the summary to standard output; `command` is how the run was started."""
    with cancel_on_sigterm():
        async with open_sft(config) as run:
            with run.interrupt.listen():
                training = await train_sft(run)
    write_summary(run, summarize_losses, command, lambda step: "" if step < run.num_steps else None)
    return training


@asynccontextmanager
async def open_sft(config: SFTRunConfig) -> AsyncIterator[SFTRun]:
    """Open everything that the loop uses; configuration errors are raised before weights are loaded."""
    console = open_console(config.logger.level)
    layout = find_layout(config)
    check_optimizer(config.policy)
    conversations = load_conversations(config.data, config.sft.seed)
    model_path = await resolve_model(config.policy.model_name)
    model = load_config(model_path, config.policy.hf_config_overrides).get_text_config()
    check_context_length(config.policy, model)
    check_model(config.policy, model_path)
    inputs = load_sft_inputs(config, model_path, *conversations)
    async with AsyncExitStack() as stack:
        run_dir, metrics_logger = open_records(config, stack)
        policy = await open_policy(config, inputs.tokenizer, model_path, layout, log_dir=run_dir / "logs", stack=stack)
        progress = make_progress(config.logger, console)
        stack.callback(progress.close)
        _log_counts(metrics_logger, inputs)
        yield SFTRun(
            config=config,
            run_dir=run_dir,
            num_steps=num_steps(config, len(inputs.train.samples)),
            source=make_source(config, inputs.train),
            validation=inputs.validation,
            policy=policy,
            checkpoints=make_checkpoint_store(config.checkpointing, run_dir),
            logger=metrics_logger,
            progress=progress,
            interrupt=Interrupt(),
        )


def load_sft_inputs(
    config: SFTRunConfig, model_path: str, train: ConversationSet, validation: tuple[ConversationSet, ...]
) -> SFTInputs:
    """Encode all conversations. Raises ConfigError for a chat template that does not support training on them."""
    tokenizer = load_tokenizer(config.policy.tokenizer, model_path)
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=config.policy.tokenizer.chat_template_kwargs)
    encoder.check()
    encoded = [
        encode_conversations(encoder, each, max_tokens=config.max_tokens, overlong=config.data.overlong)
        for each in (train, *validation)
    ]
    return SFTInputs(tokenizer, encoded[0], tuple(encoded[1:]))


def make_source(config: SFTRunConfig, train: SupervisedDataset) -> SampleLoader:
    section = config.sft
    return SampleLoader(
        train.samples, shuffle=config.data.shuffle, seed=section.seed, max_epochs=section.max_num_epochs
    )


def num_steps(config: SFTRunConfig, num_samples: int) -> int:
    """Return the number of steps of a run; the last one of the data may have fewer conversations."""
    num_data_steps = math.ceil(config.sft.max_num_epochs * num_samples / config.policy.train_global_batch_size)
    return min(config.sft.max_num_steps, num_data_steps)


def _log_counts(metrics_logger: Logger, inputs: SFTInputs) -> None:
    for each, kind in ((inputs.train, "train"), *((one, f"validation/{one.name}") for one in inputs.validation)):
        counts = {
            "num_conversations": len(each.samples),
            "num_overlong": each.num_overlong,
            "num_dropped": each.num_dropped,
        }
        metrics_logger.log_metrics({f"data/{kind}/{name}": float(count) for name, count in counts.items()}, 0)
