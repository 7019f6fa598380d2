"""`nemo-rl profile`: statistics, a comparison and a curriculum of a stored collection."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from nemo_rl.collect import profile_report
from nemo_rl.collect.curriculum import RewardRange, write_curriculum
from nemo_rl.collect.profile import ALL_DATASETS, THRESHOLDS, Profile, profile
from nemo_rl.collect.profile_comparison import compare
from nemo_rl.command_line import Command, ExitCode, path_argument, text_argument
from nemo_rl.config.collect import parse_seeds
from nemo_rl.errors import ConfigError
from nemo_rl.observability.console import configure_logging

COMPARISON_FILE = "comparison.json"

NumberT = TypeVar("NumberT", int, float)


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=path_argument, help="a collection: its shards, or what `nemo-rl merge` made of them"
    )
    parser.add_argument("--seeds", type=text_argument(parse_seeds), help="only these (0,2,5..7); default: all")
    parser.add_argument(
        "--k", type=_numbers(int), help="k of pass@k and majority@k (1,4,16); default: powers of two, and all rollouts"
    )
    parser.add_argument("--thresholds", type=_numbers(float), default=THRESHOLDS, help="mean rewards (0.25,0.5,0.75,1)")
    parser.add_argument("--output", type=path_argument, help="directory for the files; default: that of the collection")
    parser.add_argument(
        "--compare", type=path_argument, metavar="DIRECTORY", help="an earlier collection to compare with"
    )
    filters = parser.add_argument_group("curriculum")
    filters.add_argument(
        "--curriculum", type=path_argument, metavar="FILE", help="input rows of the tasks in the reward range"
    )
    filters.add_argument("--min-reward", type=float, help="least mean reward of a task")
    filters.add_argument("--max-reward", type=float, help="greatest mean reward of a task")
    filters.add_argument("--dataset", help="only tasks of this dataset, or of this environment: env/NAME")


def _profile(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    rewards = _reward_range(parsed)
    measured = profile(parsed.directory, seeds=parsed.seeds, ks=parsed.k, thresholds=parsed.thresholds)
    output = parsed.output or parsed.directory
    output.mkdir(parents=True, exist_ok=True)
    console = profile_report.open_report_console()
    console.print(profile_report.summary_table(measured))
    profile_report.write_profile(measured, output)
    profile_report.write_plot(measured, output / profile_report.PLOT_FILE)
    if parsed.compare is not None:
        _compare(parsed, measured, output, console)
    if rewards is not None:
        dataset = ALL_DATASETS if parsed.dataset is None else parsed.dataset
        count = write_curriculum(measured, parsed.curriculum, rewards, dataset=dataset)
        sys.stdout.write(f"{parsed.curriculum}: {count} of {len(measured.task_indices(dataset))} tasks\n")
    return ExitCode.DONE


def _compare(parsed: argparse.Namespace, measured: Profile, output: Path, console: Console) -> None:
    earlier = profile(parsed.compare, seeds=parsed.seeds, ks=parsed.k, thresholds=parsed.thresholds)
    comparison = compare(earlier, measured)
    console.print(profile_report.comparison_table(comparison, str(parsed.compare), str(parsed.directory)))
    profile_report.write_json(asdict(comparison), output / COMPARISON_FILE)


def _reward_range(parsed: argparse.Namespace) -> RewardRange | None:
    given = [name for name in ("min_reward", "max_reward", "dataset") if getattr(parsed, name) is not None]
    if parsed.curriculum is None:
        if given:
            raise ConfigError(given[0], getattr(parsed, given[0]), "needs --curriculum FILE to write to")
        return None
    low = float("-inf") if parsed.min_reward is None else parsed.min_reward
    high = float("inf") if parsed.max_reward is None else parsed.max_reward
    return RewardRange(low, high)


def _numbers(kind: Callable[[str], NumberT]) -> Callable[[str], tuple[NumberT, ...]]:
    def numbers(text: str) -> tuple[NumberT, ...]:
        try:
            found = tuple(kind(part) for part in text.split(","))
        except ValueError:
            found = ()
        if not found or not all(map(math.isfinite, found)):
            raise argparse.ArgumentTypeError(f"{text!r}: must be numbers separated by commas")
        return found

    return numbers


PROFILE = Command(
    "Statistics of a collection: a table, profile.json, profile_tasks.jsonl, profile.png.",
    _add_profile_arguments,
    _profile,
    program="nemo-rl profile",
    reported_errors=(OSError,),
)
