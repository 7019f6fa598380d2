"""Supervised training from a configuration: on conversations (SFT), or on preferences (DPO, reward models)."""

import asyncio
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.algorithms.loop import TrainingProgress
from nemo_rl.algorithms.reward_model import RewardModelTrainer, TokenPair, num_steps
from nemo_rl.algorithms.run import Interrupt, cancel_on_sigterm
from nemo_rl.algorithms.supervised import DPOObjective, Objective, SFTObjective, SupervisedRun, train_supervised
from nemo_rl.config.supervised import DPORunConfig, RewardModelRunConfig, SFTRunConfig, SupervisedRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.preferences import PreferenceSet, encode_preferences, load_preferences
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
from nemo_rl.observability.console import Progress, make_progress
from nemo_rl.observability.loggers import METRICS_FILE
from nemo_rl.observability.summary import summarize_losses
from nemo_rl.policy.hf_model import load_config
from nemo_rl.policy.training import check_optimizer
from nemo_rl.quickstart.models import make_classifier, make_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SupervisedInputs:
    """Inputs read before any weights are loaded."""

    tokenizer: PreTrainedTokenizerBase
    train: SupervisedDataset
    validation: tuple[SupervisedDataset, ...]


async def run_supervised(config: SupervisedRunConfig, command: str) -> TrainingProgress:
    """Train, then write the summary to standard output; `command` is how the run was started."""
    with cancel_on_sigterm():
        async with open_supervised(config) as run:
            with run.interrupt.listen():
                training = await train_supervised(run)
    write_summary(run, summarize_losses, command, lambda step: "" if step < run.num_steps else None)
    return training


@asynccontextmanager
async def open_supervised(config: SupervisedRunConfig) -> AsyncIterator[SupervisedRun]:
    """Open everything that the loop uses; configuration errors are raised before weights are loaded."""
    console = open_console(config.logger.level)
    layout = find_layout(config)
    check_optimizer(config.policy)
    encode = _read_examples(config)
    model_path = await resolve_model(config.policy.model_name)
    model = load_config(model_path, config.policy.hf_config_overrides).get_text_config()
    check_context_length(config.policy, model)
    check_model(config.policy, model_path)
    inputs = encode(load_tokenizer(config.policy.tokenizer, model_path))
    async with AsyncExitStack() as stack:
        run_dir, metrics_logger = open_records(config, stack)
        policy = await open_policy(config, inputs.tokenizer, model_path, layout, log_dir=run_dir / "logs", stack=stack)
        progress = make_progress(config.logger, console)
        stack.callback(progress.close)
        _log_counts(metrics_logger, inputs, "num_pairs" if config.rows_per_sample == 2 else "num_conversations")
        yield SupervisedRun(
            config=config,
            objective=make_objective(config),
            run_dir=run_dir,
            num_steps=num_supervised_steps(config, len(inputs.train.samples)),
            source=make_source(config, inputs.train),
            validation=inputs.validation,
            policy=policy,
            checkpoints=make_checkpoint_store(config.checkpointing, run_dir),
            logger=metrics_logger,
            progress=progress,
            interrupt=Interrupt(),
        )


def make_objective(config: SupervisedRunConfig) -> Objective:
    """Return what the algorithm of the configuration learns from its samples."""
    return DPOObjective(config.dpo) if isinstance(config, DPORunConfig) else SFTObjective()


def _read_examples(config: SupervisedRunConfig) -> Callable[[PreTrainedTokenizerBase], SupervisedInputs]:
    """Read all rows, and return the function that encodes them; it raises ConfigError for a chat template that does
    not support training on them."""
    if isinstance(config, DPORunConfig):
        pairs = load_preferences(config.data, config.dpo.seed)

        def encode(encoder: ChatEncoder) -> list[SupervisedDataset]:
            return [encode_preferences(encoder, each, max_tokens=config.max_tokens) for each in (pairs[0], *pairs[1])]
    else:
        assert isinstance(config, SFTRunConfig)
        conversations = load_conversations(config.data, config.sft.seed)

        def encode(encoder: ChatEncoder) -> list[SupervisedDataset]:
            return [_encode_set(encoder, each, config) for each in (conversations[0], *conversations[1])]

    def make_inputs(tokenizer: PreTrainedTokenizerBase) -> SupervisedInputs:
        encoder = ChatEncoder(tokenizer, chat_template_kwargs=config.policy.tokenizer.chat_template_kwargs)
        encoder.check()
        train, *validation = encode(encoder)
        return SupervisedInputs(tokenizer, train, tuple(validation))

    return make_inputs


def _encode_set(encoder: ChatEncoder, loaded: ConversationSet, config: SFTRunConfig) -> SupervisedDataset:
    return encode_conversations(
        encoder,
        loaded,
        max_tokens=config.max_tokens,
        overlong=config.data.overlong,
        add_bos=config.data.add_bos,
        add_eos=config.data.add_eos,
        train_on_opening=not config.data.add_generation_prompt,
    )


