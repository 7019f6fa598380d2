"""The commands that run a recipe: each loads a configuration, shows it with --dry-run, or runs it.

Importing this module imports neither the schema nor torch nor an engine: the schema loads with the recipe, the rest
once the configuration is valid.
"""

import argparse
import gc
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nemo_rl.command_line import Command, ExitCode
from nemo_rl.config.config_command import ALLOW_UNSUPPORTED_HELP
from nemo_rl.errors import ConfigError, conceal
from nemo_rl.observability import heartbeat
from nemo_rl.recipes import find_recipe

if TYPE_CHECKING:
    from nemo_rl.algorithms.training_progress import TrainingProgress
    from nemo_rl.config.collect import CollectRunConfig, EvalRunConfig
    from nemo_rl.config.master import TrainingRunConfig
    from nemo_rl.config.supervised_runs import RewardModelRunConfig, SupervisedRunConfig

OUTPUT_DIRECTORIES = (
    "logger.log_dir",
    "checkpointing.checkpoint_dir",
    "collect.output_dir",
    "eval.output_dir",
)
POLICY_KEYS = ("policy.model_name", "policy.max_total_sequence_length", "policy.train_global_batch_size")
TRAINING_KEYS = ("checkpointing.enabled", "checkpointing.save_period", "logger.wandb_enabled", "cluster.gpus_per_node")
ROLLOUT_KEYS = ("num_prompts_per_step", "num_generations_per_prompt", "max_num_steps", "val_period", "seed")


@dataclass(frozen=True, slots=True)
class Job:
    """The use of a recipe by a command."""

    verb: str  # the verb of nemo-rl
    run: Callable[[Any, str], ExitCode]  # called with the configuration and the command line that started it
    plan: Callable[[Any], str]  # printed by --dry-run below the configuration
    common_keys: tuple[str, ...] = ()  # shown by --help
    recipe_of_run: str | None = None  # the function that writes the recipe for a run, whose path may be the first word

    def load(self, recipe: Path, overrides: Any = (), **options: bool) -> Any:
        """Return the configuration from a recipe and overrides."""
        gc.disable()  # nearly all that this makes lives on, and a mistyped key should be told soon
        try:
            loading = importlib.import_module("nemo_rl.config.loading")
            return loading.LOADERS[self.verb](recipe, overrides, **options)
        finally:
            gc.enable()

    def command(
        self, description: str, default_config: str | Path, *, program: str | None = None, hint: str = ""
    ) -> Command:
        """Return the command that runs this job over `--config`, or over `default_config` without it.

        `hint` is written to stderr with the name of the recipe that runs without `--config`.
        """
        run = partial(self._run, default_config=default_config, program=program, hint=hint)
        return Command(description, add_recipe_arguments, run, program, details=self._format_common_keys)

    def verb_command(self, summary: str, default_config: str, *examples: str) -> Command:
        """Return `nemo-rl VERB` over a packaged recipe; each example is what may follow the verb."""
        program = f"nemo-rl {self.verb}"
        lines = [program, *(f"{program} {example}" for example in (*examples, "--dry-run"))]
        description = "\n".join(
            [
                f"{summary} Without --config: {self.verb}.yaml of this directory, else the recipe `{default_config}`.",
                "",
                *lines,
            ]
        )
        return self.command(description, default_config, program=program)

    def _load_run(self, parsed: argparse.Namespace, options: dict[str, bool]) -> Any:
        """Return the configuration of the run whose path is the first word of the command line."""
        run, *overrides = parsed.overrides
        if parsed.config is not None:
            problem = f"allowed without the run {run}, which has its own recipe"
            raise ConfigError("--config", str(parsed.config), problem)
        module, _, name = str(self.recipe_of_run).partition(":")
        with TemporaryDirectory() as directory:
            recipe = getattr(importlib.import_module(module), name)(Path(run), Path(directory))
            return self.load(recipe, overrides, **options)

    def _default_recipe(self, default_config: str | Path, program: str | None, hint: str) -> str | Path:
        """Return the recipe that runs without `--config`, and say so on stderr."""
        local = Path(f"{self.verb}.yaml")  # the recipe of a user's project
        if program and local.is_file():
            sys.stderr.write(f"{program}: the recipe {local} of this directory\n")
            default_config = local
        if hint:
            sys.stderr.write(f"without --config the recipe {default_config} runs; {hint}\n")
        return default_config

    def _format_common_keys(self) -> str:
        from nemo_rl.config.reference import format_common_keys

        return format_common_keys(self.verb, self.common_keys)

    def _run(
        self, parsed: argparse.Namespace, *, default_config: str | Path, program: str | None, hint: str
    ) -> ExitCode:
        options = {"allow_unsupported": True} if parsed.allow_unsupported else {}
        if self.recipe_of_run is not None and parsed.overrides and _is_path(parsed.overrides[0]):
            config = self._load_run(parsed, options)
        else:
            named = parsed.config
            recipe = self._default_recipe(default_config, program, hint) if named is None else named
            config = self.load(find_recipe(recipe), parsed.overrides, **options)
        from nemo_rl.config.loading import resolved_yaml
        from nemo_rl.config.shared_sections import ClusterConfig
        from nemo_rl.launch.model_files import check_model_names
        from nemo_rl.observability.console import check_writable

        check_model_names(config)
        for key, directory in output_directories(config):
            check_writable(key, directory)
        if not parsed.dry_run:
            _check_vllm(config)
            if isinstance(cluster := getattr(config, "cluster", None), ClusterConfig):
                os.environ.update(cluster.environment)  # inherited by every process that the run starts
            _check_restarts(config)
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once; vLLM warns on a thread here
            with heartbeat.beating():
                return self.run(config, _continue_command(parsed, program))
        sys.stdout.write(resolved_yaml(config) + conceal(self.plan(config)))
        return ExitCode.DONE


