"""Evaluations: a collection per model, its profile, and a comparison of two."""

from collections.abc import Sequence
from pathlib import Path

from nemo_rl.collect.profile import Profile, profile
from nemo_rl.collect.profile_comparison import compare
from nemo_rl.collect.profile_report import comparison_table, open_report_console, summary_table, write_profile
from nemo_rl.config.collect import EvalRunConfig
from nemo_rl.experience.cancellation import run_async
from nemo_rl.launch.collection import CollectionResult, run_collection


def run_evaluation(config: EvalRunConfig) -> Sequence[CollectionResult]:
    """Collect from one model after the other, each in its own directory, and print and store their profiles.

    Returns the collections in the order of `config.models`; after an interruption the last one is interrupted, and
    nothing is printed.
    """
    results = []
    for model in config.models:
        results.append(run_async(run_collection(model)))
        if results[-1].interrupted:
            return results
    profiles = [
        profile(result.directory, seeds=[config.eval.seed], ks=sorted({1, config.eval.k})) for result in results
    ]
    console = open_report_console()
    for measured in profiles:
        console.print(summary_table(measured))
        write_profile(measured, measured.directory)
    if len(profiles) == 2:
        first, second = (model.sampled_name for model in config.models)
        console.print(comparison_table(compare(*profiles), first, second))
    for model, result, measured in zip(config.models, results, profiles, strict=True):
        console.file.write(_format_headline(model, result, measured) + "\n")
    return results


def _format_headline(config: EvalRunConfig, result: CollectionResult, measured: Profile) -> str:
    """Format the score of a model.

    Example: "pass@4 0.9150 +- 0.0197 of checkpoints/step_50 over 200 tasks: evaluations/..."
    """
    name = config.eval.score_name
    whole = measured.summaries[0]
    score = whole.scores.get(name)
    if score is None or score.mean is None:
        return f"{name}: no task has enough rollouts: {result.directory}"
    error = "" if score.standard_error is None else f" +- {score.standard_error:.4f}"
    notes = [whole.describe_failed()] if whole.num_failed else []
    notes += [result.overlong.describe()] if result.overlong is not None else []
    noted = f" ({'; '.join(notes)})" if notes else ""
    where = Path(result.directory)
    return f"{name} {score.mean:.4f}{error} of {config.sampled_name} over {score.num_tasks} tasks{noted}: {where}"
