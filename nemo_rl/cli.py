"""`nemo-rl <command>`: finds the command's module and hands it the arguments."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.errors import suggest_name

EXIT_BAD_USAGE = 2  # as argparse


@dataclass(frozen=True, slots=True)
class Command:
    """A module with `run(arguments: Sequence[str]) -> int`, loaded when the command is given."""

    module: str
    function: str
    summary: str


COMMANDS: dict[str, Command] = {
    "collect": Command("nemo_rl.launch.commands", "run_collect", "collect rollouts of a model over data sets"),
    "merge": Command("nemo_rl.collect.commands", "run_merge", "join the shards of a collection"),
    "profile": Command("nemo_rl.collect.commands", "run_profile", "statistics of a collection, pass@k, a curriculum"),
    "submit": Command("nemo_rl.launch.submit", "run", "run a collection as Slurm jobs"),
    "route": Command("nemo_rl.collect.slurm.router", "run", "one address before several OpenAI-compatible servers"),
}


def main() -> None:
    """The entry point of the script `nemo-rl`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if arguments else EXIT_BAD_USAGE
    name, *rest = arguments
    if name not in COMMANDS:
        sys.stderr.write(f"no such command: {name!r}{suggest_name(name, COMMANDS)}\n{usage()}")
        return EXIT_BAD_USAGE
    command = COMMANDS[name]
    return getattr(importlib.import_module(command.module), command.function)(rest)


def usage() -> str:
    """Every command with its summary."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(("usage: nemo-rl COMMAND ...", "", *lines, "", "nemo-rl COMMAND --help tells more.")) + "\n"
