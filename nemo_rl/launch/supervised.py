"""Supervised training from a configuration: on conversations (SFT), or of a reward model on preferences."""

import asyncio
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.algorithms.loop import TrainingProgress
from nemo_rl.algorithms.reward_model import TokenPair, evaluate, num_steps, train_steps
from nemo_rl.algorithms.run import Interrupt, cancel_on_sigterm
from nemo_rl.algorithms.sft import SFTRun, train_sft
from nemo_rl.config.supervised import PreferenceDatasetConfig, RewardModelRunConfig, SFTRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.preferences import Preference, read_preferences
from nemo_rl.data.supervised import (
    ConversationSet,
    SampleLoader,
    SupervisedDataset,
    encode_conversations,
    load_conversations,
)
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.devices import resolve_device
from nemo_rl.environments.scorers import classifier
from nemo_rl.errors import CheckpointError, DataError
from nemo_rl.interfaces import Logger
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.rollouts import check_context_length
from nemo_rl.launch.training import make_checkpoint_store, open_console, open_records, write_summary
from nemo_rl.launch.workers import check_model, find_layout, open_policy
from nemo_rl.observability.loggers import METRICS_FILE
from nemo_rl.observability.progress import make_progress
from nemo_rl.observability.summary import summarize_losses
from nemo_rl.policy.hf_model import load_config
from nemo_rl.policy.training import check_optimizer, make_optimizer
from nemo_rl.quickstart.models import make_classifier, make_tokenizer
from nemo_rl.quickstart.words import make_quickstart_preferences

logger = logging.getLogger(__name__)


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
            num_steps=num_sft_steps(config, len(inputs.train.samples)),
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
        encode_conversations(
            encoder,
            each,
            max_tokens=config.max_tokens,
            overlong=config.data.overlong,
            add_bos=config.data.add_bos,
            add_eos=config.data.add_eos,
            train_on_opening=not config.data.add_generation_prompt,
        )
        for each in (train, *validation)
    ]
    return SFTInputs(tokenizer, encoded[0], tuple(encoded[1:]))


def make_source(config: SFTRunConfig, train: SupervisedDataset) -> SampleLoader:
    section = config.sft
    return SampleLoader(
        train.samples, shuffle=config.data.shuffle, seed=section.seed, max_epochs=section.max_num_epochs
    )


def num_sft_steps(config: SFTRunConfig, num_samples: int) -> int:
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


FRESH_MODEL = "nemo_rl/fresh_classifier"  # `policy.model_name`: the quickstart's network with random weights


def train_reward_model(config: RewardModelRunConfig) -> Path:
    """Train, write the model directory and then the summary to standard output; return the directory.

    It holds the weights with the best validation accuracy (the latest of equals); without validation data the final
    ones.
    """
    console = open_console(config.logger.level)
    make_optimizer(config.policy, [torch.nn.Parameter(torch.zeros(1))])  # refused before a model loads
    model, tokens = _open_model(config)
    train = _load_pairs("train", config.data.train, tokens)
    validation = _load_pairs("validation", config.data.validation, tokens) if config.data.validation else []
    optimizer = make_optimizer(config.policy, model.parameters())
    best, total = -1.0, num_steps(len(train), config)
    with ExitStack() as stack:
        run_dir, metrics_logger = open_records(config, stack)
        directory = Path(config.checkpointing.checkpoint_dir or run_dir / "model")
        progress = make_progress(config.logger, console)
        stack.callback(progress.close)
        progress.start(step=0, total=total)
        for result in train_steps(model, optimizer, train, config):
            _log_step(metrics_logger, result.step, result.metrics, result.seconds)
            progress.step(result.step, metrics=result.metrics, seconds={"total_step_time": result.seconds})
            if result.step % config.rm.val_period and result.step != total:
                continue
            accuracy = 0.0
            if validation:
                started_at = time.perf_counter()
                measured = evaluate(model, validation, batch_size=config.policy.train_micro_batch_size)
                accuracy = measured["pair_accuracy"]
                named = {f"validation/{name}": value for name, value in measured.items()}
                seconds = time.perf_counter() - started_at
                metrics_logger.log_metrics({**named, "timing/validation/total_validation_time": seconds}, result.step)
                progress.validation(result.step, metrics=measured, columns=(), rows=())
            if accuracy >= best:
                best = accuracy
                save_classifier(model, tokens.tokenizer, directory)
    sys.stdout.write(_summary(directory, run_dir / METRICS_FILE, best if validation else None))
    return directory


