"""What examples/run_eval.py does with a recipe: a collection a model, measured and compared."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nemo_rl.build.command_line import EXIT_FAILED, EXIT_INTERRUPTED, Job
from nemo_rl.collect.compare import compare
from nemo_rl.collect.profile import Profile, profile
from nemo_rl.collect.profile_report import comparison_table, summary_table, write_profile
from nemo_rl.config.evaluation import EvalRunConfig
from nemo_rl.config.loading import load_eval_config

if TYPE_CHECKING:
    from nemo_rl.build.collect import CollectionResult

LOG_COLUMNS = 160  # in a log, where there is no width to fit


def _plan(config: EvalRunConfig) -> str:
    from nemo_rl.build.placement import collection_placement_plan  # torch looks for devices

    return f"\n{collection_placement_plan(*config.models)}\n"


def _evaluate(config: EvalRunConfig, command: str) -> int:
    """One model after the other, each in the folder that its name gives it, then the tables."""
    from nemo_rl.build.collect import run_collection  # torch and the engine load only for a valid configuration

    collections = []
    for model in config.models:
        collections.append(asyncio.run(run_collection(model)))
        if collections[-1].interrupted:
            sys.stdout.write("interrupted; the same command goes on\n")
            return EXIT_INTERRUPTED
    profiles = [_make_profile(config, result) for result in collections]
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else LOG_COLUMNS)
    for measured in profiles:
        console.print(summary_table(measured))
        write_profile(measured, measured.directory)
    if len(profiles) == 2:
        first, second = (model.policy.model_name for model in config.models)
        console.print(comparison_table(compare(*profiles), first, second))
    for model, result, measured in zip(config.models, collections, profiles, strict=True):
        sys.stdout.write(headline(model, result, measured) + "\n")
    return 0 if all(result.is_complete for result in collections) else EXIT_FAILED


def _make_profile(config: EvalRunConfig, result: "CollectionResult") -> Profile:
    return profile(result.directory, seeds=[config.eval.seed], ks=sorted({1, config.eval.k}))


def headline(config: EvalRunConfig, result: "CollectionResult", measured: Profile) -> str:
    """Example: "pass@4 0.9150 +- 0.0197 of checkpoints/step_50 over 200 tasks: evaluations/..."."""
    name = config.eval.score_name
    score = measured.summaries[0].scores.get(name)
    if score is None or score.mean is None:
        return f"{name}: no task has enough rollouts: {result.directory}"
    error = "" if score.standard_error is None else f" +- {score.standard_error:.4f}"
    failed = f", {result.num_given_up} rollouts failed" if result.num_given_up else ""
    where = Path(result.directory)
    return f"{name} {score.mean:.4f}{error} of {config.policy.model_name} over {score.num_tasks} tasks{failed}: {where}"


EVAL_JOB = Job(load_eval_config, _evaluate, _plan)
