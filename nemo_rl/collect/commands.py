"""`nemo-rl merge` and `nemo-rl profile`: commands over finished collections."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from nemo_rl.collect.compare import RewardRange, compare, write_curriculum
from nemo_rl.collect.merge import merge
from nemo_rl.collect.nemo_gym import export_nemo_gym, import_nemo_gym
from nemo_rl.collect.profile import ALL_DATASETS, THRESHOLDS, Profile, profile
from nemo_rl.collect.profile_report import (
    PLOT_FILE,
    comparison_table,
    summary_table,
    write_json,
    write_plot,
    write_profile,
)
from nemo_rl.config.collect import parse_seeds
from nemo_rl.errors import ConfigError, DataError, NemoRLError
from nemo_rl.observability.logging_setup import configure_logging

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2  # as argparse
EXIT_INTERRUPTED = 130  # as a shell after Ctrl-C


def run_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str], work: Callable[[argparse.Namespace], None]
) -> int:
    """Parse and work; the exit code. Errors of ours and of the file system are one message."""
    parsed = parser.parse_intermixed_args(arguments)
    configure_logging()
    try:
        work(parsed)
    except NemoRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_BAD_INPUT if isinstance(error, ConfigError | DataError) else EXIT_FAILED
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    return 0


def parse_seeds_argument(text: str) -> tuple[int, ...]:
    """Seeds as on the command line of `collect`: "0,2,5..7" is 0, 2, 5, 6, 7."""
    try:
        return parse_seeds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_merge(arguments: Sequence[str]) -> int:
    """Run `nemo-rl merge`; return 1 where rollouts are missing, 2 where shards are of different runs."""
    parser = argparse.ArgumentParser(
        prog="nemo-rl merge",
        description="Join the shards of a collection in rollouts.jsonl, ordered by seed, task and rollout.",
    )
    parser.add_argument("directory", type=Path, help="where `nemo-rl collect` wrote the shards")
    parser.add_argument(
        "--seeds", type=parse_seeds_argument, help="those that must be there (0,2,5..7); else all begun"
    )
    parser.add_argument("--allow-partial", action="store_true", help="merge what is there where rollouts are missing")
    parser.add_argument("--to-nemo-gym", type=Path, metavar="FILE", help="write NeMo Gym's files of it too")
    parser.add_argument(
        "--from-nemo-gym", type=Path, metavar="FILE", help="first make the shard of seed 0 from a file of its rollouts"
    )
    return run_command(parser, arguments, _merge)


def _merge(parsed: argparse.Namespace) -> None:
    if parsed.from_nemo_gym is not None:
        import_nemo_gym(parsed.from_nemo_gym, parsed.directory)
    merged = merge(parsed.directory, seeds=parsed.seeds, allow_partial=parsed.allow_partial)
    for gap in merged.gaps:
        sys.stderr.write(f"{gap}\n")
    sys.stdout.write(f"{merged.rollouts}: {merged.num_rollouts} rollouts, {merged.num_failures} failed attempts\n")
    if parsed.to_nemo_gym is not None:
        files = export_nemo_gym(merged.rollouts, parsed.to_nemo_gym)
        sys.stdout.write("".join(f"{path}\n" for path in (files.rollouts, files.inputs, files.failures)))


COMPARISON_FILE = "comparison.json"
LOG_COLUMNS = 160  # in a log, where there is no width to fit

ValueT = TypeVar("ValueT", int, float)


def run_profile(arguments: Sequence[str]) -> int:
    """Run `nemo-rl profile` and return its exit code."""
    return run_command(_parser(), arguments, _profile)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nemo-rl profile",
        description="Statistics of a collection: a table, profile.json, profile_tasks.jsonl, profile.png.",
    )
    parser.add_argument(
        "directory", type=Path, help="of a collection: its shards, or what `nemo-rl merge` made of them"
    )
    parser.add_argument("--seeds", type=parse_seeds_argument, help="these alone (0,2,5..7); else all")
    parser.add_argument(
        "--k", type=_numbers(int), help="of pass@k and majority@k (1,4,16); else powers of two, and all"
    )
    parser.add_argument("--thresholds", type=_numbers(float), default=THRESHOLDS, help="mean rewards (0.25,0.5,0.75,1)")
    parser.add_argument("--output", type=Path, help="directory for the files; else that of the collection")
    parser.add_argument("--compare", type=Path, metavar="DIRECTORY", help="of an earlier collection to compare it with")
    filtered = parser.add_argument_group("a curriculum")
    filtered.add_argument("--curriculum", type=Path, metavar="FILE", help="input rows of the tasks in the reward range")
    filtered.add_argument("--min-reward", type=float, help="least mean reward of a task")
    filtered.add_argument("--max-reward", type=float, help="greatest mean reward of a task")
    filtered.add_argument("--dataset", help="tasks of this data set alone")
    return parser


def _profile(parsed: argparse.Namespace) -> None:
    rewards = _reward_range(parsed)
    measured = profile(parsed.directory, seeds=parsed.seeds, ks=parsed.k, thresholds=parsed.thresholds)
    output = parsed.output or parsed.directory
    output.mkdir(parents=True, exist_ok=True)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else LOG_COLUMNS)
    console.print(summary_table(measured))
    write_profile(measured, output)
    write_plot(measured, output / PLOT_FILE)
    if parsed.compare is not None:
        _compare(parsed, measured, output, console)
    if rewards is not None:
        dataset = ALL_DATASETS if parsed.dataset is None else parsed.dataset
        count = write_curriculum(measured, parsed.curriculum, rewards, dataset=dataset)
        sys.stdout.write(f"{parsed.curriculum}: {count} of {len(measured.task_indices(dataset))} tasks\n")


def _compare(parsed: argparse.Namespace, measured: Profile, output: Path, console: Console) -> None:
    earlier = profile(parsed.compare, seeds=parsed.seeds, ks=parsed.k, thresholds=parsed.thresholds)
    comparison = compare(earlier, measured)
    console.print(comparison_table(comparison, str(parsed.compare), str(parsed.directory)))
    write_json(asdict(comparison), output / COMPARISON_FILE)


def _reward_range(parsed: argparse.Namespace) -> RewardRange | None:
    given = [name for name in ("min_reward", "max_reward", "dataset") if getattr(parsed, name) is not None]
    if parsed.curriculum is None:
        if given:
            raise ConfigError(given[0], getattr(parsed, given[0]), "needs --curriculum FILE to write to")
        return None
    low = float("-inf") if parsed.min_reward is None else parsed.min_reward
    high = float("inf") if parsed.max_reward is None else parsed.max_reward
    return RewardRange(low, high)


def _numbers(kind: Callable[[str], ValueT]) -> Callable[[str], tuple[ValueT, ...]]:
    def numbers(text: str) -> tuple[ValueT, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas between them") from error

    return numbers
