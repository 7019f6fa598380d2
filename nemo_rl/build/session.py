"""A training run from its configuration: everything opened in order, closed in reverse, and a summary at the end."""

import gc
import logging
import math
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from nemo_rl.algorithms.interrupt import Interrupt, cancelled_by_sigterm
from nemo_rl.algorithms.loop import Training, train
from nemo_rl.algorithms.run import TrainingRun
from nemo_rl.build.agents import agent_runtimes, make_agents, make_codec, open_gateway
from nemo_rl.build.algorithms import make_algorithm
from nemo_rl.build.cross_tokenizer import make_translators
from nemo_rl.build.environments import open_environments
from nemo_rl.build.inputs import Inputs, load_inputs, load_prompts
from nemo_rl.build.models import resolve_model
from nemo_rl.build.nemo_gym import gym_sections, open_nemo_gym
from nemo_rl.build.rollouts import make_context, make_source, make_validator
from nemo_rl.build.scorers import open_scorers
from nemo_rl.build.teacher_validation import validate_teachers
from nemo_rl.build.teachers import check_teachers_fit, resolve_teachers
from nemo_rl.build.workers import check_model, engine_dtype, find_layout, make_placement, open_workers
from nemo_rl.checkpoint import CONFIG_FILE, CheckpointStore
from nemo_rl.config.algorithm import RolloutTraining
from nemo_rl.config.layout import Layout
from nemo_rl.config.loading import resolved_yaml
from nemo_rl.config.master import DistillationConfig, TrainingConfig
from nemo_rl.config.teacher_checks import crosses_tokenizers
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.observability.jsonl import METRICS_FILE
from nemo_rl.observability.loggers import make_loggers
from nemo_rl.observability.logging_setup import configure_logging
from nemo_rl.observability.progress import make_progress
from nemo_rl.observability.run_directory import make_run_directory
from nemo_rl.observability.summary import read_history, summary
from nemo_rl.policy.optim import check_optimizer
from nemo_rl.weight_sync.make import make_transport
from nemo_rl.weight_sync.refit import TransportWeightSync

logger = logging.getLogger(__name__)


async def run_training(config: TrainingConfig, command: str) -> Training:
    """Train, then write the summary to standard output; `command` is how the run was started."""
    with cancelled_by_sigterm():  # as asyncio does for Ctrl-C: what has been opened is closed
        async with open_run(config) as run:
            with run.interrupt.listen():
                training = await train(run)
    sys.stdout.write(_summary(run, command) + "\n")
    return training


@asynccontextmanager
async def open_run(config: TrainingConfig) -> AsyncIterator[TrainingRun]:
    """Everything that the loop uses; what can be refused is refused before a model is loaded."""
    console = configure_logging()
    disable_progress_bar()  # transformers' own, which would break the display
    layout = find_layout(config)
    check_optimizer(config.policy)
    prompts = load_prompts(config)  # before the model, since the quickstart's takes half a minute to make
    model_path = resolve_model(config.policy.model_name)
    check_model(config.policy, model_path)
    teacher_paths = resolve_teachers(config)
    inputs = load_inputs(config, model_path, prompts)
    check_teachers_fit(config, inputs, teacher_paths)
    translators = make_translators(config, inputs, teacher_paths) if crosses_tokenizers(config) else None
    async with AsyncExitStack() as stack:
        environments = open_environments(config, stack)
        scoring = await open_scorers(config, layout, stack)
        agents = make_agents(config)
        codec = make_codec(config, inputs.encoder) if agents or gym_sections(config) else None
        run_dir = _begin_run_directory(config)
        metrics_logger = make_loggers(config.logger, run_dir, config.model_dump(mode="json"))
        stack.callback(metrics_logger.close)
        workers = await open_workers(
            config, inputs, model_path, teacher_paths, layout, log_dir=run_dir / "logs", stack=stack
        )
        placement = make_placement(workers, layout)
        if config.reward_model.shares_device:
            scoring = replace(scoring, turn=placement.scoring)
        weight_sync = _open_weight_sync(config, inputs, layout, stack)
        progress = make_progress(config.logger, console, rollouts_per_step=config.algorithm.num_samples_per_step)
        stack.callback(progress.close)
        context = make_context(config, inputs, workers.generation, environments, progress.rollout, scoring)
        if codec is not None:
            manager = await open_gateway(config, codec, workers.generation, stack)
            gyms = await open_nemo_gym(config, (inputs.train, *inputs.validation), manager, run_dir, stack)
            context = replace(context, agents=agent_runtimes(config, agents, manager), gyms=gyms)
        if isinstance(config, DistillationConfig) and config.distillation.val_teacher:
            metrics_logger.log_metrics(await validate_teachers(config, inputs, context, teacher_paths), 0)
        source = make_source(config, inputs, context, _rollout_writer(config, run_dir / "rollouts/train.jsonl", stack))
        stack.push_async_callback(source.close)
        algorithm = make_algorithm(config, inputs, workers.policy, placement, workers.teachers, translators)
        gc.collect()
        gc.freeze()  # what the imports left is never garbage, and looking through it takes 75 ms
        yield TrainingRun(
            config=config,
            run_dir=run_dir,
            num_steps=_num_steps(config.algorithm, len(inputs.train.prompts)),
            algorithm=algorithm,
            source=source,
            generation=workers.generation,
            policy=workers.policy,
            placement=placement,
            weight_sync=weight_sync,
            validator=make_validator(config, inputs, context),
            checkpoints=_checkpoints(config, run_dir),
            logger=metrics_logger,
            progress=progress,
            validation_rollouts=_rollout_writer(config, run_dir / "rollouts/validation.jsonl", stack),
            interrupt=Interrupt(),
        )


