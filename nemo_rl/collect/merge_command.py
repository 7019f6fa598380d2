"""`nemo-rl merge`: join the shards of a collection."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.collect.command import parse_seeds_argument, run_command
from nemo_rl.collect.merge import merge
from nemo_rl.collect.nemo_gym_export import export_nemo_gym
from nemo_rl.collect.nemo_gym_import import import_nemo_gym


def run(arguments: Sequence[str]) -> int:
    """The exit code: 1 where rollouts are missing, 2 where shards are of different runs."""
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