def _check_vllm(config: object) -> None:
    """Raise ConfigError if the run would start vLLM and it is not installed: before anything slow is imported."""
    key = vllm_key(config)
    if key is not None and importlib.util.find_spec("vllm") is None:
        problem = f"vLLM is not installed (docs/install.md); {key}=hf samples with transformers, and needs no more"
        raise ConfigError(key, "vllm", problem)


def vllm_key(config: object) -> str | None:
    """Return the key by which a run starts vLLM itself; None if it samples otherwise, or from a server."""
    key = "policy.generation.backend" if _value_at(config, "server") is None else "server.backend"
    is_started_here = _value_at(config, key) == "vllm" and _value_at(config, "server.address") is None
    return key if is_started_here else None


def output_directories(config: object) -> Iterator[tuple[str, str]]:
    """Yield the directories that a run writes to, by key."""
    for key in OUTPUT_DIRECTORIES:
        if isinstance(directory := _value_at(config, key), str):
            yield key, directory


def _check_restarts(config: object) -> None:
    """Raise ConfigError for training that `nemo-rl run` could only start afresh."""
    section = getattr(config, "checkpointing", None)
    if not heartbeat.is_supervised() or section is None:
        return
    enabled = getattr(section, "enabled", None)
    if enabled is None:
        raise ConfigError("checkpointing", None, "this command does not resume: start it without nemo-rl run")
    if not enabled:
        raise ConfigError("checkpointing.enabled", False, "nemo-rl run restarts from checkpoints: must be true")


def _is_path(word: str) -> bool:
    """Return whether a word is a path that exists, and not an override."""
    return word.strip() != "" and "=" not in word and not word.startswith("~") and Path(word).exists()


def _value_at(config: object, key: str) -> object:
    for name in key.split("."):
        config = getattr(config, name, None)
    return config


def add_recipe_arguments(parser: argparse.ArgumentParser, *, default: str | None = "the quickstart") -> None:
    """Add `--config`, `--dry-run` and the overrides; without a `default` recipe `--config` is required."""
    described = "a recipe of `nemo-rl collect`" if default is None else f"a recipe; default: {default}"
    described += ": a file, or a name of `nemo-rl config list`"
    parser.add_argument("--config", metavar="RECIPE", required=default is None, help=described)
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and where; then stop")
    parser.add_argument("--allow-unsupported", action="store_true", help=ALLOW_UNSUPPORTED_HELP)
    parser.add_argument("overrides", nargs="*", help="key=value, ++key=value, ~key (Hydra's grammar)")


def _continue_command(parsed: argparse.Namespace, program: str | None) -> str:
    """Return the command line of this run, which also continues it."""
    start = program.split() if program else ["uv", "run", os.path.relpath(sys.argv[0])]
    config = ["--config", str(parsed.config)] if parsed.config else []
    config += ["--allow-unsupported"] if parsed.allow_unsupported else []
    return shlex.join([*start, *config, *parsed.overrides])


def _train_on_rollouts(config: "TrainingRunConfig", command: str) -> ExitCode:
    from nemo_rl.experience.cancellation import run_async
    from nemo_rl.launch.training import run_training

    return _training_exit_code(run_async(run_training(config, command)))


def _train_supervised(config: "SupervisedRunConfig", command: str) -> ExitCode:
    from nemo_rl.experience.cancellation import run_async
    from nemo_rl.launch.supervised_training import run_supervised

    return _training_exit_code(run_async(run_supervised(config, command)))


def _training_exit_code(progress: "TrainingProgress") -> ExitCode:
    return ExitCode.INTERRUPTED if progress.interrupted else ExitCode.DONE


def _train_reward_model(config: "RewardModelRunConfig", command: str) -> ExitCode:
    from nemo_rl.launch.reward_model_training import train_reward_model

    train_reward_model(config)
    return ExitCode.DONE


def _collect(config: "CollectRunConfig", command: str) -> ExitCode:
    from nemo_rl.experience.cancellation import run_async
    from nemo_rl.launch.collection import format_result, run_collection

    result = run_async(run_collection(config))
    sys.stdout.write(format_result(result) + "\n")
    if result.interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if result.is_complete else ExitCode.FAILED


def _evaluate(config: "EvalRunConfig", command: str) -> ExitCode:
    from nemo_rl.launch.evaluation import run_evaluation

    results = run_evaluation(config)
    if results[-1].interrupted:
        sys.stdout.write("interrupted; the same command continues\n")
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if all(result.is_complete for result in results) else ExitCode.FAILED


