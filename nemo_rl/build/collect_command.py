"""`nemo-rl collect`: rollouts of a model over data sets, kept on the disk as they end. Exact resume; chunks; seeds.

nemo-rl collect                                     the quickstart: 1,066 words, four rollouts each
nemo-rl collect collect.seeds=0,2,5..7 collect.chunk=0/4
nemo-rl collect --config RECIPE server.address=http://127.0.0.1:8000
nemo-rl collect --config RECIPE --dry-run           resolve and validate the configuration only
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nemo_rl.quickstart
from nemo_rl.build.command_line import EXIT_FAILED, EXIT_INTERRUPTED, Job, run_command
from nemo_rl.config.collect import CollectRunConfig
from nemo_rl.config.loading import load_collect_config

if TYPE_CHECKING:
    from nemo_rl.build.collect import CollectionResult

QUICKSTART = Path(nemo_rl.quickstart.__path__[0]) / "collect.yaml"


def run(arguments: Sequence[str]) -> int:
    """The exit code: 1 where rollouts failed each time or something broke, 2 for a bad configuration, 130 after
    Ctrl-C."""
    return run_command(
        arguments, description=__doc__ or "", default_config=QUICKSTART, job=COLLECT_JOB, program="nemo-rl collect"
    )


def _plan(config: CollectRunConfig) -> str:
    from nemo_rl.build.placement import collection_placement_plan  # torch looks for devices

    return f"\n{collection_placement_plan(config)}\n"


def _collect(config: CollectRunConfig, command: str) -> int:
    from nemo_rl.build.collect import run_collection  # torch and the engine load only for a valid configuration

    result = asyncio.run(run_collection(config))
    sys.stdout.write(report(result) + "\n")
    if result.interrupted:
        return EXIT_INTERRUPTED
    return 0 if result.is_complete else EXIT_FAILED


def report(result: "CollectionResult") -> str:
    """What there is now, and what to do next."""
    directory = result.directory
    reward = "" if result.mean_reward is None else f", mean reward {result.mean_reward:.4f}"
    lines = [
        f"Rollouts    {result.num_finished:,} of {result.num_rollouts:,} in {directory}",
        f"This start  {result.num_new:,} in {result.seconds:.1f} s{reward}",
    ]
    if result.num_given_up:
        lines.append(f"Failed      {result.num_given_up:,} each time: {directory}/*_failures.jsonl")
    if result.is_complete and result.is_chunk:
        lines.append("Next        the other chunks, then nemo-rl merge and profile")
    elif result.is_complete:
        lines.append(f"Next        nemo-rl merge {directory}; nemo-rl profile {directory}")
    elif result.interrupted:
        lines.append("Continue    with the same command")
    return "\n".join(lines)


COLLECT_JOB = Job(load_collect_config, _collect, _plan)