def make_source(config: SupervisedRunConfig, train: SupervisedDataset) -> SampleLoader:
    section = config.algorithm
    return SampleLoader(
        train.samples, shuffle=config.data.shuffle, seed=section.seed, max_epochs=section.max_num_epochs
    )


def num_supervised_steps(config: SupervisedRunConfig, num_samples: int) -> int:
    """Return the number of steps of a run; the last one of the data may have fewer samples."""
    section = config.algorithm
    num_data_steps = math.ceil(section.max_num_epochs * num_samples / config.policy.train_global_batch_size)
    return min(section.max_num_steps, num_data_steps)


def _log_counts(metrics_logger: Logger, inputs: SupervisedInputs, name_of_count: str) -> None:
    for each, kind in ((inputs.train, "train"), *((one, f"validation/{one.name}") for one in inputs.validation)):
        counts = {
            name_of_count: len(each.samples),
            "num_overlong": each.num_overlong,
            "num_dropped": each.num_dropped,
        }
        metrics_logger.log_metrics({f"data/{kind}/{name}": float(count) for name, count in counts.items()}, 0)


FRESH_MODEL = "nemo_rl/fresh_classifier"  # `policy.model_name`: the quickstart's network with random weights


def train_reward_model(config: RewardModelRunConfig) -> Path:
    """Train, write the model directory and then the summary to standard output; return the directory.

    It holds the weights with the best validation metric (the latest of equals); without validation data the final ones.
    """
    console = open_console(config.logger.level)
    check_optimizer(config.policy)  # refused before a model loads
    train_pairs, held_out = load_preferences(config.data, config.rm.seed)
    model, tokens = _open_model(config)
    train = _encode_pairs(train_pairs, tokens)
    validation = {each.name: _encode_pairs(each, tokens) for each in held_out}
    trainer = RewardModelTrainer(model, config)
    with ExitStack() as stack:
        run_dir, metrics_logger = open_records(config, stack)
        directory = Path(config.checkpointing.checkpoint_dir or run_dir / "model")
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
    sys.stdout.write(_summary(config, directory, run_dir / METRICS_FILE, best.metrics.get("pair_accuracy")))
    return directory


class _BestModel:
    """The weights with the best validation metric so far, which `save` writes."""

    def __init__(self, config: RewardModelRunConfig, save: Callable[[], None]) -> None:
        self._name = config.checkpointing.metric_name.removeprefix("val:")
        self._sign = -1.0 if self._name == "loss" else 1.0
        self._save = save
        self.metrics: dict[str, float] = {}  # of the saved weights

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
        tokenizer,
        chat_template_kwargs=policy.tokenizer.chat_template_kwargs,
        max_length=classifier.clamp_to_positions(model, config.max_tokens),
    )
    return model.to(device), tokens  # pyright: ignore[reportArgumentType]


async def _resolve_model_path(model_name: str) -> str:
    with cancel_on_sigterm():  # the quickstart's model is made at its first use
        return await resolve_model(model_name)


def _encode_pairs(loaded: PreferenceSet, tokens: classifier.ConversationTokenizer) -> list[TokenPair]:
    """Return the pairs as tokens; pairs that are too long are dropped and counted in the log."""
    pairs = []
    for preference in loaded.examples:
        chosen, rejected = preference.conversations
        try:
            pairs.append(TokenPair(tokens.encode(chosen), tokens.encode(rejected)))
        except classifier.ConversationTooLong:
            continue
    if len(pairs) < len(loaded.examples):
        logger.warning("%s: dropped %d pairs that are too long", loaded.name, len(loaded.examples) - len(pairs))
    if not pairs:
        raise DataError(f"{loaded.name}: no pairs (of {len(loaded.examples)} that were read)")
    logger.info("%s: %d pairs", loaded.name, len(pairs))
    return pairs


def _log_step(metrics_logger: Logger, step: int, metrics: dict[str, float], seconds: float) -> None:
    named = {f"train/{name}": value for name, value in metrics.items()}
    metrics_logger.log_metrics({**named, "timing/train/total_step_time": seconds}, step)


def _summary(config: RewardModelRunConfig, directory: Path, metrics_path: Path, accuracy: float | None) -> str:
    scorer = {"type": "reward_model", "model_name": str(directory)}
    if config.policy.tokenizer.chat_template_kwargs:  # of no file of the directory
        scorer["chat_template_kwargs"] = json.dumps(config.policy.tokenizer.chat_template_kwargs)
    fields = ", ".join(f"{name}: {value}" for name, value in scorer.items())
    lines = [
        *([f"Validation pairs ranked right  {accuracy:.3f}"] if accuracy is not None else []),
        f"Reward model                   {directory}",
        f"Metrics                        {metrics_path}",
        f"As a scorer                    scorers.<name>={{{fields}}}",
    ]
    return "\n".join(lines) + "\n"
