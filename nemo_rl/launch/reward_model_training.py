"""Training of a reward model from a configuration: one process, one model directory, its best weights."""

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.algorithms.interrupt import cancel_on_termination
from nemo_rl.algorithms.reward_model import RewardModelTrainer, TokenPair, num_steps
from nemo_rl.config.data import Overlong
from nemo_rl.config.supervised_runs import RewardModelRunConfig
from nemo_rl.data.preferences import PreferenceSet, load_preferences
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.devices import resolve_device
from nemo_rl.durable_files import hold_directory
from nemo_rl.environments.scorers.classifier import clamp_to_positions, load_classifier
from nemo_rl.environments.scorers.conversation_tokenizer import ConversationTokenizer, ConversationTooLong
from nemo_rl.errors import CheckpointError, ConfigError, DataError
from nemo_rl.interfaces import Logger
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.supervised_training import in_set
from nemo_rl.launch.training import open_console, open_records
from nemo_rl.observability.console import Progress, make_progress
from nemo_rl.observability.loggers import METRICS_FILE
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.policy.optimizers import check_optimizer
from nemo_rl.quickstart.models import make_classifier, make_tokenizer

logger = logging.getLogger(__name__)

FRESH_MODEL = "nemo_rl/fresh_classifier"  # `policy.model_name`: the quickstart's network with random weights


def train_reward_model(config: RewardModelRunConfig) -> Path:
    """Train, write the model directory and then the summary to standard output; return the directory.

    It holds the weights with the best validation metric (the latest of equals); without validation data the final ones.
    """
    console = open_console(config.logger.level)
    check_optimizer(config.policy)  # refused before a model loads
    train_pairs, held_out = load_preferences(config.data, config.rm.seed)
    lost = LostRecords()
    with ExitStack() as stack:
        if (own := config.checkpointing.checkpoint_dir) is not None:
            stack.enter_context(hold_directory(Path(own), key="checkpointing.checkpoint_dir", is_replaced=True))
        model, tokens = _open_model(config)
        train = _encode_pairs(train_pairs, tokens, config.data.overlong)
        of_validation = in_set(config.data.overlong, is_training=False)
        validation = {each.name: _encode_pairs(each, tokens, of_validation) for each in held_out}
        trainer = RewardModelTrainer(model, config)
        run_dir, metrics_logger = open_records(config, stack, lost)
        directory = Path(own or run_dir / "model")
        progress = make_progress(config.logger, console)
        stack.callback(progress.close)
        best = _BestModel(config, lambda: save_classifier(model, tokens.tokenizer, directory))
        total = num_steps(len(train), config)
        progress.start(step=0, total=total)
        if config.rm.val_at_start:
            _measure(trainer, validation, 0, metrics_logger, progress)
        for result in trainer.train_steps(train):
            _log_step(metrics_logger, result.step, result.metrics, result.seconds)
            progress.step(result.step, metrics=result.metrics, seconds={"total_step_time": result.seconds})
            is_due = config.rm.val_period > 0 and result.step % config.rm.val_period == 0
            if is_due or result.step == total:
                best.offer(_measure(trainer, validation, result.step, metrics_logger, progress))
    accuracy = best.metrics.get("pair_accuracy")
    sys.stdout.write(_summary(config, directory, run_dir / METRICS_FILE, accuracy, lost=str(lost)))
    lost.check()
    return directory


class _BestModel:
    """The weights with the best validation metric so far, which `save` writes."""

    def __init__(self, config: RewardModelRunConfig, save: Callable[[], None]) -> None:
        self._name = config.checkpointing.metric_name.removeprefix("val:")
        self._sign = -1.0 if self._name == "loss" else 1.0
        self._save = save
        self.metrics: dict[str, float] = {}  # metrics of the saved weights

    def offer(self, metrics: dict[str, float]) -> None:
        """Save the current weights unless a better one was saved; without validation they are always saved."""
        if not self.metrics or self._sign * metrics[self._name] >= self._sign * self.metrics[self._name]:
            self.metrics = metrics
            self._save()