def _begin_run_directory(config: TrainingConfig) -> Path:
    """A new one, with the configuration in it."""
    run_dir = make_run_directory(config.logger.log_dir)
    (run_dir / CONFIG_FILE).write_text(resolved_yaml(config))
    logger.info("run directory: %s", run_dir)
    return run_dir


def _open_weight_sync(
    config: TrainingConfig, inputs: Inputs, layout: Layout, stack: AsyncExitStack
) -> TransportWeightSync:
    weight_sync = TransportWeightSync(
        inputs.probes,
        config.weight_sync,
        engine_dtype(config),
        temperature=config.policy.generation.temperature,
        keep_cache=not config.algorithm.background.recompute_kv_cache_after_weight_updates,
        transport=make_transport(config.weight_sync.transport, layout),
    )
    stack.callback(weight_sync.close)
    return weight_sync


def _rollout_writer(config: TrainingConfig, path: Path, stack: AsyncExitStack) -> RolloutWriter | None:
    if not config.rollout.write_rollouts:
        return None
    return stack.enter_context(RolloutWriter(path, write_token_ids=config.rollout.write_token_ids))


def _checkpoints(config: TrainingConfig, run_dir: Path) -> CheckpointStore | None:
    if not config.checkpointing.enabled:
        return None
    directory = config.checkpointing.checkpoint_dir
    return CheckpointStore(config.checkpointing, Path(directory) if directory else run_dir / "checkpoints")


def _num_steps(algorithm: RolloutTraining, num_prompts: int) -> int:
    """What the data allows where each step takes its prompts once; dynamic sampling takes more, so has fewer steps."""
    of_the_data = math.ceil(algorithm.max_num_epochs * num_prompts / algorithm.num_prompts_per_step)
    return min(algorithm.max_num_steps, of_the_data)


def _summary(run: TrainingRun, command: str) -> str:
    metrics_path = run.run_dir / METRICS_FILE
    rewards, accuracies = read_history(metrics_path) if metrics_path.exists() else ({}, {})
    latest = run.checkpoints.latest() if run.checkpoints else None
    go_on = None
    if latest is not None and run.checkpoints is not None:
        go_on = f"{command} checkpointing.checkpoint_dir={run.checkpoints.directory}"
        if latest.step >= run.config.algorithm.max_num_steps:
            go_on += f" {run.config.algorithm_key}.max_num_steps={2 * latest.step}"
    return summary(
        rewards=rewards,
        accuracies=accuracies,
        metrics_path=metrics_path,
        checkpoint=latest.path if latest else None,
        continue_command=go_on,
    )