def _plan_training(config: "TrainingRunConfig | SupervisedRunConfig") -> str:
    from nemo_rl.launch.memory_plan import memory_plan
    from nemo_rl.launch.placement_plan import placement_plan
    from nemo_rl.launch.resolved_run import find_planned_layouts
    from nemo_rl.policy.optimizers import check_optimizer

    check_optimizer(config.policy)
    layouts = find_planned_layouts(config)
    return "".join(f"\n{placement_plan(config, layout)}\n{memory_plan(config, layout)}\n" for layout in layouts)


def _plan_sampling(config: "CollectRunConfig | EvalRunConfig") -> str:
    from nemo_rl.launch.memory_plan import sampling_memory_plan
    from nemo_rl.launch.placement_plan import collection_placement_plan
    from nemo_rl.launch.sampled import find_planned_device

    configs = getattr(config, "models", (config,))
    memory = sampling_memory_plan(*configs, device=find_planned_device(config))
    return f"\n{collection_placement_plan(*configs)}\n{memory}\n"


def _plan_reward_model(config: "RewardModelRunConfig") -> str:
    from nemo_rl.launch.memory_plan import reward_model_memory_plan

    return f"\n{reward_model_memory_plan(config)}\n"


GRPO_JOB = Job(
    "grpo",
    _train_on_rollouts,
    _plan_training,
    (*(f"grpo.{key}" for key in ROLLOUT_KEYS), *POLICY_KEYS, *TRAINING_KEYS),
)
DISTILLATION_JOB = Job(
    "distill",
    _train_on_rollouts,
    _plan_training,
    (*(f"distillation.{key}" for key in (*ROLLOUT_KEYS, "topk_logits_k")), *POLICY_KEYS, "teacher.model_name"),
)
SFT_JOB = Job(
    "sft",
    _train_supervised,
    _plan_training,
    (*(f"sft.{key}" for key in ("max_num_epochs", "max_num_steps", "val_period", "seed")), *POLICY_KEYS),
)
DPO_JOB = Job(
    "dpo",
    _train_supervised,
    _plan_training,
    (
        *(f"dpo.{key}" for key in ("max_num_epochs", "max_num_steps", "val_period", "reference_policy_kl_penalty")),
        *POLICY_KEYS,
    ),
)
REWARD_MODEL_JOB = Job(
    "rm",
    _train_reward_model,
    _plan_reward_model,
    ("rm.max_num_steps", "rm.val_period", *POLICY_KEYS, "data.train.data_path", "checkpointing.checkpoint_dir"),
)
EVAL_JOB = Job(
    "eval",
    _evaluate,
    _plan_sampling,
    ("policy.model_name", *(f"eval.{key}" for key in ("metric", "num_tests_per_prompt", "baseline", "output_dir"))),
    recipe_of_run="nemo_rl.launch.run_evaluation:write_evaluation_recipe",
)
COLLECT_JOB = Job(
    "collect",
    _collect,
    _plan_sampling,
    ("policy.model_name", *(f"collect.{key}" for key in ("output_dir", "seeds", "num_repeats", "limit", "chunk"))),
)

GRPO = GRPO_JOB.verb_command(
    "Train a language model with GRPO.",
    "quickstart",
    "--config grpo_math_1B policy.model_name=Qwen/Qwen2.5-0.5B",
    "grpo.num_prompts_per_step=4 ++policy.optimizer.kwargs.lr=1e-4",
)
DISTILL = DISTILLATION_JOB.verb_command(
    "Distil a teacher into a language model, on the model's own samples.",
    "distillation",
    "--config distillation_math",
    "loss_fn.kl_type=reverse distillation.topk_logits_k=16",
)
SFT = SFT_JOB.verb_command(
    "Train a language model on conversations.",
    "sft_quickstart",
    "--config sft_tulu3 policy.model_name=Qwen/Qwen2.5-0.5B",
)
DPO = DPO_JOB.verb_command(
    "Train a language model on preferences, by direct preference optimization.",
    "dpo_quickstart",
    "data.train.dataset_name=jsonl data.train.data_path=pairs.jsonl",
)
RM = REWARD_MODEL_JOB.verb_command(
    "Train a reward model on preferences.",
    "rm_quickstart",
    "data.train.dataset_name=jsonl data.train.data_path=pairs.jsonl",
)
EVAL = EVAL_JOB.verb_command(
    "Evaluate a model or a checkpoint: pass@k over datasets, and a comparison with another. A run, or a checkpoint of "
    "one, as the first word is evaluated on its own validation sets.",
    "eval",
    "runs/exp_001 eval.num_tests_per_prompt=4",
    "policy.model_name=runs/exp_001/checkpoints/step_150 eval.baseline=nemo_rl/quickstart",
)
COLLECT = COLLECT_JOB.verb_command(
    "Collect rollouts of a model over datasets, stored as they end; the same command resumes exactly.",
    "collect",
    "collect.seeds=0,2,5..7 collect.chunk=0/4",
    "--config RECIPE server.address=http://127.0.0.1:8000",
)
