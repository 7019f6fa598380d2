"""`nemo-rl merge`: join the shards of a collection."""

import argparse
import sys

from nemo_rl.collect.atif import export_atif
from nemo_rl.collect.merge import merge
from nemo_rl.collect.nemo_gym_files import export_nemo_gym, import_nemo_gym
from nemo_rl.command_line import Command, ExitCode, path_argument, text_argument
from nemo_rl.config.collect import parse_seeds
from nemo_rl.observability.console import configure_logging


def _add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=path_argument, help="where `nemo-rl collect` wrote the shards")
    parser.add_argument(
        "--seeds",
        type=text_argument(parse_seeds),
        help="seeds that must be there (0,2,5..7); default: all that have begun",
    )
    parser.add_argument(
        "--allow-partial", action="store_true", help="merge the rollouts present even if some are missing"
    )
    parser.add_argument(
        "--to-nemo-gym", type=path_argument, metavar="FILE", help="also write NeMo Gym's files of the result"
    )
    parser.add_argument(
        "--to-atif", type=path_argument, metavar="DIRECTORY", help="also write the result as ATIF v1.7 trajectories"
    )
    parser.add_argument(
        "--from-nemo-gym",
        type=path_argument,
        metavar="FILE",
        help="first make the shard of seed 0 from NeMo Gym's rollouts",
    )


def _merge(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    if parsed.from_nemo_gym is not None:
        import_nemo_gym(parsed.from_nemo_gym, parsed.directory)
    merged = merge(parsed.directory, seeds=parsed.seeds, allow_partial=parsed.allow_partial)
    for gap in merged.gaps:
        sys.stderr.write(f"{gap}\n")
    sys.stdout.write(f"{merged.rollouts}: {merged.num_rollouts} rollouts, {merged.num_failures} failed attempts\n")
    if parsed.to_nemo_gym is not None:
        files = export_nemo_gym(merged.rollouts, parsed.to_nemo_gym)
        sys.stdout.write("".join(f"{path}\n" for path in (files.rollouts, files.inputs, files.failures)))
    if parsed.to_atif is not None:
        atif = export_atif(merged.rollouts, parsed.to_atif)
        skipped = f"; {atif.num_skipped} were imported from NeMo Gym, which exports them" if atif.num_skipped else ""
        sys.stdout.write(f"{atif.directory}: {atif.num_trajectories} trajectories{skipped}\n")
    return ExitCode.DONE


MERGE = Command(
    "Join the shards of a collection in rollouts.jsonl, ordered by seed, task and rollout.",
    _add_merge_arguments,
    _merge,
    program="nemo-rl merge",
    reported_errors=(OSError,),
)
