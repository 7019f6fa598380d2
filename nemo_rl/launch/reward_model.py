"""A run of reward model training from its configuration: data, model, training, and the Hugging Face directory at its
end."""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.algorithms.interrupt import cancel_on_sigterm
from nemo_rl.algorithms.reward_model import TokenPair, evaluate, num_steps, train_steps
from nemo_rl.config.reward_model import PreferenceDatasetConfig, RewardModelRunConfig
from nemo_rl.data.preferences import Preference, read_preferences
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.devices import resolve_device
from nemo_rl.environments.scorers.classifier import (
    ConversationTokenizer,
    ConversationTooLong,
    clamp_to_positions,
    load_classifier,
)
from nemo_rl.errors import CheckpointError, DataError
from nemo_rl.interfaces import Logger
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.training import open_console, open_records
from nemo_rl.observability.loggers import METRICS_FILE
from nemo_rl.observability.progress import make_progress
from nemo_rl.policy.optim import make_optimizer
from nemo_rl.quickstart.models import make_classifier, make_tokenizer
from nemo_rl.quickstart.words import make_quickstart_preferences

logger = logging.getLogger(__name__)

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


def _open_model(config: RewardModelRunConfig) -> tuple[PreTrainedModel, ConversationTokenizer]:
    policy = config.policy
    device = resolve_device(policy.device)
    if policy.model_name == FRESH_MODEL:
        tokenizer = make_tokenizer()
        model: PreTrainedModel = make_classifier(tokenizer, seed=config.rm.seed)
    else:
        path = asyncio.run(_resolve_model_path(policy.model_name))
        torch.manual_seed(config.rm.seed)  # of the fresh head
        model = load_classifier("policy.model_name", path, fresh_head=True)
        tokenizer = load_tokenizer(policy.tokenizer, path)
    tokens = ConversationTokenizer(tokenizer, max_length=clamp_to_positions(model, policy.max_total_sequence_length))
    return model.to(device), tokens  # pyright: ignore[reportArgumentType]


async def _resolve_model_path(model_name: str) -> str:
    with cancel_on_sigterm():  # the quickstart's model is made at its first use
        return await resolve_model(model_name)


def _load_pairs(name: str, dataset: PreferenceDatasetConfig, tokens: ConversationTokenizer) -> list[TokenPair]:
    """Return the pairs as tokens; pairs that are too long are dropped and counted in the log."""
    preferences = _load_preferences(name, dataset)[: dataset.size]
    pairs = []
    for preference in preferences:
        chosen, rejected = preference.conversations
        try:
            pairs.append(TokenPair(tokens.encode(chosen), tokens.encode(rejected)))
        except ConversationTooLong:
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