def _measure(
    trainer: RewardModelTrainer,
    validation: Mapping[str, Sequence[TokenPair]],
    step: int,
    metrics_logger: Logger,
    progress: Progress,
) -> dict[str, float]:
    """Return the means over the validation sets, after logging them and each set's own; nothing without a set."""
    if not validation:
        return {}
    started_at = time.perf_counter()
    measured = {name: trainer.evaluate(pairs) for name, pairs in validation.items()}
    metrics = {
        name: sum(values[name] for values in measured.values()) / len(measured)
        for name in next(iter(measured.values()))
    }
    named = {f"validation/{name}": value for name, value in metrics.items()}
    if len(measured) > 1:
        named |= {f"validation/{key}/{name}": value for key, each in measured.items() for name, value in each.items()}
    seconds = time.perf_counter() - started_at
    metrics_logger.log_metrics({**named, "timing/validation/total_validation_time": seconds}, step)
    progress.validation(step, metrics=metrics, columns=(), rows=())
    return metrics


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
        torch.manual_seed(config.rm.seed)  # seeds the fresh head
        model = load_classifier("policy.model_name", path, fresh_head=True)
        tokenizer = load_tokenizer(policy.tokenizer, path)
    tokens = ConversationTokenizer(
        tokenizer,
        chat_template_kwargs=policy.tokenizer.chat_template_kwargs,
        max_length=clamp_to_positions(model, config.max_tokens),
    )
    return model.to(device), tokens  # pyright: ignore[reportArgumentType]


async def _resolve_model_path(model_name: str) -> str:
    with cancel_on_termination():  # the quickstart's model is made at its first use
        return await resolve_model(model_name)


def _encode_pairs(loaded: PreferenceSet, tokens: ConversationTokenizer, overlong: Overlong) -> list[TokenPair]:
    """Return the pairs as tokens; pairs that are too long are masked, dropped or refused, and counted in the log."""
    pairs, num_overlong = [], 0
    for number, preference in enumerate(loaded.examples):
        chosen, rejected = preference.conversations
        try:
            pairs.append(TokenPair(tokens.encode(chosen), tokens.encode(rejected)))
        except ConversationTooLong as error:
            num_overlong += 1
            if overlong == "refuse":
                raise ConfigError("data.overlong", overlong, f"pair {number} of {loaded.name!r}: {error}") from error
            pairs += [TokenPair((), (), is_masked=True)] if overlong == "mask" else []
    if num_overlong:
        done = "dropped" if overlong == "drop" else "masked"
        logger.warning("%s: %s %d pairs that are too long", loaded.name, done, num_overlong)
    if num_overlong == len(loaded.examples):
        raise DataError(f"{loaded.name}: no pairs (of {len(loaded.examples)} that were read)")
    logger.info("%s: %d pairs", loaded.name, len(pairs))
    return pairs


def _log_step(metrics_logger: Logger, step: int, metrics: dict[str, float], seconds: float) -> None:
    named = {f"train/{name}": value for name, value in metrics.items()}
    metrics_logger.log_metrics({**named, "timing/train/total_step_time": seconds}, step)


def _summary(
    config: RewardModelRunConfig, directory: Path, metrics_path: Path, accuracy: float | None, *, lost: str
) -> str:
    scorer = {"type": "reward_model", "model_name": str(directory)}
    if config.policy.tokenizer.chat_template_kwargs:  # stored in no file of the directory
        scorer["chat_template_kwargs"] = json.dumps(config.policy.tokenizer.chat_template_kwargs)
    fields = ", ".join(f"{name}: {value}" for name, value in scorer.items())
    lines = [
        *([f"Validation pairs ranked right  {accuracy:.3f}"] if accuracy is not None else []),
        f"Reward model                   {directory}",
        f"Metrics                        {metrics_path}",
        *([f"Lost                           {lost}"] if lost else []),
        f"As a scorer                    scorers.<name>={{{fields}}}",
    ]
    return "\n".join(lines) + "\n"
