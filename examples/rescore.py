"""Give stored rollouts new rewards, without generating anything.

uv run examples/rescore.py runs/exp_001/rollouts/train.jsonl rescored.jsonl --config runs/exp_001/config.yaml \
    ++scorers.short='{type: function, function: "rules:short"}' '++env.spell_backward.scorers=[short]'

The configuration names the data that the rollouts came from and the scorers; a scorer's reward replaces the
one of its name, the others stay.
"""

import argparse
import sys
from pathlib import Path

from nemo_rl.command_line import Command, ExitCode, run_command
from nemo_rl.config.loading import load_config
from nemo_rl.launch.rescoring import rescore_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", type=Path, help="a rollouts file of a run")
    parser.add_argument("output", type=Path, help="where its lines go, with their new rewards")
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml, or a recipe")
    parser.add_argument("overrides", nargs="*", help="key=value, ++key=value, ~key (Hydra's grammar)")


def rescore(parsed: argparse.Namespace) -> ExitCode:
    config = load_config(parsed.config, parsed.overrides)
    before, after = rescore_file(config, parsed.rollouts, parsed.output)
    sys.stdout.write(f"before: {before}\nafter:  {after}\n{parsed.output}\n")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(run_command(Command(__doc__ or "", add_arguments, rescore)))
