"""`nemo-rl merge`: join the shards of a collection."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.collect.command import run_command, seeds_argument
from nemo_rl.collect.merge import merge


def run(arguments: Sequence[str]) -> int:
    """The exit code: 1 where rollouts are missing, 2 where shards are of different runs."""
    parser = argparse.ArgumentParser(
        prog="nemo-rl merge",
        description="Join the shards of a collection in rollouts.jsonl, ordered by seed, task and rollout.",
    )
    parser.add_argument("directory", type=Path, help="where `nemo-rl collect` wrote the shards")
    parser.add_argument("--seeds", type=seeds_argument, help="those that must be there (0,2,5..7); else all begun")
    parser.add_argument("--allow-partial", action="store_true", help="merge what is there where rollouts are missing")
    return run_command(parser, arguments, _merge)


def _merge(parsed: argparse.Namespace) -> None:
    merged = merge(parsed.directory, seeds=parsed.seeds, allow_partial=parsed.allow_partial)
    for gap in merged.gaps:
        sys.stderr.write(f"{gap}\n")
    sys.stdout.write(f"{merged.rollouts}: {merged.num_rollouts} rollouts, {merged.num_failures} failed attempts\n")
