"""Supervised training of a policy from a configuration: on conversations (SFT) or preferences (DPO)."""

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from nemo_rl.algorithms.interrupt import Interrupt, cancel_on_termination
from nemo_rl.algorithms.step_profiler import make_profiler
from nemo_rl.algorithms.supervised_loop import Objective, SupervisedRun, train_supervised
from nemo_rl.algorithms.supervised_objectives import DPOObjective, SFTObjective
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.config.data import Overlong
from nemo_rl.config.supervised_runs import DPORunConfig, SFTRunConfig, SupervisedRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.conversations import ConversationSet, encode_conversations, load_conversations
from nemo_rl.data.preferences import PreferenceSet, encode_preferences, load_preferences
from nemo_rl.data.supervised_samples import SampleLoader, SupervisedDataset
from nemo_rl.interfaces import Logger
from nemo_rl.launch.memory_plan import memory_plan
from nemo_rl.launch.out_of_memory import advise_on_memory
from nemo_rl.launch.resolved_model import check_image_rows, resolve_policy
from nemo_rl.launch.resolved_run import find_layout
from nemo_rl.launch.training import open_checkpoints, open_console, open_records, write_summary
from nemo_rl.launch.workers import open_policy
from nemo_rl.observability.console import make_progress
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.observability.summary import summarize_losses
from nemo_rl.policy.optimizers import check_optimizer

logger = logging.getLogger(__name__)


async def run_supervised(config: SupervisedRunConfig, command: str) -> TrainingProgress:
    """Train, then write the summary to standard output; `command` is how the run was started."""
    with cancel_on_termination():
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
    model = await resolve_policy(config.policy)
    check_image_rows(config.data, model.encoder)
    train, *validation = encode(model.encoder)
    memory_plan(config, layout).log_problems()
    async with AsyncExitStack() as stack:
        stack.enter_context(advise_on_memory(config))
        lost, interrupt = LostRecords(), Interrupt()
        run_dir, metrics_logger = open_records(config, stack, lost, interrupt)
        checkpoints = open_checkpoints(config, run_dir, metrics_logger, stack)
        policy = await open_policy(config, model, layout, log_dir=run_dir / "logs", stack=stack)
        progress = make_progress(config.logger, console)
        stack.callback(progress.close)
        _log_counts(
            metrics_logger, train, validation, "num_pairs" if config.rows_per_sample == 2 else "num_conversations"
        )
        yield SupervisedRun(
            config=config,
            objective=make_objective(config, model.encoder),
            run_dir=run_dir,
            num_steps=num_supervised_steps(config, len(train.samples)),
            source=make_source(config, train),
            validation=tuple(validation),
            policy=policy,
            checkpoints=checkpoints,
            logger=metrics_logger,
            progress=progress,
            interrupt=interrupt,
            num_devices=layout.num_devices,
            num_train_devices=layout.num_train_devices,
            profiler=make_profiler(config.logger.profile, run_dir, policy),
            lost_records=lost,
        )


def make_objective(config: SupervisedRunConfig, encoder: ChatEncoder) -> Objective:
    """Return what the algorithm of the configuration learns from its samples."""
    images = encoder.images
    return DPOObjective(config.dpo, images) if isinstance(config, DPORunConfig) else SFTObjective(images)


def _read_examples(config: SupervisedRunConfig) -> Callable[[ChatEncoder], list[SupervisedDataset]]:
    """Read all rows; return the function that encodes them, the training set first.

    It raises ConfigError for a chat template that does not support training on them.
    """
    if isinstance(config, DPORunConfig):
        sets = load_preferences(config.data, config.dpo.seed)
        numbered = list(enumerate((sets[0], *sets[1])))
        return lambda encoder: [
            _encode_pairs(encoder, each, config, is_training=not number) for number, each in numbered
        ]
    assert isinstance(config, SFTRunConfig)
    conversations = load_conversations(config.data, config.sft.seed)
    numbered_sets = list(enumerate((conversations[0], *conversations[1])))
    return lambda encoder: [
        _encode_set(encoder, each, config, is_training=not number) for number, each in numbered_sets
    ]


def in_set(overlong: Overlong, *, is_training: bool) -> Overlong:
    """Return `data.overlong` for one set: if nothing is trained, a masked example is dropped."""
    return "drop" if overlong == "mask" and not is_training else overlong


def _encode_pairs(
    encoder: ChatEncoder, loaded: PreferenceSet, config: DPORunConfig, *, is_training: bool
) -> SupervisedDataset:
    overlong = in_set(config.data.overlong, is_training=is_training)
    return encode_preferences(encoder, loaded, max_tokens=config.max_tokens, overlong=overlong)


def _encode_set(
    encoder: ChatEncoder, loaded: ConversationSet, config: SFTRunConfig, *, is_training: bool
) -> SupervisedDataset:
    overlong = config.data.overlong
    return encode_conversations(
        encoder,
        loaded,
        max_tokens=config.max_tokens,
        overlong=overlong if overlong == "truncate" else in_set(overlong, is_training=is_training),
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


def _log_counts(
    metrics_logger: Logger, train: SupervisedDataset, validation: Sequence[SupervisedDataset], name_of_count: str
) -> None:
    for each, kind in ((train, "train"), *((one, f"validation/{one.name}") for one in validation)):
        counts = {
            name_of_count: len(each.samples),
            "num_overlong": each.num_overlong,
            "num_dropped": each.num_dropped,
        }
        metrics_logger.log_metrics({f"data/{kind}/{name}": float(count) for name, count in counts.items()}, 0)