def save_classifier(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a Hugging Face directory atomically, replacing an existing one. Raises CheckpointError."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
            made = Path(scratch) / "model"
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            if directory.exists():
                os.rename(directory, Path(scratch) / "old")
            os.rename(made, directory)
    except (OSError, shutil.Error) as error:
        raise CheckpointError(f"{directory} cannot be written: {error}") from error


def _open_model(config: RewardModelRunConfig) -> tuple[PreTrainedModel, classifier.ConversationTokenizer]:
    policy = config.policy
    device = resolve_device(policy.device)
    if policy.model_name == FRESH_MODEL:
        tokenizer = make_tokenizer()
        model: PreTrainedModel = make_classifier(tokenizer, seed=config.rm.seed)
    else:
        path = asyncio.run(_resolve_model_path(policy.model_name))
        torch.manual_seed(config.rm.seed)  # of the fresh head
        model = classifier.load_classifier("policy.model_name", path, fresh_head=True)
        tokenizer = load_tokenizer(policy.tokenizer, path)
    tokens = classifier.ConversationTokenizer(
        tokenizer, max_length=classifier.clamp_to_positions(model, policy.max_total_sequence_length)
    )
    return model.to(device), tokens  # pyright: ignore[reportArgumentType]


async def _resolve_model_path(model_name: str) -> str:
    with cancel_on_sigterm():  # the quickstart's model is made at its first use
        return await resolve_model(model_name)


def _load_pairs(
    name: str, dataset: PreferenceDatasetConfig, tokens: classifier.ConversationTokenizer
) -> list[TokenPair]:
    """Return the pairs as tokens; pairs that are too long are dropped and counted in the log."""
    preferences = _load_preferences(name, dataset)[: dataset.size]
    pairs = []
    for preference in preferences:
        chosen, rejected = preference.conversations
        try:
            pairs.append(TokenPair(tokens.encode(chosen), tokens.encode(rejected)))
        except classifier.ConversationTooLong:
            continue
    if len(pairs) < len(preferences):
        logger.warning("data.%s: dropped %d pairs that are too long", name, len(preferences) - len(pairs))
    if not pairs:
        raise DataError(f"data.{name}: no pairs (of {len(preferences)} that were read)")
    logger.info("data.%s: %d pairs", name, len(pairs))
    return pairs


def _load_preferences(name: str, dataset: PreferenceDatasetConfig) -> Sequence[Preference]:
    if dataset.dataset_name == "spell_backward":
        train, validation = make_quickstart_preferences()
        return train if name == "train" else validation
    return read_preferences(Path(dataset.data_path or ""))


def _log_step(metrics_logger: Logger, step: int, metrics: dict[str, float], seconds: float) -> None:
    named = {f"train/{name}": value for name, value in metrics.items()}
    metrics_logger.log_metrics({**named, "timing/train/total_step_time": seconds}, step)


def _summary(directory: Path, metrics_path: Path, accuracy: float | None) -> str:
    lines = [
        *([f"Validation pairs ranked right  {accuracy:.3f}"] if accuracy is not None else []),
        f"Reward model                   {directory}",
        f"Metrics                        {metrics_path}",
        f"As a scorer                    scorers.<name>={{type: reward_model, model_name: {directory}}}",
    ]
    return "\n".join(lines) + "\n"
