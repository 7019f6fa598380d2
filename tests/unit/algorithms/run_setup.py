"""A GRPO run of fakes around the real sources, validator and checkpoints; each test names what matters to it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.algorithms.grpo import GRPO, RequiredLogprobs
from nemo_rl.algorithms.interrupt import Interrupt
from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.experience.rollout_dependencies import RolloutDependencies
from nemo_rl.interfaces import CollectedGroups, GroupSource
from nemo_rl.launch.resolved_model import ResolvedModel
from nemo_rl.launch.resolved_run import ResolvedRun
from nemo_rl.launch.sampling import make_limits
from nemo_rl.launch.training_source import make_source, make_validator
from nemo_rl.losses.make import make_loss
from nemo_rl.observability.console import Progress
from nemo_rl.types import EnvStep, Message, Prompt
from tests.fakes.chat_tokenizer import chat_tokenizer
from tests.fakes.encoder import FakeEncoder
from tests.fakes.environments import Conversation, FakeEnvironment, State
from tests.fakes.generation import FakeGeneration
from tests.fakes.policy import FakePolicy, FakeWeightSync
from tests.unit.experience.rollout_setup import check_environment

VOCAB_SIZE = 6  # of the engine: it ends its turns soon
TRAINED, HELD_OUT = "trained", "held_out"  # the two tasks, so that validation's calls can be told from training's
NO_PASS = RequiredLogprobs(previous=False, reference=False)

Before = Callable[[Sequence[Conversation]], Awaitable[None]]


class RecordingLogger:
    """Keeps metrics and tables by step."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.tables: list[tuple[str, Sequence[str], Sequence[Sequence[object]], int]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.setdefault(step, {}).update(metrics)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        self.tables.append((name, columns, rows, step))

    def close(self) -> None:
        """Nothing is held."""


class RecordingSource:
    """Writes down when groups are asked for, and which prompts were drawn in each step."""

    def __init__(self, inner: GroupSource, calls: list[str]) -> None:
        self._inner = inner
        self._calls = calls
        self.drawn: list[list[str]] = []
        self.holds: list[tuple[int, bool]] = []  # how many calls came before each, and whether it waits for all

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        self._calls.append(f"next_groups {weight_version}")
        collected = await self._inner.next_groups(weight_version)
        self.drawn.append([group.prompt.prompt_id for group in collected.groups])
        return collected

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        self.holds.append((len(self._calls), until_idle))
        return self._inner.hold(until_idle=until_idle)

    async def close(self) -> None:
        await self._inner.close()


@dataclass(frozen=True)
class Rig:
    """A run, and its parts under their own types."""

    run: TrainingRun
    calls: list[str]  # of policy, source, weight sync and validation's environment, in order
    policy: FakePolicy
    source: RecordingSource
    generation: FakeGeneration
    logger: RecordingLogger

    def steps(self) -> dict[int, dict[str, float]]:
        """Training metrics by step."""
        train = {
            step: {k: v for k, v in m.items() if k.startswith("train/")} for step, m in self.logger.metrics.items()
        }
        return {step: metrics for step, metrics in train.items() if metrics}

    def validations(self) -> list[int]:
        """Steps of the validations."""
        return [step for step, metrics in self.logger.metrics.items() if "validation/num_failed" in metrics]

    def checkpoints(self) -> dict[int, Mapping[str, float]]:
        """Metrics of the checkpoints by step."""
        assert self.run.checkpoints is not None
        return {checkpoint.step: checkpoint.info.metrics for checkpoint in self.run.checkpoints.checkpoints()}


def prompts(count: int, task_name: str = TRAINED) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"{task_name}{i}", task_name, (Message("user", f"question{i}"),)) for i in range(count))


def make_resolved_run(config: GRPORunConfig, train: PromptSet, *validation: PromptSet) -> ResolvedRun:
    """Return a resolved run with a fake encoder; its model has no files."""
    policy = ResolvedModel("policy", "", None, chat_tokenizer(), FakeEncoder())
    return ResolvedRun(config, make_layout(config, "cpu"), policy, train, validation)


def make_config(**sections: Mapping[str, Any]) -> GRPORunConfig:
    """Two prompts of three rollouts a step; no validation unless asked for."""
    smallest: dict[str, Any] = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 3, "val_period": 0, "val_at_end": False},
        "policy": {
            "model_name": "none",
            "train_global_batch_size": 6,
            "train_micro_batch_size": 6,
            "max_total_sequence_length": 64,
            "generation": {"max_new_tokens": 8},
        },
        "data": {"train": {"dataset_name": "jsonl"}},
        "rollout": {"max_retries": 0, "retry_backoff_s": 0.0},
        "checkpointing": {"enabled": True, "save_period": 1000, "keep_top_k": None},
    }
    for name, section in sections.items():
        smallest[name] = {**smallest.get(name, {}), **section}
    return GRPORunConfig.model_validate(smallest)


def make_rig(
    directory: Path,
    config: GRPORunConfig | None = None,
    *,
    num_prompts: int = 8,
    validation: Sequence[PromptSet] = (PromptSet("held_out", prompts(3, HELD_OUT)),),
    answer: Callable[[Conversation, State], EnvStep] | None = None,
    before_training: Before | None = None,
    before_validation: Before | None = None,
    generation: FakeGeneration | None = None,
    on_train_step: Callable[[int], None] | None = None,
    needed: RequiredLogprobs = NO_PASS,
    interrupt: Interrupt | None = None,
    shares_device: bool = False,
    stays_with_engine: bool = False,
) -> Rig:
    """A run whose checkpoints lie in `directory`; `before_...` is awaited by the environment of those rollouts."""
    config = config or make_config()
    calls: list[str] = []

    async def validate(conversations: Sequence[Conversation]) -> None:
        calls.append("validate")
        if before_validation is not None:
            await before_validation(conversations)

    environments = {
        TRAINED: check_environment(FakeEnvironment(answer, before=before_training)),
        HELD_OUT: check_environment(FakeEnvironment(before=validate)),
    }
    generation = generation or FakeGeneration(vocab_size=VOCAB_SIZE)
    resolved = make_resolved_run(config, PromptSet("train", prompts(num_prompts)), *validation)
    progress = Progress()
    dependencies = RolloutDependencies(generation, environments, resolved.policy.encoder, make_limits(config))
    policy = FakePolicy(calls, on_train_step=on_train_step)
    source = RecordingSource(make_source(resolved, dependencies, on_rollout=progress.rollout), calls)
    logger = RecordingLogger()
    placement = Placement(policy, generation, shares_device=shares_device, stays_with_engine=stays_with_engine)
    algorithm = GRPO(
        config=config,
        loss_fn=make_loss(config.loss_fn),
        advantage_estimator=make_advantage_estimator(config.grpo.adv_estimator, config.loss_fn),
        required_logprobs=needed,
        policy=policy,
        placement=placement,
    )
    run = TrainingRun(
        config=config,
        run_dir=directory,
        num_steps=config.grpo.max_num_steps,
        algorithms={"": algorithm},
        source=source,
        generation=generation,
        policy=policy,
        placement=placement,
        weight_sync=FakeWeightSync(calls),
        validator=make_validator(config, resolved.validation, dependencies),
        checkpoints=CheckpointStore(config.checkpointing, directory / "checkpoints"),
        logger=logger,
        progress=progress,
        validation_rollouts=None,
        interrupt=interrupt or Interrupt(),
    )
    return Rig(run, calls, policy, source, generation, logger)
