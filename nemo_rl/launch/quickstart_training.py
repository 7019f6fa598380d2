"""Training of the quickstart's models, a supervised run in a thread; launch/models.py keeps what it makes."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch

from nemo_rl.algorithms.interrupt import Interrupt, Interrupted
from nemo_rl.algorithms.supervised_loop import SupervisedRun, train_supervised
from nemo_rl.algorithms.supervised_objectives import SFTObjective
from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.policy import OptimizerConfig, PolicyConfig, SchedulerStageConfig
from nemo_rl.config.supervised_runs import SFTConfig, SFTDataConfig, SFTRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.conversations import encode_conversations
from nemo_rl.data.example_sets import ExampleSet
from nemo_rl.data.supervised_samples import SampleLoader
from nemo_rl.observability import heartbeat
from nemo_rl.observability.console import Progress
from nemo_rl.observability.loggers import CompositeLogger
from nemo_rl.policy.driver import LocalPolicy, PolicyThread
from nemo_rl.quickstart import models as quickstart
from nemo_rl.quickstart.words import load_quickstart_prompts

MAX_TOKENS = 64  # tokens of a question with its spelling


async def train_in_thread(recipe: quickstart.Recipe, scratch: Path, *, on_step: quickstart.OnStep | None) -> Path:
    """Train fresh weights and return their directory below `scratch`; when cancelled, stop after the current step."""
    thread, interrupt = PolicyThread("quickstart"), Interrupt()
    try:
        with torch.random.fork_rng(devices=[]):
            return await thread.run(_train, recipe, scratch, _StepProgress(on_step), interrupt)
    finally:
        interrupt.request()  # if this was cancelled
        thread.close()


def _train(recipe: quickstart.Recipe, scratch: Path, progress: Progress, interrupt: Interrupt) -> Path:
    return asyncio.run(_train_model(recipe, scratch, progress, interrupt))


async def _train_model(recipe: quickstart.Recipe, scratch: Path, progress: Progress, interrupt: Interrupt) -> Path:
    """Train fresh weights and return their directory. Raises Interrupted soon after a stop is requested."""
    tokenizer = quickstart.make_tokenizer() if recipe.tokenizer == "characters" else quickstart.make_pair_tokenizer()
    quickstart.make_model(tokenizer, recipe).save_pretrained(scratch / "fresh")
    train, _ = load_quickstart_prompts()
    _check(interrupt)
    conversation_set = ExampleSet("spellings", quickstart.spellings(train.prompts, recipe))
    encoder = ChatEncoder(tokenizer)
    samples = encode_conversations(encoder, conversation_set, max_tokens=MAX_TOKENS, overlong="truncate").samples
    _check(interrupt)
    config = _config(recipe, str(scratch / "fresh"))
    policy = LocalPolicy(
        config.policy,
        model_path=config.policy.model_name,
        temperature=1.0,
        needs_reference=False,
        num_samples_per_step=recipe.batch_size,
        seed=recipe.seed,
        tokenizer=tokenizer,
    )
    try:
        run = SupervisedRun(
            config=config,
            objective=SFTObjective(),
            run_dir=scratch,
            num_steps=recipe.num_steps,
            source=SampleLoader(samples, shuffle=False, seed=recipe.seed, max_epochs=1),
            validation=(),
            policy=policy,
            checkpoints=None,
            logger=CompositeLogger({}),
            progress=progress,
            interrupt=interrupt,
        )
        await train_supervised(run)
        _check(interrupt)
        await policy.save(scratch, save_optimizer=False)
        await policy.finish_save()
    finally:
        await policy.close()
    return scratch / "weights"


def _check(interrupt: Interrupt) -> None:
    if interrupt.requested:
        raise Interrupted("the making of the quickstart's model")


def _config(recipe: quickstart.Recipe, model_path: str) -> SFTRunConfig:
    """Return the training configuration: the learning rate rises over `warmup_steps` to a line that falls to a
    twentieth of the peak, where it stays."""
    warmup, lowest = recipe.warmup_steps, 0.05
    highest = max(1 - warmup / recipe.num_steps, lowest)  # where the two lines meet
    falling = max(round((1 - lowest) * recipe.num_steps) - warmup, 1)
    return SFTRunConfig(
        sft=SFTConfig(max_num_steps=recipe.num_steps, seed=recipe.seed, val_period=0, val_at_end=False),
        policy=PolicyConfig(
            model_name=model_path,
            precision="float32",
            device="cpu",
            train_global_batch_size=recipe.batch_size,
            train_micro_batch_size=recipe.batch_size,
            max_total_sequence_length=MAX_TOKENS,
            optimizer=OptimizerConfig(kwargs={"lr": recipe.peak_learning_rate, "weight_decay": 0.01}),
            scheduler=[
                _linear(start_factor=1 / warmup, end_factor=highest, total_iters=warmup),
                _linear(start_factor=highest, end_factor=lowest, total_iters=falling),
                SchedulerStageConfig(milestones=[warmup]),
            ],
        ),
        data=SFTDataConfig(train=DatasetConfig(), shuffle=False),
    )


def _linear(**kwargs: float) -> SchedulerStageConfig:
    return SchedulerStageConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs=kwargs)


class _StepProgress(Progress):
    """Progress that reports steps to a callback without logging each of them.

    They are no steps of the run that waits for the model, and the heartbeat does not name them.
    """

    def __init__(self, on_step: quickstart.OnStep | None) -> None:
        super().__init__()
        self._on_step = on_step

    def start(self, *, step: int, total: int | None) -> None:
        self._total = total or 0

    def step(self, step: int, *, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        heartbeat.record()
        if self._on_step is not None:
            self._on_step(step, self._total, metrics["loss"])
